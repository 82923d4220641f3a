"""Apportionment: divide a count by weights into whole numbers."""

from collections.abc import Mapping
from typing import TypeVar

Name = TypeVar("Name")


def whole_shares(count: int, weights: Mapping[Name, float]) -> dict[Name, int]:
    """Divide `count` by positive weights into whole numbers that add up to it (largest remainder method).

    Of equal remainders those of earlier names are rounded up first.
    """
    total = sum(weights.values())
    exact = {name: count * weight / total for name, weight in weights.items()}
    shares = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: shares[name] - exact[name])  # stable: ties keep the order of names
    for name in by_remainder[: count - sum(shares.values())]:
        shares[name] += 1
    return shares
