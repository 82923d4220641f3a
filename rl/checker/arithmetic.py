"""Find the equations in a text and compute them: which steps of a calculation are right, and do they use its numbers?

A step is a pair of sides joined by `=`, at least one with an operator: `3 * 4 = 12`, `2 + 3 = 10 / 2`, `7 = 2 * 3 + 1`;
a chain `a = b = c` has two. Values are exact fractions. Nothing but numbers, + - * /, brackets and `=` is read, so no
other text has any effect on a step, and every text takes time in proportion to its length.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

LONGEST_NUMBER = 30  # digits; longer ones are no part of a step
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
    """A computed equation. `known`: it starts from numbers of the question or of steps before it. `value`: its result,
    the side on the right; None where that cannot be computed."""

    is_right: bool
    is_known: bool
    value: Fraction | None


def numbers_of(text: str) -> set[Fraction]:
    """The numbers written in digits in a text, a percentage also as it stands."""
    numbers = [match["number"] for match in _TOKEN.finditer(_plain(text)) if match["number"]]
    whole = [number.rstrip(" %") for number in numbers]
    return {_value(number) for number in [*numbers, *whole] if len(number) <= LONGEST_NUMBER}


def steps_of(text: str, question: str) -> list[CheckedStep]:
    """The steps in `text`, in order, which is about the numbers of `question`.

    A step is known if no more than half of the numbers it calculates with are new, none where it only adds and
    subtracts: a factor may be general knowledge, as a spider's legs, a summand is hardly ever. A step that takes a
    known number apart (`7 = 2 * 3 + 1`) is known too. The numbers of a step that is right and known are known.
    """
    known, steps = numbers_of(question), list[CheckedStep]()
    for left, right in _equations(text):
        first, second = evaluate(left), evaluate(right)
        operands = [_value(token) for token in (*left, *right) if token[0].isdigit()]
        calculated = [_value(token) for side in (left, right) if len(side) > 2 for token in side if token[0].isdigit()]
        new = sum(number not in known for number in calculated)
        additive = not {"*", "/"} & {*left, *right}
        apart = len(left) == 1 and first in known
        is_known = apart or (new == 0 if additive else 2 * new <= len(calculated))
        # Equal, or one side is the other rounded to the decimals that it has.
        places = [len(side[-1].partition(".")[2]) for side in (left, right) if len(side) == 1]
        within = max((Fraction(1, 2 * 10**count) for count in places if count), default=Fraction(0))
        is_right = first is not None and second is not None and abs(first - second) <= within
        steps.append(CheckedStep(is_right, is_known, second))
        if is_right and is_known:
            known |= {*operands, *(value for value in (first, second) if value is not None)}
    return steps


def evaluate(tokens: Side) -> Fraction | None:
    """The value of an expression; None if it is none, or divides by zero. Brackets may be nested to any depth."""
    values: list[Fraction] = []
    operators: list[str] = []
    sign, expects_number = 1, True

    def apply() -> bool:
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
    """The pairs of neighbouring sides of every equation that has an operator."""
    for run in _runs(text):
        sides: list[list[str]] = [[]]
        for token in run:
            if token == "=":
                sides.append([])
            else:
                sides[-1].append(token)
        for left, right in pairwise(sides):
            calculates = any(token in _PRECEDENCE for side in (left, right) for token in side[1:])  # no mere sign
            if left and right and calculates and max(len(left), len(right)) <= LONGEST_SIDE:
                yield left, right


def _runs(text: str) -> Iterator[list[str]]:
    """The stretches of numbers and operators. A word between a number and what is done with it (`3 eggs + 4`) is a
    unit and is passed over; `x` between numbers is a sign of multiplication; all else ends a stretch."""
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
            elif after_number:  # two numbers beside one another, with or without a word between them
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
    return _GROUPED.sub("", _BULLET.sub("\n", text.translate(_CHARACTERS)))


def _value(number: str) -> Fraction:
    return Fraction(number.rstrip(" %")) / (100 if number.endswith("%") else 1)
