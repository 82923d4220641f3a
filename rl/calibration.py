"""A judge measured on answers of known quality: does it tell right from wrong, and does it mark length?

The wrong answers are made from the right ones: given to another question, or with their numbers (in a text without
any, their words) changed. They are as long and as well formed as the right ones, so form alone does not give them away.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.stats import rankdata

from rl.judge import CRITERIA, Judge, JudgeItem, JudgeScore

MARKS = (*CRITERIA, "overall")


def calibrate(judge: Judge, right: Sequence[JudgeItem], seed: int = 0) -> dict[str, Any]:
    """Score the right answers and as many wrong ones. Plain data; a figure that cannot be had is None.

    `auc`: by mark, the chance that a right answer is marked above a wrong one (ties count half; 0.5 is chance);
    `mean_right`, `mean_wrong` and `spread` (standard deviation) of the overall mark; `length_correlation`: of the
    overall mark with the answer's length in characters. Errors as `Judge.score`.
    """
    wrong = corrupted(right, seed)
    scores = judge.score([*right, *wrong])
    good, bad = scores[: len(right)], scores[len(right) :]
    lengths = [len(item.answer) for item in (*right, *wrong)]
    scored = [(score.overall, length) for score, length in zip(scores, lengths, strict=True) if score is not None]
    overall = [mark for mark, _ in scored]
    return {
        "items": len(scores),
        "unscored": sum(score is None for score in scores),
        "auc": {mark: _auc(_marks(good, mark), _marks(bad, mark)) for mark in MARKS},
        "mean_right": _mean(_marks(good, "overall")),
        "mean_wrong": _mean(_marks(bad, "overall")),
        "spread": round(float(np.std(overall)), 4) if overall else None,
        "distinct": len(set(overall)),
        "length_correlation": _correlation(scored),
    }


def corrupted(right: Sequence[JudgeItem], seed: int = 0) -> list[JudgeItem]:
    """A wrong answer to each question: in turn another question's answer, and the right one with a change in it."""
    draw = random.Random(seed)
    wrong = []
    for index, item in enumerate(right):
        other = right[(index + 1) % len(right)].answer
        swap = index % 2 == 0 and other != item.answer
        wrong.append(replace(item, answer=other if swap else _changed(item.answer, draw)))
    return wrong


def _changed(answer: str, draw: random.Random) -> str:
    """`answer` with every number moved by 1 to 9, or, in a text without numbers, its words in another order."""
    if re.search(r"\d", answer):
        return re.sub(r"\d+", lambda found: str(int(found.group()) + draw.randint(1, 9)), answer)
    words = answer.split()
    draw.shuffle(words)
    return " ".join(words) if words != answer.split() else f"not {answer}"


def _marks(scores: Sequence[JudgeScore | None], mark: str) -> list[int]:
    return [getattr(score, mark) for score in scores if score is not None]


def _auc(good: list[int], bad: list[int]) -> float | None:
    """Area under the curve, by ranks."""
    if not good or not bad:
        return None
    ranks = rankdata([*good, *bad])[: len(good)]
    return round(float((ranks.sum() - len(good) * (len(good) + 1) / 2) / (len(good) * len(bad))), 4)


def _mean(marks: list[int]) -> float | None:
    return round(float(np.mean(marks)), 4) if marks else None


def _correlation(scored: list[tuple[int, int]]) -> float | None:
    """Pearson's; None where either side does not vary."""
    columns = np.array(scored, float).reshape(-1, 2).T
    if columns.shape[1] < 3 or not columns.std(axis=1).all():
        return None
    return round(float(np.corrcoef(columns)[0, 1]), 4)
