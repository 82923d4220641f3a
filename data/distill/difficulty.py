"""The difficulty of a prompt, from 0 to 1, and the choice of its teacher (paper §3.3).

    difficulty = 0.4 kind + 0.2 length + 0.4 steps

`kind` is a value for what the question asks for, `length` the logarithm of its number of words (1 for 1,000 words and
more), `steps` the mean number of steps in the neighbours' reasoning (1 for 20 steps and more).

If cheap teachers are asked first (`distill.probe`), their disagreement, or the share of them that miss a known answer,
is blended in:  (1 - weight) difficulty + weight probe.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence

from nautile.configs.distill import TeacherConfig
from nautile.data.distill.prompts import Prompt
from nautile.data.retrieval.exemplar_index import Neighbour

KIND_WEIGHT, LENGTH_WEIGHT, STEPS_WEIGHT = 0.4, 0.2, 0.4
MAX_WORDS, MAX_STEPS = 1000, 20
KINDS = {"fact": 0.1, "definition": 0.2, "person": 0.2, "place": 0.2, "explanation": 0.4}
SAME_ANSWER = 0.6  # agreement from which two answers count as the same
_DEMANDING = re.compile(
    r"\b(?:prove|derive|calculate|compute|solve|how many|how much|implement|program|algorithm|function|optimi[sz]e"
    r"|why|compare|analy[sz]e|step by step|essay|story|poem|translate)\b",
    re.IGNORECASE,
)
# A full stop counts before white space only: "3.5" is one number, "3.5. Then 4." two steps.
_STEP = re.compile(r"[.!?](?:\s|$)|\n")
_WORD = re.compile(r"\w+")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def prompt_difficulty(prompt: Prompt, neighbours: Sequence[Neighbour]) -> float:
    """Difficulty from 0 (easiest) to 1, rounded to four digits."""
    kind = KINDS.get(prompt.kind)
    if kind is None:  # an open instruction: count the demanding words in it
        # 0.3 without such a word, the maximum with two different ones.
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
    """Blend the probes' disagreement into the difficulty; unchanged if no probe answered."""
    return difficulty if probe is None else round((1 - weight) * difficulty + weight * probe, 4)


def choose_teacher(teachers: Sequence[TeacherConfig], difficulty: float) -> TeacherConfig:
    """The teacher with the lowest `up_to` that is at least the difficulty; the one with the highest if none is."""
    ranked = sorted(teachers, key=lambda teacher: teacher.up_to)
    return next((teacher for teacher in ranked if difficulty <= teacher.up_to), ranked[-1])


def next_teacher(teachers: Sequence[TeacherConfig], after: TeacherConfig) -> TeacherConfig | None:
    """The teacher with the next higher `up_to` than `after`; None if there is none."""
    ranked = sorted(teachers, key=lambda teacher: teacher.up_to)
    return next(iter(ranked[ranked.index(after) + 1 :]), None)


def probe_disagreement(answers: Sequence[str | None], reference: str | None) -> float | None:
    """Disagreement of the probes' answers (None: no answer), from 0 to 1; None if there is no answer at all.

    With a known answer it is the share of probes that miss it, else 1 - mean pairwise agreement.
    """
    if all(answer is None for answer in answers):
        return None
    if reference is not None:
        right = sum(answer is not None and agreement(answer, reference) >= SAME_ANSWER for answer in answers)
        return round(1 - right / len(answers), 4)
    return round(1 - mean_agreement(answers), 4)


def agreement(answer: str, other: str) -> float:
    """Agreement of two answers, from 0 to 1.

    1 for the same words. If both contain numbers, whether their last numbers are equal, because worked exercises end in
    their result. Else the F1 score of their words.
    """
    words, other_words = ([word.lower() for word in _WORD.findall(text)] for text in (answer, other))
    if words == other_words:
        return 1.0
    last_numbers = [
        float(numbers[-1].replace(",", "")) for text in (answer, other) if (numbers := _NUMBER.findall(text))
    ]
    if len(last_numbers) == 2:
        return float(last_numbers[0] == last_numbers[1])
    if not words or not other_words:
        return 0.0
    overlap = (Counter(words) & Counter(other_words)).total()
    return 2 * overlap / (len(words) + len(other_words))


def mean_agreement(answers: Sequence[str | None]) -> float:
    """Mean agreement of all pairs of at least two answers; a missing answer agrees with none."""
    pairs = [(a, b) for i, a in enumerate(answers) for b in answers[i + 1 :]]
    return sum(0.0 if a is None or b is None else agreement(a, b) for a, b in pairs) / len(pairs)
