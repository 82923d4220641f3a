"""A deterministic checker of arithmetic that stands in for an LLM judge: the server of endpoints of kind "checker".

It serves OpenAI's chat completions API on loopback, for the requests of `rl.judge.Judge`:

    python -m nautile.rl.checker --parent PID      prints the line {"url": ...} once it accepts requests

Any other request is refused with status 400. The sections of a request are data to mark, never instructions: only the
equations of the reasoning are read, and of the answer only what the graders of the evaluations read.

A step of a calculation is two sides joined by `=`, at least one with an operator: `3 * 4 = 12`, `2 + 3 = 10 / 2`,
`7 = 2 * 3 + 1`; a chain `a = b = c` has two steps. Values are exact fractions. Only numbers, + - * /, brackets and `=`
are read, so other text has no effect on a step. The time is linear in the length of the text.
"""

import argparse
import json
import math
import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from nautile.data.chat_template import ParsedReply
from nautile.data.endpoints.outgoing import read_fenced
from nautile.data.endpoints.own_server import CHECKER_MODEL, announce, child_arguments
from nautile.data.sources.reasoning_gym import Problem
from nautile.evals.benchmarks.items import grade
from nautile.evals.benchmarks.stand_ins import problem_item
from nautile.evals.graders.numbers import parse_number
from nautile.rl.judge import ANSWER, QUESTION, REASONING, REFERENCE, RUBRIC, VERSION

TITLES = ([QUESTION, REASONING, ANSWER], [QUESTION, REASONING, ANSWER, REFERENCE])
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
UNCHECKED, SKIPPED = 3, 2  # marks of reasoning without a step, for a question without and with several numbers
SENTENCE, PARAGRAPH = 6, 40  # most extra words around the answer for a `follow` of 4 and of 3


def completion(body: Any) -> str:
    """The reply to a request's JSON. Raises `ValueError` if it is not a judge's request."""
    try:
        system, user = (message["content"] for message in body["messages"])
        roles = [message["role"] for message in body["messages"]]
    except (TypeError, LookupError, ValueError):
        raise ValueError("not a judge's request: a system message with the rubric, then one user message") from None
    if roles != ["system", "user"] or system != RUBRIC:
        raise ValueError(f"the system message must be the rubric of the judge ({VERSION})")
    sections = read_fenced(user) if isinstance(user, str) else []
    if [title for title, _ in sections] not in TITLES:
        raise ValueError(f"the user message must have the sections {', '.join(TITLES[1])}; the last may be absent")
    question, reasoning, answer, *reference = (text for _, text in sections)
    return json.dumps(marks(question, reasoning, answer, next(iter(reference), None)))


async def _complete(request: Request) -> JSONResponse:
    try:
        text = completion(await request.json())
    except ValueError as error:  # JSON's own too
        return JSONResponse({"error": {"message": str(error), "type": "invalid_request_error"}}, 400)
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    # Zero tokens, not unknown ones: for unknown usage the client would reserve an estimate from its budget.
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    return JSONResponse({"object": "chat.completion", "model": CHECKER_MODEL, "choices": [choice], "usage": usage})


async def _list_models(request: Request) -> JSONResponse:
    return JSONResponse({"object": "list", "data": [{"id": CHECKER_MODEL, "object": "model"}]})


def main() -> None:
    """Serve on a free port until the parent process ends."""
    child_arguments(argparse.ArgumentParser(prog="python -m nautile.rl.checker", description="Serve the checker."))
    routes = [
        Route("/v1/chat/completions", _complete, methods=["POST"]),
        Route("/v1/models", _list_models),
    ]
    # Listening before the address is announced: the first request finds an open port.
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    announce(f"http://127.0.0.1:{listener.getsockname()[1]}/v1")
    config = uvicorn.Config(Starlette(routes=routes), log_level="warning", access_log=False, lifespan="off", ws="none")
    uvicorn.Server(config).run(sockets=[listener])


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
    knowledge, such as a spider's legs. One that only adds and subtracts must have no new operand. One that decomposes a
    known number (`7 = 2 * 3 + 1`) is known too. The numbers of a right and known step become known.
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

    A word between a number and an operator (`3 eggs + 4`) is ignored; `x` between numbers multiplies; all else ends
    one.
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


def marks(question: str, reasoning: str, answer: str, reference: str | None) -> dict[str, int]:
    """The four marks of an answer; no mark if it could not be graded. An empty `answer` means that there is none.

    `reason`: 1 without reasoning; else 1 to 5 by the share of steps that are right and use known numbers, 5 only if all
    do. `answer`: 5 if right, else 1. `follow`: 5 for nothing but the answer, less with words around it, 1 for no
    answer. `overall`: of a right answer 100 if all other marks are 5, else 53 to 85; of a wrong one at most 28.
    """
    steps = steps_of(reasoning, question)
    reason = _reason(question, reasoning, steps)
    right = _is_right(question, reasoning, answer, reference, steps) if answer.strip() else False
    if right is None:
        return {}
    follow = _follow(answer, reference)
    if not right:
        overall = 4 * (reason - 1) + 3 * (follow - 1)
    elif (reason, follow) == (5, 5):
        overall = 100
    else:
        overall = 89 - 5 * (5 - reason) - 4 * (5 - follow)
    return {"reason": reason, "answer": 5 if right else 1, "follow": follow, "overall": overall}


def _reason(question: str, reasoning: str, steps: list[CheckedStep]) -> int:
    if not reasoning.strip():
        return 1
    if not steps:
        return SKIPPED if len(numbers_of(question)) > 1 else UNCHECKED
    # Rounded down, so that 5 means that every step is right.
    return 1 + math.floor(4 * sum(step.is_right and step.is_known for step in steps) / len(steps))


def _is_right(
    question: str, reasoning: str, answer: str, reference: str | None, steps: list[CheckedStep]
) -> bool | None:
    """Whether the strict grader accepts the answer (None: no verdict), or without a reference the last good step's
    result.
    """
    if reference:
        # The same grader as in the evaluations, so that a reward and a benchmark agree on what is right.
        item = problem_item("checker", 0, Problem("checker", 0, question, reference, ""))
        return grade(item, ParsedReply(reasoning, answer, finished_thinking=True, finished=True)).verdict.strict
    results = [step.value for step in steps if step.is_right and step.is_known]
    stated = parse_number(answer)
    return bool(results) and stated is not None and stated.value == results[-1]


def _follow(answer: str, reference: str | None) -> int:
    """The mark of the form, by how many words an answer has more than the reference (unknown: more than one word)."""
    words = len(answer.split())
    if not words:
        return 1
    extra_words = words - max(1, len((reference or "").split()))
    if extra_words <= 0:
        return 5
    return 4 if extra_words <= SENTENCE and len(answer.split("\n")) == 1 else 3 if extra_words <= PARAGRAPH else 2


if __name__ == "__main__":
    main()
