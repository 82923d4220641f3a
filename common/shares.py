"""Whole shares of a count by weight."""

from collections.abc import Mapping
from typing import TypeVar

Name = TypeVar("Name")


def whole_shares(count: int, weights: Mapping[Name, float]) -> dict[Name, int]:
    """Divide `count` things by weight into whole numbers that add up to it (largest remainders).

    Equal remainders go to the earlier names. The weights are positive.
    """
    total = sum(weights.values())
    exact = {name: count * weight / total for name, weight in weights.items()}
    shares = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: shares[name] - exact[name])  # stable: the order of the names remains
    for name in by_remainder[: count - sum(shares.values())]:
        shares[name] += 1
    return shares
