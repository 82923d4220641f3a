"""Find the equations in a text and evaluate them: which steps of a calculation are right, and use known numbers?

A step is two sides joined by `=`, at least one with an operator: `3 * 4 = 12`, `2 + 3 = 10 / 2`, `7 = 2 * 3 + 1`; a
chain `a = b = c` has two steps. Values are exact fractions. Only numbers, + - * /, brackets and `=` are read, so other
text has no effect on a step. The time is linear in the length of the text.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

# Fractions are exact, so their digits could grow without end: these two bound the time that a hostile answer takes.
LONGEST_NUMBER = 30  # characters; longer numbers are ignored
LONGEST_SIDE = 200  # numbers and operators of one side of an equation
_CHARACTERS = str.maketrans({"×": "*", "·": "*", "⋅": "*", "∙": "*", "÷": "/", "∕": "/", "−": "-", "–": "-", "‑": "-"})
_GROUPED = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")  # thousands
_BULLET = re.compile(r"^[ \t]*[-*+][ \t]+", re.MULTILINE)
_TOKEN = re.compile(
    r"(?P<number>\d+(?:\.\d+)?(?:[ ]*%)?)|(?P<operator>[-+*/()=])|(?P<word>[^\W\d]+)|(?P<other>[^ \t$€£])"
)
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}
Side = Sequence[str]  # its tokens


@dataclass(frozen=True)
class CheckedStep:
    """An evaluated equation.

    `is_known`: it uses numbers of the question or of earlier steps (see `steps_of`). `value`: of the right side; None
    where that cannot be computed.
    """

    is_right: bool
    is_known: bool
    value: Fraction | None


def numbers_of(text: str) -> set[Fraction]:
    """The numbers in a text that are written in digits; a percentage gives two, 5% both 0.05 and 5."""
    numbers = [match["number"] for match in _TOKEN.finditer(_plain(text)) if match["number"]]
    whole = [number.rstrip(" %") for number in numbers]
    return {_value(number) for number in [*numbers, *whole] if len(number) <= LONGEST_NUMBER}


def steps_of(text: str, question: str) -> list[CheckedStep]:
    """The steps of `text` in order, checked against the numbers of `question`.

    A step that multiplies or divides is known if at most half of its operands are new: a factor may be general
    knowledge, such as the number of a spider's legs. A step that only adds and subtracts must have no new operand. A
    step that decomposes a known number (`7 = 2 * 3 + 1`) is known too. The numbers of a right and known step become
    known.
    """
    known_numbers, steps = numbers_of(question), list[CheckedStep]()
    for left, right in _equations(text):
        left_value, right_value = evaluate(left), evaluate(right)
        numbers = [_value(token) for token in (*left, *right) if token[0].isdigit()]
        # Operands are the numbers of a side with an operator; a side that is one number is a result.
        operands = [_value(token) for side in (left, right) if len(side) > 2 for token in side if token[0].isdigit()]
        new_count = sum(number not in known_numbers for number in operands)
        is_additive = not {"*", "/"} & {*left, *right}
        decomposes = len(left) == 1 and left_value in known_numbers
        is_known = decomposes or (new_count == 0 if is_additive else 2 * new_count <= len(operands))
        # The sides are equal, or a side that is one number is the other side rounded to its decimals.
        decimals = [len(side[-1].partition(".")[2]) for side in (left, right) if len(side) == 1]
        tolerance = max((Fraction(1, 2 * 10**count) for count in decimals if count), default=Fraction(0))
        is_right = left_value is not None and right_value is not None and abs(left_value - right_value) <= tolerance
        steps.append(CheckedStep(is_right, is_known, right_value))
        if is_right and is_known:
            known_numbers |= {*numbers, *(value for value in (left_value, right_value) if value is not None)}
    return steps


def evaluate(tokens: Side) -> Fraction | None:
    """Evaluate an expression by operator precedence (shunting yard); None if it is malformed or divides by zero.

    Without recursion, so that brackets may be nested to any depth.
    """
    values: list[Fraction] = []
    operators: list[str] = []
    sign, expects_number = 1, True

    def apply() -> bool:
        """Apply the last operator to the last two values; False if that is not possible."""
        if operators[-1] == "(" or len(values) < 2:
            return False
        operator, right, left = operators.pop(), values.pop(), values.pop()
        if operator == "/" and right == 0:
            return False
        match operator:
            case "+":
                values.append(left + right)
            case "-":
                values.append(left - right)
            case "*":
                values.append(left * right)
            case _:
                values.append(left / right)
        return True

    for token in tokens:
        if expects_number:
            # A minus sign may precede a number (`3 * -4`), but not a bracket.
            if token == "(" and sign == 1:
                operators.append(token)
            elif token in "+-" and sign == 1:
                sign = -1 if token == "-" else 1
            elif token[0].isdigit():
                values.append(sign * _value(token))
                sign, expects_number = 1, False
            else:
                return None
        elif token == ")":
            while operators and operators[-1] != "(":
                if not apply():
                    return None
            if not operators:
                return None
            operators.pop()
        elif token in _PRECEDENCE:
            # What binds as strongly comes first, from left to right: 8 - 3 - 2 is 3. A bracket has no precedence and
            # stops this.
            while operators and _PRECEDENCE.get(operators[-1], 0) >= _PRECEDENCE[token]:
                if not apply():
                    return None
            operators.append(token)
            expects_number = True
        else:
            return None
    while operators:
        if not apply():
            return None
    return values[0] if len(values) == 1 and not expects_number else None


def _equations(text: str) -> Iterator[tuple[Side, Side]]:
    """The pairs of adjacent sides of every equation that has an operator."""
    for tokens in _token_runs(text):
        sides: list[list[str]] = [[]]
        for token in tokens:
            if token == "=":
                sides.append([])
            else:
                sides[-1].append(token)
        for left, right in pairwise(sides):
            # From the second token on: a leading sign is not an operation.
            has_operator = any(token in _PRECEDENCE for side in (left, right) for token in side[1:])
            if left and right and has_operator and max(len(left), len(right)) <= LONGEST_SIDE:
                yield left, right


def _token_runs(text: str) -> Iterator[list[str]]:
    """The uninterrupted sequences of numbers, operators and `=` in a text.

    A word between a number and an operator (`3 eggs + 4`) is a unit, which is ignored; `x` between numbers is a
    multiplication sign; anything else ends a sequence.
    """
    run: list[str] = []
    unit: str | None = None
    for match in _TOKEN.finditer(_plain(text)):
        token, after_number = match.group(), bool(run) and run[-1][0].isdigit()
        if match["word"] and after_number and unit is None:
            unit = token
            continue
        if match["number"] and len(token) <= LONGEST_NUMBER:
            if unit in ("x", "X"):
                run.append("*")
            elif after_number:  # two numbers without an operator between them
                yield run
                run = []
            run.append(token)
        elif match["operator"]:
            run.append(token)
        else:
            yield run
            run = []
        unit = None
    yield run


def _plain(text: str) -> str:
    """`text` with ASCII operators, and without list bullets and thousands separators."""
    return _GROUPED.sub("", _BULLET.sub("\n", text.translate(_CHARACTERS)))


def _value(number: str) -> Fraction:
    """The value of a number token; `5%` is 1/20."""
    return Fraction(number.rstrip(" %")) / (100 if number.endswith("%") else 1)
