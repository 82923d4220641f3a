"""Which source each row of a phase comes from: exact proportions, as a pure function of the row's number."""

from collections.abc import Mapping
from fractions import Fraction

import numpy as np

MILLION = 1_000_000  # shares are exact to a millionth, so that row number times share stays within int64


class Mixture:
    """Weighted interleaving of sources without randomness or state.

    The first source takes row n where floor(share * n) steps up; the others share what is left by the same rule. Among
    the first n rows a source's count is within 1 (two sources) or within the number of sources of share * n.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.sources = tuple(sorted(weights))
        total = sum(weights.values())
        parts = [max(1, round(MILLION * weights[name] / total)) for name in self.sources]
        self._shares = [Fraction(parts[i], sum(parts[i:])) for i in range(len(parts) - 1)]

    def assign(self, first: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """(source, nth) of rows first..first+rows-1: whose row it is and how many it had before; int64 [rows]."""
        place = np.arange(first, first + rows, dtype=np.int64)
        source = np.full(rows, len(self.sources) - 1, np.int64)
        nth = np.empty(rows, np.int64)
        left = np.ones(rows, bool)
        for i, share in enumerate(self._shares):
            before = place * share.numerator // share.denominator
            taken = left & ((place + 1) * share.numerator // share.denominator > before)
            source[taken], nth[taken] = i, before[taken]
            left &= ~taken
            place = place - before
        nth[left] = place[left]
        return source, nth

    def counts(self, rows: int) -> np.ndarray:
        """How many of the first `rows` rows each source has; int64 [sources]."""
        left, counts = rows, []
        for share in self._shares:
            counts.append(left * share.numerator // share.denominator)
            left -= counts[-1]
        return np.array([*counts, left], np.int64)
