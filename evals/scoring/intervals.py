"""Intervals and tests of scores: Wilson's interval, McNemar's exact paired test, a paired bootstrap, Holm."""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

LEVEL = 0.05  # of significance, after Holm's correction where there are several tests
OVER_PROBLEMS = "over problems; says nothing about another seed"  # what an interval of one run generalises to
Name = TypeVar("Name", bound=Hashable)


def wilson(correct: float, n: float, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of `correct` / `n`; [0, 1] for n = 0. Both may be fractional: votes, effective sizes.

    https://en.wikipedia.org/wiki/Binomial_proportion_confidence_interval#Wilson_score_interval
    """
    if not 0 <= correct <= n:
        raise ValueError(f"{correct} of {n} is not a share")
    if n == 0:
        return 0.0, 1.0
    share = correct / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def wilson_mean(groups: Sequence[Sequence[float]], weights: Sequence[float] | None = None) -> tuple[float, float]:
    """95 % interval of the weighted mean of the groups' means, of groups (benchmarks) that are asked separately.

    Wilson's intervals of the groups, combined as by Zou and Donner (2008, "MOVER"): each end is as far from the mean as
    the root of the sum of squares of the groups' weighted distances. A bootstrap has no width where all answers are
    right or all are wrong. `weights` sum to 1; None: all equal. Raises `ValueError` for no groups or an empty one.
    """
    if not groups or not all(len(group) for group in groups):
        raise ValueError("a mean of benchmarks needs at least one, with at least one question each")
    weights = [1 / len(groups)] * len(groups) if weights is None else weights
    # Rounded, because a question of three rows has votes such as 1/3, whose sum could exceed n by an error of rounding.
    correct = [(round(sum(group), 6), len(group)) for group in groups]
    shares = [votes / n for votes, n in correct]
    ends = [wilson(votes, n) for votes, n in correct]
    mean = sum(weight * share for weight, share in zip(weights, shares, strict=True))
    below, above = (
        math.hypot(*(weight * (share - end[side]) for weight, share, end in zip(weights, shares, ends, strict=True)))
        for side in (0, 1)
    )
    return max(0.0, mean - below), min(1.0, mean + above)


@dataclass(frozen=True)
class Paired:
    """Result of a paired test on `n` questions: counts, the lead of b with its interval, and McNemar's exact p.

    `both`: questions with equal votes above 0; `only_a`, `only_b`: with the higher vote for a or b; `neither`: both 0.
    """

    n: int
    both: int
    only_a: int
    only_b: int
    neither: int
    lead: float
    low: float
    high: float
    p: float


def paired(a: Sequence[float], b: Sequence[float], z: float = 1.96) -> Paired:
    """Test the lead of `b` over `a` (difference of accuracies) with its 95 % interval (Agresti and Min, 2005).

    `a` and `b` have a vote for each question, 0 to 1; a question is discordant if the votes differ. `p` is the
    two-sided p-value of McNemar's exact test: the probability, if both models were equally good, of a split of the
    discordant questions at least as uneven as this. Raises `ValueError` unless both have the same number of questions.
    """
    if len(a) != len(b) or not len(a):
        raise ValueError(f"a paired test needs the same questions on both sides, not {len(a)} and {len(b)}")
    n = len(a)
    only_a = sum(x > y for x, y in zip(a, b, strict=True))
    only_b = sum(y > x for x, y in zip(a, b, strict=True))
    both = sum(x == y > 0 for x, y in zip(a, b, strict=True))
    lead = (sum(b) - sum(a)) / n
    # As if one more question had been lost and one more won, so that it also holds for few discordant pairs.
    spread = z * math.sqrt(only_a + only_b + 1 - (only_b - only_a) ** 2 / (n + 2)) / (n + 2)
    centre = (only_b - only_a) / (n + 2)
    low, high = max(-1.0, min(lead, centre - spread)), min(1.0, max(lead, centre + spread))
    # p is twice the smaller tail of Binomial(pairs, 1/2). It is summed in exact integers; from 1,000 pairs 2**pairs
    # does not fit a float, so logarithms are subtracted instead.
    pairs = only_a + only_b
    tail = coefficient = 1
    for k in range(min(only_a, only_b)):
        coefficient = coefficient * (pairs - k) // (k + 1)  # each from the last: alone it takes `k` steps
        tail += coefficient
    p = min(1.0, 2 * tail / 2**pairs if pairs < 1000 else math.exp(math.log(2 * tail) - pairs * math.log(2)))
    return Paired(n, both, only_a, only_b, n - both - pairs, lead, low, high, p)


def paired_bootstrap(
    groups: Sequence[tuple[Sequence[float], Sequence[float]]],
    weights: Sequence[float],
    seed: int = 0,
    draws: int = 10_000,
) -> tuple[float, float, float, float]:
    """Paired bootstrap of a weighted mean of benchmarks: (lead of the second model, low, high, two-sided p).

    `groups` has for each benchmark the votes of both models on its questions, which are resampled together. The lead
    depends only on how many questions have each difference of votes: these counts are drawn from a multinomial. p:
    twice the share of draws in which the lead is zero or reversed (at least 1 / `draws`). Where all questions differ
    alike the interval is as wide as if one more question of each benchmark had been won or lost.
    """
    if not groups or not all(len(a) and len(a) == len(b) for a, b in groups):
        raise ValueError("a paired test needs the same questions on both sides of every benchmark")
    # Imported here: a comparison of single benchmarks needs none of it, and starts in two thirds of the time.
    import numpy as np

    rng = np.random.default_rng(seed)
    lead, leads = 0.0, np.zeros(draws)
    for (a, b), weight in zip(groups, weights, strict=True):
        n = len(a)
        # 1, -1 and 0 first: there are no others unless a question has several rows.
        counts = dict.fromkeys((1.0, -1.0, 0.0), 0) | Counter(y - x for x, y in zip(a, b, strict=True))
        differences, shares = np.array(list(counts)), np.array(list(counts.values())) / n
        lead += weight * float(differences @ shares)
        leads += weight * (rng.multinomial(n, shares, size=draws) @ differences) / n
    low, high = np.quantile(leads, [0.025, 0.975])
    if high - low < 1e-12:
        half = math.hypot(*(1.96 * weight / (len(a) + 2) for (a, _), weight in zip(groups, weights, strict=True)))
        low, high = max(-1.0, lead - half), min(1.0, lead + half)
    reversed_share = min(float(np.mean(leads <= 0)), float(np.mean(leads >= 0)))
    return lead, float(low), float(high), float(min(1.0, max(2 * reversed_share, 1 / draws)))


def holm(p_values: Mapping[Name, float]) -> dict[Name, float]:
    """The p values after Holm's step-down correction (1979) for their number: below `LEVEL` is significant.

    It holds however the tests depend on each other; arms that share the first arm do.
    """
    corrected, least = dict(p_values), 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[name]))
        corrected[name] = least
    return corrected
