"""How hard a prompt is, from 0 to 1, and which teacher gets it (paper §3.3).

    difficulty = 0.4 kind + 0.2 length + 0.4 steps

`kind` is what the question asks for, `length` the logarithm of its words (1,000 and more count 1), `steps` the mean
number of reasoning steps in the neighbours' reasoning (20 and more count 1).

Where cheap teachers are asked first (`distill.probe`), their disagreement, or the share of them that miss a known
answer, is weighed in:  (1 - weight) difficulty + weight probe.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence

from configs.distill import TeacherConfig
from data.distill.prompts import Prompt
from data.retrieval.exemplar_index import Neighbour

KIND_WEIGHT, LENGTH_WEIGHT, STEPS_WEIGHT = 0.4, 0.2, 0.4
MAX_WORDS, MAX_STEPS = 1000, 20
KINDS = {"fact": 0.1, "definition": 0.2, "person": 0.2, "place": 0.2, "explanation": 0.4}
SAME_ANSWER = 0.6  # agreement from which two answers count as the same
_DEMANDING = re.compile(
    r"\b(?:prove|derive|calculate|compute|solve|how many|how much|implement|program|algorithm|function|optimi[sz]e"
    r"|why|compare|analy[sz]e|step by step|essay|story|poem|translate)\b",
    re.IGNORECASE,
)
_STEP = re.compile(r"[.!?](?:\s|$)|\n")
_WORD = re.compile(r"\w+")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def prompt_difficulty(prompt: Prompt, neighbours: Sequence[Neighbour]) -> float:
    """0 (easiest) to 1, to four digits."""
    kind = KINDS.get(prompt.kind)
    if kind is None:  # an open instruction: count the demanding words in it
        kind = min(1.0, 0.3 + 0.35 * len({word.lower() for word in _DEMANDING.findall(prompt.query)}))
    words = len(prompt.query.split())
    length = min(1.0, math.log(max(1, words)) / math.log(MAX_WORDS))
    counts = [count_steps(neighbour.record.synthetic_reasoning) for neighbour in neighbours]
    steps = min(1.0, sum(counts) / len(counts) / MAX_STEPS) if counts else 0.0
    return round(KIND_WEIGHT * kind + LENGTH_WEIGHT * length + STEPS_WEIGHT * steps, 4)


def count_steps(reasoning: str) -> int:
    """Sentences or lines of a reasoning."""
    return sum(1 for part in _STEP.split(reasoning) if part.strip())


def blend_probe(difficulty: float, probe: float | None, weight: float) -> float:
    """Difficulty with the probes' disagreement weighed in; unchanged where no probe answered."""
    return difficulty if probe is None else round((1 - weight) * difficulty + weight * probe, 4)


def choose_teacher(teachers: Sequence[TeacherConfig], difficulty: float) -> TeacherConfig:
    """The teacher with the lowest threshold that covers the difficulty; the last one if none does."""
    ranked = sorted(teachers, key=lambda teacher: teacher.up_to)
    return next((teacher for teacher in ranked if difficulty <= teacher.up_to), ranked[-1])


def next_teacher(teachers: Sequence[TeacherConfig], after: TeacherConfig) -> TeacherConfig | None:
    """The teacher for harder prompts than those of `after`; None if `after` has the hardest."""
    ranked = sorted(teachers, key=lambda teacher: teacher.up_to)
    return next(iter(ranked[ranked.index(after) + 1 :]), None)


def probe_disagreement(answers: Sequence[str | None], reference: str | None) -> float | None:
    """How far the probes' answers (None: no answer) disagree, 0 to 1; None if there is no answer at all.

    With a known answer it is the share of probes that miss it, else 1 - mean pairwise agreement.
    """
    if all(answer is None for answer in answers):
        return None
    if reference is not None:
        right = sum(answer is not None and agreement(answer, reference) >= SAME_ANSWER for answer in answers)
        return round(1 - right / len(answers), 4)
    return round(1 - mean_agreement(answers), 4)


def agreement(first: str, second: str) -> float:
    """0 to 1: 1 for the same words; 0 if both contain numbers and the last ones differ; else the F1 of their words.

    The last number decides because worked exercises end in their result.
    """
    left, right = ([word.lower() for word in _WORD.findall(text)] for text in (first, second))
    if left == right:
        return 1.0
    lasts = [float(numbers[-1].replace(",", "")) for text in (first, second) if (numbers := _NUMBER.findall(text))]
    if len(lasts) == 2:
        return float(lasts[0] == lasts[1])
    if not left or not right:
        return 0.0
    shared = (Counter(left) & Counter(right)).total()
    return 2 * shared / (len(left) + len(right))


def mean_agreement(answers: Sequence[str | None]) -> float:
    """The mean over all pairs; a missing answer agrees with nothing. Needs two answers or more."""
    pairs = [(a, b) for at, a in enumerate(answers) for b in answers[at + 1 :]]
    return sum(0.0 if a is None or b is None else agreement(a, b) for a, b in pairs) / len(pairs)
