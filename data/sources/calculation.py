"""Worked arithmetic as data: the operations of a solution in order, their evaluation, and their text.

An operand is a number or the result of an earlier operation, so that a solution can be worked out again with another
result in one place, and everything that follows from it changes too (`data.sources.slips`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Operator = Literal["+", "-", "*"]
_COMPUTE: dict[Operator, Callable[[int, int], int]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
}


@dataclass(frozen=True)
class Result:
    """Refers to the result of an operation by its position in the solution, from 0."""

    position: int


@dataclass(frozen=True)
class Operation:
    """One step of a solution: `left operator right`."""

    left: int | Result
    operator: Operator
    right: int | Result


@dataclass(frozen=True)
class Statement:
    """A step as it is written: `left operator right = result`. The result may be wrong (`is_right`)."""

    left: int
    operator: Operator
    right: int
    result: int

    @property
    def truth(self) -> int:
        """The right result for these operands."""
        return _COMPUTE[self.operator](self.left, self.right)

    @property
    def is_right(self) -> bool:
        """Whether the stated result is the right one."""
        return self.result == self.truth

    def __str__(self) -> str:
        return f"{self.left} {self.operator} {self.right} = {self.result}."


def work_out(operations: Sequence[Operation], result_of: Callable[[Statement], int] | None = None) -> list[Statement]:
    """Evaluate the operations in order; each result is used by those that refer to it.

    `result_of`: the result to state in place of the right one, given the right statement; None: the right one.
    """
    statements: list[Statement] = []
    for operation in operations:
        left, right = (
            statements[operand.position].result if isinstance(operand, Result) else operand
            for operand in (operation.left, operation.right)
        )
        statement = Statement(left, operation.operator, right, _COMPUTE[operation.operator](left, right))
        if result_of is not None:
            statement = Statement(left, operation.operator, right, result_of(statement))
        statements.append(statement)
    return statements


def text_of(statements: Iterable[Statement]) -> str:
    """The statements as a rationale: '3 * 4 = 12. 2 * 6 = 12. 12 + 12 = 24.'"""
    return " ".join(map(str, statements))


def sum_of(operands: Sequence[int | Result], at: int) -> list[Operation]:
    """The additions that sum the operands from left to right, if the first of them has position `at`."""
    operations: list[Operation] = []
    for operand in operands[1:]:
        left = Result(at + len(operations) - 1) if operations else operands[0]
        operations.append(Operation(left, "+", operand))
    return operations
