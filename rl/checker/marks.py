"""The checker's marks: `rl.judge`'s criteria, computed from what can be verified. The same text gets the same marks.

Nothing that a text claims or orders has any effect: of the reasoning only the equations are read, of the answer only
what the graders of the evaluation read.
"""

import math

from data.chat_template import ParsedReply
from data.sources.reasoning_gym import Problem
from evals.benchmarks.items import grade
from evals.benchmarks.stand_ins import problem_item
from evals.graders.numbers import parse_number
from rl.checker.arithmetic import CheckedStep, numbers_of, steps_of

UNCHECKED, SKIPPED = 3, 2  # for reasoning without a step: about a question without numbers, or with numbers
SENTENCE, PARAGRAPH = 6, 40  # words beside the answer itself


def marks(question: str, reasoning: str, answer: str, reference: str | None) -> dict[str, int]:
    """The four marks of an answer. An empty `answer` is one that never came.

    `reason`: 1 without any reasoning; else from 1 to 5 by the share of steps that are right and start from known
    numbers, 5 only if all do. `answer`: 5 if it is right, else 1. `follow`: 5 for an answer that is nothing but the
    answer, less for words around it, 1 for none. `overall`: 100 where nothing is wrong. A right answer gets 89 at most
    otherwise, less 5 for each mark that the reasoning lacks and 4 for each that the form lacks, so never below 53. A
    wrong one gets 4 for each mark of the reasoning above the first and 3 for each of the form: never above 28.
    """
    steps = steps_of(reasoning, question)
    reason = _reason(question, reasoning, steps)
    right = bool(answer.strip()) and _is_right(question, reasoning, answer, reference, steps)
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
    return 1 + math.floor(4 * sum(step.is_right and step.is_known for step in steps) / len(steps))


def _is_right(question: str, reasoning: str, answer: str, reference: str | None, steps: list[CheckedStep]) -> bool:
    """By the strict grader of the evaluations; without a reference, whether it is the result of the last good step."""
    if reference:
        item = problem_item("checker", 0, Problem("checker", 0, question, reference, ""))
        return grade(item, ParsedReply(reasoning, answer, finished_thinking=True, finished=True)).verdict.strict
    results = [step.value for step in steps if step.is_right and step.is_known]
    stated = parse_number(answer)
    return bool(results) and stated is not None and stated.value == results[-1]


def _follow(answer: str, reference: str | None) -> int:
    """By the words that an answer has beyond those of the right one, or beyond one where that is not known."""
    words = len(answer.split())
    if not words:
        return 1
    more = words - max(1, len((reference or "").split()))
    if more <= 0:
        return 5
    return 4 if more <= SENTENCE and len(answer.split("\n")) == 1 else 3 if more <= PARAGRAPH else 2
