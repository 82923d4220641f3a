"""A store as data frames: runs, steps, metrics, samples, scores, artifacts and lineage, from the catalog's views."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import typer

from nautile.common.errors import ConfigError
from nautile.common.files import read_json
from nautile.common.text import did_you_mean
from nautile.flows.cli.runs import named_run, near_run
from nautile.flows.sweep.arms import setting_words
from nautile.run_handle import RunFailed
from nautile.store.catalog import Catalog
from nautile.store.mirror import open_store


class OpenedStore:
    """What a store has recorded. Each method reads what was written until now, by any process; nothing is cached.

    The frames have the columns of the catalog's views, which `docs/store.md` describes.
    """

    def __init__(self, location: str | os.PathLike[str] | None = None) -> None:
        self._store = open_store(os.fspath(location) if location is not None else None)
        self._catalog = Catalog(self._store)

    def __repr__(self) -> str:
        return f"<nautile store {self._store.location}>"

    def runs(self) -> pd.DataFrame:
        """A row for each run, the newest first.

        >>> set(store.runs()["state"])
        {'done'}
        """
        return self.sql("SELECT * EXCLUDE (steps, settings) FROM runs WHERE pipeline ORDER BY newest DESC")

    def steps(self, run: str) -> pd.DataFrame:
        """A row for each step that a run has begun. `run`: an id or its first digits, or a name."""
        return self.sql("SELECT * FROM steps WHERE run = ? ORDER BY begun, label", [self._run(run)])

    def metrics(self, run: str | None = None, name: str | None = None) -> pd.DataFrame:
        """The points of curves: run, label, name, source, step, value. `name`: of the metric, such as `loss`.

        >>> oldest = store.runs()["run"].iloc[-1]
        >>> set(store.metrics(oldest, "loss")["name"])
        {'loss'}
        """
        return self._of("metrics", run, {"name": name}, "run, label, name, step")

    def samples(self, run: str | None = None, label: str | None = None) -> pd.DataFrame:
        """Texts that the model wrote: continuations, rollouts with rewards, answers. `label`: of the step.

        `fields` has a dict for each: `samples["fields"].str["reward"]`.
        """
        frame = self._of("samples", run, {"label": label}, 'run, label, "set", index')
        frame["fields"] = frame["fields"].map(json.loads)
        return frame

    def evaluations(self, run: str | None = None, benchmark: str | None = None) -> pd.DataFrame:
        """The scores after each stage by benchmark and figure, in the order of the stages, with the gain over the stage
        before; and the questions `n` with the interval `low` to `high` over them, None where the files are elsewhere.
        """
        frame = self._of("scores", run, {"benchmark": benchmark}, "run, started, label, benchmark, figure")
        scores = {name: self._scores(name) for name in frame["evaluation"].dropna().unique()}
        rows = zip(frame["evaluation"], frame["benchmark"], frame["figure"], strict=True)
        found = [_interval(scores.get(name) or {}, *which) for name, *which in rows]
        frame["n"] = pd.array([n for n, *_ in found], dtype="Int64")
        frame["low"], frame["high"] = [low for _, low, _ in found], [high for *_, high in found]
        return frame

    def artifacts(self, kind: str | None = None) -> pd.DataFrame:
        """A row for each artifact, the oldest first."""
        return self._of("artifacts", None, {"kind": kind}, "created")

    def lineage(self, artifact: str) -> pd.DataFrame:
        """An artifact and all that it was made from: the columns of `artifacts`, and `depth`."""
        return pd.DataFrame(self._catalog.lineage(artifact))

    def path(self, artifact: str) -> Path:
        """The folder of an artifact, fetched first if it is only at the store's remote. Raises `ConfigError`."""
        self._store.refresh()
        found = self._store.get(artifact)
        if not self._store.has_files(found):
            self._store.fetch(found)
        return found.path

    def sql(self, query: str, parameters: Sequence[Any] = ()) -> pd.DataFrame:
        """The result of a query that only reads, as of `nautile sql`. Raises `ConfigError` with DuckDB's message.

        >>> store.sql("SELECT count(*) AS n FROM runs WHERE pipeline").n.item() == len(store.runs())
        True
        """
        self._store.refresh(events=True)
        self._catalog.catch_up()
        columns, rows = self._catalog.select(query, parameters)
        return pd.DataFrame(rows, columns=columns)

    def rescore(
        self,
        rollouts: str,
        *,
        reward: str | None = None,
        judge: str | os.PathLike[str] | None = None,
        set: Mapping[str, Any] | None = None,
        budget_dollars: float = 0.0,
        force: bool = False,
    ) -> pd.DataFrame:
        """Score stored rollouts by another reward, or by the judge of a configuration, as `nautile rescore` does.

        `rollouts`: an artifact's id, or a stage. `judge`: a configuration with [align.judge], which `set` changes.
        Returns a row for each rollout; `frame.attrs` has the `summary` and the id of the `artifact`. Raises
        `ConfigError`, and `RunFailed` for a crash of the step.
        """
        from nautile.uses.rescore.command import rescored
        from nautile.uses.rescore.stage import ROWS

        config = None if judge is None else os.fspath(judge)
        try:
            artifact = rescored(
                self._store,
                rollouts,
                reward,
                config,
                setting_words(set or {}),
                budget_dollars,
                "the same call",
                force,
                as_json=True,
            )
        except typer.Exit as crash:
            raise RunFailed("rescore failed: its first error is in the output of this process") from crash
        frame = pd.read_parquet(artifact.path / ROWS)
        frame.attrs = {"artifact": artifact.id, "summary": artifact.manifest["facts"]}
        return frame

    def _scores(self, evaluation: str) -> dict[str, Any]:
        """The scores.json of an evaluation; {} if its files are only at the remote, or damaged."""
        found = self._store.get(evaluation)
        scores = read_json(found.path / "scores.json") if self._store.has_files(found) else None
        return scores if isinstance(scores, dict) else {}

    def _of(self, view: str, run: str | None, equal: dict[str, str | None], order: str) -> pd.DataFrame:
        """The rows of a view. Raises `ConfigError` for a run or a value that the store has nowhere, with a near one."""
        named = {column: value for column, value in equal.items() if value is not None}
        chosen = {**({} if run is None else {"run": self._run(run)}), **named}
        where = " AND ".join(f"{column} = ?" for column in chosen) or "true"
        frame = self.sql(f"SELECT * FROM {view} WHERE {where} ORDER BY {order}", list(chosen.values()))
        for column, value in named.items() if frame.empty else ():
            values = self.sql(f"SELECT DISTINCT {column} FROM {view} WHERE {column} IS NOT NULL ORDER BY 1")
            known = list(values[column])
            if known and value not in known:  # what other runs have is only missing here
                some = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
                close = did_you_mean(value, known)
                what = "metric" if column == "name" else column
                raise ConfigError(f"no {what} {value!r} in {self._store.location}{close}: there are {some}")
        return frame

    def _run(self, name: str) -> str:
        """The id of a run. Raises `ConfigError` if there is none, or several."""
        if (found := named_run(self._store, name)) is None:
            raise ConfigError(f"no run {name!r} in {self._store.location}{near_run(self._store, name)}")
        return found.run


def _interval(scores: dict[str, Any], benchmark: str, figure: str) -> tuple[int | None, float | None, float | None]:
    """`n`, `low` and `high` of a figure in the scores of an evaluation; None where they are not known."""
    by_name = {"average": scores.get("average"), **scores.get("composites", {}), **scores.get("benchmarks", {})}
    if figure == "likelihood":
        by_name = scores.get("likelihood", {})
    entry = by_name.get(benchmark) or {}
    ends = entry.get("interval_lenient" if figure == "accuracy_lenient" else "interval") or (None, None)
    return entry.get("n"), *ends
