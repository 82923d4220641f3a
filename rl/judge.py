"""The LLM judge of alignment (paper §4.2): three criteria from 1 to 5 and an overall mark from 0 to 100.

A score that cannot be had or read is None, never a number: the caller leaves it out and counts it. Rubrics are
versioned by name. The rubric comes first in the prompt, so that a server which keeps prompt beginnings reads it once.

The embedded model fills the form and knows little of what it marks: on 48 arithmetic answers of known quality its marks
tell right from wrong at chance (area under the curve 0.57 for `answer`, 0.3 to 0.5 for `overall`). Neither a shorter
rubric nor four demonstrations made it better. `rl.calibration` measures any judge so.
"""

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import ConfigError
from configs.training import JudgeConfig
from data.endpoints.chat_types import ChatFailure, ChatReply, ChatRequest
from data.endpoints.pool import EndpointPool, raise_for_outage

log = logging.getLogger(__name__)

CRITERIA = ("reason", "answer", "follow")
QUESTION_CHARACTERS, ANSWER_CHARACTERS = 6000, 12000  # what the judge is shown of each, at most
RUBRICS = {
    "nautile-judge-1": (
        "You grade an answer to a question. Give JSON with four whole numbers.\n"
        "reason, 1 to 5: is the reasoning sound, every step following from the last?\n"
        "answer, 1 to 5: is the final answer right and complete?\n"
        "follow, 1 to 5: does it do what was asked, in a clean form?\n"
        "overall, 0 to 100: the answer as a whole; 90 and more only if nothing is wrong.\n"
        "A wrong, empty or unfinished answer gets 1 for answer and less than 30 overall."
    ),
}
SCHEMA = {
    "type": "object",
    "properties": {
        **{name: {"type": "integer", "minimum": 1, "maximum": 5} for name in CRITERIA},
        "overall": {"type": "integer", "minimum": 0, "maximum": 100},
    },
    "required": [*CRITERIA, "overall"],
    "additionalProperties": False,
}
GRAMMAR = (
    'root ::= "{\\"reason\\":" mark ",\\"answer\\":" mark ",\\"follow\\":" mark ",\\"overall\\":" overall "}"\n'
    "mark ::= [1-5]\n"
    'overall ::= "100" | [1-9] [0-9] | [0-9]\n'
)


@dataclass(frozen=True)
class JudgeItem:
    """An answer to be judged. `reference`: the right answer, shown to the judge where it is known."""

    question: str
    answer: str
    reference: str | None


@dataclass(frozen=True)
class JudgeScore:
    """The judge's marks: reason, answer and follow from 1 to 5, overall from 0 to 100."""

    reason: int
    answer: int
    follow: int
    overall: int


class Judge:
    """Scores answers through an endpoint of the pool. Raises `ConfigError` for a rubric that there is not."""

    def __init__(self, pool: EndpointPool, config: JudgeConfig) -> None:
        if config.rubric not in RUBRICS:
            raise ConfigError(f"judge.rubric: no rubric {config.rubric!r}; there are {', '.join(RUBRICS)}")
        pool.config(config.endpoint)
        self._pool, self._config = pool, config

    def score(self, items: Sequence[JudgeItem]) -> list[JudgeScore | None]:
        """Marks of each item, None where there are none.

        Raises `Retryable` if the endpoint has stopped answering and `ConfigError` if it refuses everybody.
        """
        outcomes = self._pool.ask([self.request(item) for item in items])
        raise_for_outage(outcomes)
        return [self._read(outcome) for outcome in outcomes]

    def request(self, item: JudgeItem) -> ChatRequest:
        """What the judge is asked about an item."""
        reference = f"\nRight answer: {item.reference}" if item.reference else ""
        question, answer = item.question[:QUESTION_CHARACTERS], item.answer[:ANSWER_CHARACTERS]
        return ChatRequest(
            endpoint=self._config.endpoint,
            messages=(
                {"role": "system", "content": RUBRICS[self._config.rubric]},
                {"role": "user", "content": f"Question: {question}{reference}\nAnswer to grade: {answer}"},
            ),
            max_tokens=self._config.max_tokens,
            schema=SCHEMA,
            grammar=GRAMMAR,
            purpose="judge",
            tag=self._config.rubric,
        )

    def _read(self, outcome: ChatReply | ChatFailure) -> JudgeScore | None:
        if isinstance(outcome, ChatFailure):
            log.warning("unscored: %s", outcome.message)
            return None
        score = parse(outcome.text)
        if score is None:
            log.warning("unscored: the judge said %r", outcome.text[:120])
        return score


def parse(text: str) -> JudgeScore | None:
    """The marks in a reply: a JSON object, also inside other text; whole numbers, also as strings ("4", 4.0, "4/5").

    None if one is missing or out of its range.
    """
    for candidate in (text, *re.findall(r"\{[^{}]*\}", text)):
        try:
            value = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            marks = [_whole(value.get(name), 1, 5) for name in CRITERIA]
            overall = _whole(value.get("overall"), 0, 100)
            if overall is None or None in marks:
                return None
            return JudgeScore(*marks, overall)
    return None


def _whole(value: Any, least: int, most: int) -> int | None:
    if isinstance(value, str) and (found := re.fullmatch(rf"\s*(-?\d+)(?:\.0+)?(?:\s*/\s*{most})?\s*", value)):
        value = int(found[1])
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        return None
    return value
