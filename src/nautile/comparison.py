"""A comparison of runs or of evaluations as data frames, from the function that `nautile compare` prints."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from nautile.common.errors import ConfigError
from nautile.flows.sweep.comparisons import SIDES, compare_named
from nautile.store.artifacts import Store

# The columns of a frame without a row, so that what reads them works on it as well.
EMPTY = {
    "scores": ("stage", "benchmark", "title", "n", "a", "b", "lead", "low", "high", "p", "gain"),
    "changed": ("benchmark", "index", "change", "prompt", "expected"),
    "settings": ("field", "before", "after"),
    "curves": ("stage", "metric", "title", "a.last", "a.best", "b.last", "b.best"),
    "steps": ("label", "same", "a.state", "a.seconds", "a.dollars", "b.state", "b.seconds", "b.dollars"),
}


class Comparison:
    """Others compared with the first on the questions that both were asked.

    `data`: for each other the data of `nautile compare --json`. The frames have a column `other`, with its name.
    """

    def __init__(self, store: Store, first: str, others: Sequence[str], verdict: str, way: str) -> None:
        if not others:
            raise ConfigError(f"compare: needs at least two names, and was given {first!r} alone")
        self.first = first
        self.data: dict[str, dict[str, Any]] = {
            other: compare_named(store, first, other, verdict, way) for other in others
        }

    def __repr__(self) -> str:
        return f"<nautile comparison of {self.first} with {', '.join(self.data)}>"

    @property
    def scores(self) -> pd.DataFrame:
        """A row for each benchmark and mean, of runs for each evaluation: `a` of the first, `b` of the other, `lead`
        of b with its interval `low` to `high`, `p` (over problems; each pair alone), and `gain` in words.
        """
        if self._of_runs:
            return self._frame("scores")
        tests = {other: {**found["benchmarks"], **found["means"]} for other, found in self.data.items()}
        rows = {other: [{"benchmark": name, **test} for name, test in of.items()] for other, of in tests.items()}
        return _frame("scores", rows)

    @property
    def changed(self) -> pd.DataFrame:
        """Evaluations alone: a row for each sample whose verdict changed, with the answers of both."""
        return self._frame("changed")

    @property
    def settings(self) -> pd.DataFrame:
        """Runs alone: the settings that differ, `before` (of the first) and `after`."""
        return self._frame("settings")

    @property
    def curves(self) -> pd.DataFrame:
        """Runs alone: last and best value of each metric that both have, `a.last` to `b.best_step`."""
        return self._frame("curves")

    @property
    def steps(self) -> pd.DataFrame:
        """Runs alone: state, seconds and dollars of each step of both; None where one has not begun it."""
        return self._frame("steps")

    @property
    def warnings(self) -> list[str]:
        """What makes a comparison doubtful: another machine or other libraries, scores that could not be compared."""
        found = []
        for other, data in self.data.items():
            found += [f"{other}: {line}" for line in data.get("warnings", ())]
            if data.get("settings", ()) is None:
                found.append(f"{other}: settings are unknown: one of the runs is older than their record")
            found += [f"{other}: {row['stage']} is not compared: {row['why']}" for row in data.get("not_compared", ())]
        return found

    @property
    def _of_runs(self) -> bool:
        return any("runs" in data for data in self.data.values())

    def _frame(self, part: str) -> pd.DataFrame:
        return _frame(part, {other: data.get(part) or [] for other, data in self.data.items()})


def _frame(part: str, rows: dict[str, list[dict[str, Any]]]) -> pd.DataFrame:
    """Rows by `other` as one frame; the fields of both sides are columns such as `a.last`."""
    flat = [{"other": other, **_flat(row)} for other, of in rows.items() for row in of]
    return pd.DataFrame(flat) if flat else pd.DataFrame(columns=["other", *EMPTY[part]])


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if name in SIDES and (value is None or isinstance(value, dict)):
            flat |= {f"{name}.{field}": part for field, part in (value or {}).items()}
        else:
            flat[name] = value
    return flat
