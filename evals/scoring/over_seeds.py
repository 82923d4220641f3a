"""Compare training recipes over seeds: mean and spread of an arm, its lead over another, the smallest effect to find.

A run with another seed is the unit, not a problem: a thousand problems say nothing about the model that another seed
would have trained. So the lead of an arm is the mean over seeds of its paired differences (the seeds that both arms
have, which share data, start and test problems), tested by Student's t with one degree of freedom less than seeds.

The standard error is never taken smaller than the problems allow: two seeds whose differences happen to be equal have
no spread, but the difference of two models on n problems has a binomial noise all the same. With this floor the test
errs to the safe side: for the seeds' part it is at most Student's.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from nautile.evals.scoring.intervals import LEVEL, paired, paired_bootstrap

if TYPE_CHECKING:
    import numpy as np

POWER = 0.8  # chance of finding an effect of the size `SeedLead.detectable`


@dataclass(frozen=True)
class SeedSummary:
    """The values of one arm over its seeds: mean, 95 % t interval, and the standard deviation between seeds.

    None where no spread was seen (one seed, or for the interval equal values), which is not a spread of zero.
    """

    mean: float
    low: float | None
    high: float | None
    deviation: float | None
    seeds: tuple[Hashable, ...]


@dataclass(frozen=True)
class SeedLead:
    """The lead of one arm over another, in the unit of the values (shares: 0.01 is a point).

    `over`: what `low`, `high` (95 %) and the two-sided `p` (neither corrected: `intervals.holm`) generalise to.
    `deviation`: of the paired differences between seeds. `detectable`: the smallest true lead that this many seeds find
    in `POWER` of cases, two-sided at `LEVEL` / `tests` (the hardest level of Holm's correction). None: not known.
    """

    lead: float
    low: float | None
    high: float | None
    p: float | None
    seeds: tuple[Hashable, ...]
    deviation: float | None
    detectable: float | None
    over: Literal["seeds", "problems"]


Interval = TypeVar("Interval", SeedSummary, SeedLead)


def summary(values: Mapping[Any, float]) -> SeedSummary:
    """Mean, 95 % t interval and standard deviation of an arm's values by seed. Raises `ValueError` without a seed."""
    if not values:
        raise ValueError("a summary over seeds needs at least one seed")
    values_S, count = list(values.values()), len(values)
    mean, deviation = fmean(values_S), stdev(values_S) if count > 1 else None
    if deviation is not None and _is_rounding(deviation, values_S):
        deviation = 0.0
    if not deviation:
        return SeedSummary(mean, None, None, deviation, tuple(values))
    half = _t_quantile(1 - LEVEL / 2, count - 1) * deviation / count**0.5
    return SeedSummary(mean, mean - half, mean + half, deviation, tuple(values))


def summary_of_shares(values: Mapping[Any, float]) -> SeedSummary:
    """`summary` of shares (0 to 1), whose limits Student's t does not know: its interval ends at them."""
    return limited(summary(values), 0.0, 1.0)


def limited(found: Interval, least: float, most: float) -> Interval:
    """A summary or a lead whose interval ends at the limits of its values."""
    if found.low is None or found.high is None:
        return found
    return replace(found, low=max(least, found.low), high=min(most, found.high))


def lead(
    first: Mapping[Any, float], other: Mapping[Any, float], tests: int = 1, problems: int | None = None
) -> SeedLead:
    """The lead of `other` over `first`, of values by seed, over the seeds that both have. Raises `ValueError` without
    one.

    `tests`: number of tests that are corrected for together. `problems`: the values are shares of so many problems,
    whose noise is at least that of a difference that came from the fewest possible changed answers, and whose
    differences are -1 to 1. None: no such floor and limits; then equal differences that are not 0 have no interval,
    and p is that of the sign test, 2^(1 - seeds).
    """
    seeds = tuple(seed for seed in first if seed in other)
    if not seeds:
        raise ValueError("a lead over seeds needs a seed that both arms have")
    differences_S = [other[seed] - first[seed] for seed in seeds]
    noise = 0.0
    if problems:
        # A seed's difference d needs at least |d| n changed answers, each +1 or -1, so that the variance by problem is
        # at least |d| - d². One more changed answer than was seen, as in `paired`.
        least = fmean(abs(each) * (1 - abs(each)) for each in differences_S) + 1 / problems
        noise = (least / (problems * len(seeds))) ** 0.5
    found = _tested(differences_S, noise, tests, seeds)
    return limited(found, -1.0, 1.0) if problems else found


def lead_of_votes(
    first: "Sequence[np.ndarray]",
    other: "Sequence[np.ndarray]",
    weights: Sequence[float] = (1.0,),
    tests: int = 1,
    seeds: Sequence[Hashable] | None = None,
) -> SeedLead:
    """The lead of `other` over `first` of votes (0 to 1) by seed and question, over common seeds and questions.

    `first`, `other`: for each benchmark [seed, question], NaN where a question was not asked; the `weights` of the
    benchmarks sum to 1. With several seeds the test is over seeds, and its standard error at least that of the mean
    difference over questions. With one seed it is over problems: `paired`, for a mean of benchmarks `paired_bootstrap`.
    Raises `ValueError` if no seed has a common question of each benchmark.
    """
    # Imported here, as scipy below: both are heavy, and most commands need no test, or none of several seeds.
    import numpy as np

    differences = [after_SN - before_SN for before_SN, after_SN in zip(first, other, strict=True)]
    kept_S = np.all([np.isfinite(part_SN).any(axis=1) for part_SN in differences], axis=0)
    names = tuple(name for name, kept in zip(seeds or range(len(kept_S)), kept_S, strict=True) if kept)
    if not names:
        raise ValueError("a lead over seeds needs a seed with a question of each benchmark that both arms answered")
    differences = [part_SN[kept_S] for part_SN in differences]
    if len(names) == 1:
        pairs = []
        for before_SN, after_SN, (part_N,) in zip(first, other, differences, strict=True):
            asked_N = np.isfinite(part_N)
            pairs.append((before_SN[kept_S][0][asked_N].tolist(), after_SN[kept_S][0][asked_N].tolist()))
        if len(pairs) > 1:
            return SeedLead(*paired_bootstrap(pairs, weights), names, None, None, "problems")
        test = paired(*pairs[0])
        return SeedLead(test.lead, test.low, test.high, test.p, names, None, None, "problems")
    by_seed_S = sum(weight * np.nanmean(part_SN, axis=1) for weight, part_SN in zip(weights, differences, strict=True))
    variance = 0.0
    for weight, part_SN in zip(weights, differences, strict=True):
        means_N = np.nanmean(part_SN[:, np.isfinite(part_SN).any(axis=0)], axis=0)
        count = len(means_N)
        spread = float(means_N.var(ddof=1)) * count if count > 1 else 0.0
        # One more disagreement than was observed: no difference in twenty questions is not certainty.
        variance += weight**2 * (spread + 1) / count**2
    return _tested(np.asarray(by_seed_S).tolist(), variance**0.5, tests, names)


def _tested(differences_S: Sequence[float], noise: float, tests: int, seeds: tuple[Hashable, ...]) -> SeedLead:
    """Student's t test of the mean of `differences_S`; its standard error is at least `noise`."""
    value, count = fmean(differences_S), len(differences_S)
    if count == 1:
        return SeedLead(value, None, None, None, seeds, None, None, "seeds")
    deviation = stdev(differences_S)
    error = max(deviation / count**0.5, noise)
    if _is_rounding(error, differences_S):
        p = 2.0 ** (1 - count) if value else 1.0
        return SeedLead(value, None, None, p, seeds, 0.0, None, "seeds")
    from scipy.special import nctdtrinc, stdtr

    half = _t_quantile(1 - LEVEL / 2, count - 1) * error
    p = min(1.0, 2 * float(stdtr(count - 1, -abs(value) / error)))
    # The shift of the noncentral t distribution with which it exceeds the critical value in `POWER` of cases.
    critical = _t_quantile(1 - LEVEL / tests / 2, count - 1)
    detectable = float(nctdtrinc(count - 1, 1 - POWER, critical)) * error
    return SeedLead(value, value - half, value + half, p, seeds, deviation, detectable, "seeds")


def _is_rounding(deviation: float, values_S: Sequence[float]) -> bool:
    """Whether the values are equal but for the rounding of floats: even the mean of three times 0.1 is not 0.1."""
    return deviation <= 1e-12 * max(map(abs, values_S))


def _t_quantile(share: float, freedom: int) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(freedom, share))
