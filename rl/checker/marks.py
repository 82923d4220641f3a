"""The checker's marks: the criteria of `rl.judge`, computed deterministically from what can be verified.

Claims and instructions in a text have no effect: only the equations of the reasoning are read, and of the answer only
what the graders of the evaluations read.
"""

import math

from nautile.data.chat_template import ParsedReply
from nautile.data.sources.reasoning_gym import Problem
from nautile.evals.benchmarks.items import grade
from nautile.evals.benchmarks.stand_ins import problem_item
from nautile.evals.graders.numbers import parse_number
from nautile.rl.checker.arithmetic import CheckedStep, numbers_of, steps_of

UNCHECKED, SKIPPED = 3, 2  # marks of reasoning without a step, for a question without and with several numbers
SENTENCE, PARAGRAPH = 6, 40  # most extra words around the answer for a `follow` of 4 and of 3


def marks(question: str, reasoning: str, answer: str, reference: str | None) -> dict[str, int]:
    """The four marks of an answer; no mark if it could not be graded. An empty `answer` means that there is none.

    `reason`: 1 without reasoning; else 1 to 5 by the share of steps that are right and use known numbers, 5 only if all
    do. `answer`: 5 if right, else 1. `follow`: 5 for nothing but the answer, less with words around it, 1 for no
    answer.

    `overall` of a right answer: 100 if all other marks are 5; else 89, less 5 for each mark that `reason` is below 5
    and 4 for each that `follow` is (at least 53). Of a wrong answer: 4 for each mark of `reason` above 1 and 3 for each
    of `follow` (at most 28).
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
    """Whether the strict grader accepts the answer; without a reference, whether it is the last good step's result.

    None if the grader has no verdict.
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
    # The words around an answer are counted, whatever they say.
    extra_words = words - max(1, len((reference or "").split()))
    if extra_words <= 0:
        return 5
    return 4 if extra_words <= SENTENCE and len(answer.split("\n")) == 1 else 3 if extra_words <= PARAGRAPH else 2
