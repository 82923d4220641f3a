"""Warnings about training curves: overfitting, entropy collapse, groups without a signal, an amplified negative part.

The thresholds stand here once; the dashboard, the report and whoever reads a catalog use `curve_warnings`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

LEAST_POINTS = 3  # fewer say nothing about a direction
CLIMB = 1.05  # the last validation loss over the lowest
LOW_ENTROPY = 0.01  # nats per token: with less, groups of alike rollouts are the rule; runs that still gain have 0.03
NO_SIGNAL = 0.5  # share of the groups whose rewards are all equal
BALANCED = 1.0  # the most that the negative part is multiplied by

Points = Sequence[Sequence[float]]  # (step, value), by step


@dataclass(frozen=True)
class CurveWarning:
    """What a curve does that it should not: its metric, its source (data set or worker, "" for all), and a sentence."""

    metric: str
    source: str
    text: str


def curve_warnings(curves: Mapping[str, Mapping[str, Points]]) -> list[CurveWarning]:
    """The warnings about the curves of one step: metric -> source -> points of finite values, in the order of steps."""
    found = []
    for name, check in _CHECKS.items():
        for source, points in curves.get(name, {}).items():
            if len(points) >= LEAST_POINTS and (text := check(points)):
                of = f" of {source}" if source else ""
                found.append(CurveWarning(name, source, text.format(of=of)))
    return found


def _late(points: Points) -> float:
    """The mean of the last quarter, at least of the last three points: one point is noise."""
    last = points[-max(LEAST_POINTS, len(points) // 4) :]
    return sum(value for _, value in last) / len(last)


def _climbs(points: Points) -> str:
    step, lowest = min(points, key=lambda point: point[1])
    end, last = points[-1]
    if lowest <= 0 or last < CLIMB * lowest:
        return ""
    return (
        f"The validation loss{{of}} rose from {lowest:.3g} at step {step:,.0f} to {last:.3g} at step {end:,.0f}: the "
        "model overfits, or forgets this source."
    )


def _collapses(points: Points) -> str:
    late = _late(points)
    return (
        f"The entropy{{of}} is {late:.2g} nats per token, below {LOW_ENTROPY:g}: all rollouts of a group become alike, "
        "and nothing more is learnt."
        if late < LOW_ENTROPY
        else ""
    )


def _silent(points: Points) -> str:
    late = _late(points)
    return (
        f"{late:.0%} of the groups{{of}} have equal rewards, more than {NO_SIGNAL:.0%}: nothing is learnt from them. "
        "The problems are too hard or too easy."
        if late > NO_SIGNAL
        else ""
    )


def _amplifies(points: Points) -> str:
    highest = max(value for _, value in points)
    above = sum(value > BALANCED for _, value in points) / len(points)
    return (
        f"The balance factor{{of}} is above {BALANCED:g} in {above:.0%} of the points, at most {highest:.3g}: the "
        "negative part of the update is amplified."
        if highest > BALANCED
        else ""
    )


_CHECKS: Mapping[str, Callable[[Points], str]] = {
    "validation_loss": _climbs,
    "entropy": _collapses,
    "zero_signal_share": _silent,
    "balance_factor": _amplifies,
}
CHECKED = tuple(_CHECKS)  # the metrics that are looked at
