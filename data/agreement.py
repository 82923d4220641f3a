"""How far answers agree: for probes of difficulty (data/probe.py) and for taking the majority of several."""

import re
from collections import Counter
from collections.abc import Sequence

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
