"""How hard a prompt is, from 0 to 1, and which teacher gets it (paper §3.3).

    difficulty = 0.4 kind + 0.2 length + 0.4 steps

`kind` is what the question asks for, `length` the logarithm of its words (1,000 and more count 1), `steps` the mean
number of reasoning steps in the neighbours' worked reasoning (20 and more count 1).

Where cheap teachers were asked first (`distill.probe`), what their answers are apart by, or the share of them that miss
a known answer, is weighed in:  (1 - weight) difficulty + weight probe.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence

from configs.distill import TeacherConfig
from data.distill.prompts import Prompt
from data.retrieval.exemplar_index import Neighbour

KIND, LENGTH, STEPS = 0.4, 0.2, 0.4
LONGEST, MOST_STEPS = 1000, 20
KINDS = {"fact": 0.1, "definition": 0.2, "person": 0.2, "place": 0.2, "explanation": 0.4}
_DEMANDING = re.compile(
    r"\b(?:prove|derive|calculate|compute|solve|how many|how much|implement|program|algorithm|function|optimi[sz]e"
    r"|why|compare|analy[sz]e|step by step|essay|story|poem|translate)\b",
    re.IGNORECASE,
)
_STEP = re.compile(r"[.!?](?:\s|$)|\n")


def difficulty(prompt: Prompt, neighbours: Sequence[Neighbour]) -> float:
    """0 (easiest) to 1, to four digits."""
    kind = KINDS.get(prompt.kind)
    if kind is None:  # an open instruction: by what it demands
        kind = min(1.0, 0.3 + 0.35 * len({found.lower() for found in _DEMANDING.findall(prompt.query)}))
    words = len(prompt.query.split())
    length = min(1.0, math.log(max(1, words)) / math.log(LONGEST))
    counts = [steps(neighbour.record.synthetic_reasoning) for neighbour in neighbours]
    reasoning = min(1.0, sum(counts) / len(counts) / MOST_STEPS) if counts else 0.0
    return round(KIND * kind + LENGTH * length + STEPS * reasoning, 4)


def blended(score: float, probe: float | None, weight: float) -> float:
    """The score with what a probe found; as it was where no probe answered."""
    return score if probe is None else round((1 - weight) * score + weight * probe, 4)


def steps(reasoning: str) -> int:
    """Sentences or lines of a worked reasoning."""
    return sum(1 for part in _STEP.split(reasoning) if part.strip())


def choose(teachers: Sequence[TeacherConfig], score: float) -> TeacherConfig:
    """The teacher of the lowest threshold that the score does not exceed; the highest one above all thresholds."""
    ranked = sorted(teachers, key=lambda teacher: teacher.up_to)
    return next((teacher for teacher in ranked if score <= teacher.up_to), ranked[-1])


ALIKE = 0.6  # from here on two answers are taken to say the same
_WORD = re.compile(r"\w+")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def agreement(one: str, other: str) -> float:
    """0 to 1: 1 for the same words; 0 if both end in numbers that differ; else the F1 of their words.

    A long answer is as good as its last number, as in worked exercises; words agree by how many they share.
    """
    left, right = _words(one), _words(other)
    if left == right:
        return 1.0
    numbers = [_last_number(text) for text in (one, other)]
    if None not in numbers:
        return float(numbers[0] == numbers[1])
    if not left or not right:
        return 0.0
    shared = (Counter(left) & Counter(right)).total()
    return 2 * shared / (len(left) + len(right))


def mean_agreement(answers: Sequence[str | None]) -> float:
    """The mean over all pairs; a missing answer agrees with nothing. Needs two at least."""
    pairs = [(a, b) for at, a in enumerate(answers) for b in answers[at + 1 :]]
    return sum(0.0 if a is None or b is None else agreement(a, b) for a, b in pairs) / len(pairs)


def majority(answers: Sequence[str | None]) -> tuple[int | None, float]:
    """(index of the first answer that most others say too, the share of all that do); (None, 0) if there is none."""
    best, most = None, 0
    for index, answer in enumerate(answers):
        if answer is None:
            continue
        said = sum(1 for other in answers if other is not None and agreement(answer, other) >= ALIKE)
        if said > most:
            best, most = index, said
    return best, most / len(answers) if answers else 0.0


def _words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None
