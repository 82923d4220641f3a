"""Where an evaluation stands against those before it: the last one, and the best one on the same benchmarks.

Only like is set beside like: evaluations of checkpoints of the same shape, asked by the same protocol, with a row for
each question. What is passed over for that is counted and told.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from common.errors import ConfigError
from common.files import read_json
from configs.operation import ScheduleConfig
from evals.running.rows import read_rows
from evals.scoring.comparison import (
    Comparison,
    best_of,
    compare,
    comparison_table,
    protocol_differences,
    regressed,
    scored_benchmarks,
)
from evals.scoring.scores import Scores
from evals.tables.results import ResultTable
from store.artifacts import Artifact, Store

ROWS = "rows.jsonl"
_PER_BENCHMARK = ("sources", "likelihood")  # of the protocol: rows are paired by their prompts, whatever these say


@dataclass(frozen=True)
class Side:
    """One earlier evaluation: in which `roles` ("last", "best"), how the new one compares, and what has fallen."""

    roles: tuple[str, ...]
    artifact: Artifact
    found: Comparison
    protocol_differences: list[str]  # benchmarks with a score on one side only: left out
    regressed: list[dict[str, Any]]

    @property
    def role(self) -> str:
        return " and ".join(self.roles)


@dataclass(frozen=True)
class Earlier:
    """The earlier evaluations to compare with, by role, and why others were passed over: reason -> how many."""

    by_role: dict[str, Artifact]
    passed_over: dict[str, int]


def earlier(store: Store, new: Artifact, schedule: ScheduleConfig) -> Earlier:
    """Those that were made before `new`, of other checkpoints."""
    mine = _scores(new)
    passed: Counter[str] = Counter()
    candidates: list[Artifact] = []
    for one in store.list("evaluation"):
        if "checkpoint" not in one.manifest["inputs"] or one.manifest["created"] >= new.manifest["created"]:
            continue
        if one.manifest["inputs"]["checkpoint"] == new.manifest["inputs"]["checkpoint"]:
            continue
        if reason := _unlike(store, one, new, mine):
            passed[reason] += 1
        else:
            candidates.append(one)
    if not candidates:
        return Earlier({}, dict(passed))
    by_role = {"last": candidates[-1]}
    if (place := best_of([_scores(one) for one in candidates], scored_benchmarks(mine))) is not None:
        by_role["best"] = candidates[place]
    return Earlier({role: by_role[role] for role in schedule.against if role in by_role}, dict(passed))


def stand(new: Artifact, before: Earlier, schedule: ScheduleConfig) -> tuple[list[Side], list[str]]:
    """A side for each evaluation of `before` (one that is both the last and the best is compared once), and why one
    that cannot be compared has none.

    Raises `ConfigError` if the rows of `new` are damaged.
    """
    rows, mine = read_rows(new.path / ROWS), _scores(new)
    sides, refused = [], []
    for artifact in {one.id: one for one in before.by_role.values()}.values():
        roles = tuple(role for role, one in before.by_role.items() if one.id == artifact.id)
        try:
            found = compare(read_rows(artifact.path / ROWS), rows)
        except ConfigError as error:  # no question in common, or damage there
            refused.append(f"{artifact.id}: {error}")
            continue
        lost = regressed(found, schedule.rule, schedule.margin)
        sides.append(Side(roles, artifact, found, protocol_differences(_scores(artifact), mine), lost))
    return sides, refused


def table_of(side: Side) -> ResultTable:
    """The paired comparison as `nautile compare` shows it, and what was left out."""
    table = comparison_table(side.found, side.role.capitalize(), "New")
    notes = list(table.notes)
    if side.unmatched:
        notes.append(f"Scored on one side only, and left out: {len(side.unmatched)} ({', '.join(side.unmatched)}).")
    return ResultTable(
        f"Against the {side.role}: {side.artifact.id}", table.columns, table.rows, tuple(notes), table.data
    )


def _unlike(store: Store, one: Artifact, new: Artifact, mine: Scores) -> str:
    """Why `one` cannot be set beside `new`; "" if it can."""
    theirs = read_json(one.path / "scores.json")
    if not (one.path / ROWS).is_file() or not isinstance(theirs, dict):
        return "without a row for each question"
    if _protocol(theirs) != _protocol(mine):
        return "asked in another way"
    shapes = [_shape(store, artifact) for artifact in (one, new)]
    return "of another model" if all(shapes) and shapes[0] != shapes[1] else ""


def _protocol(scores: Scores) -> dict[str, Any]:
    return {name: value for name, value in scores.get("protocol", {}).items() if name not in _PER_BENCHMARK}


def _shape(store: Store, evaluation: Artifact) -> Any:
    """The model of the checkpoint that was evaluated; None if that is gone, or does not say."""
    kind, _, key = evaluation.manifest["inputs"]["checkpoint"].partition("/")
    try:
        checkpoint = store.find(kind, key)
    except ConfigError:
        return None
    return (read_json(checkpoint.path / "config.json") or {}).get("model") if checkpoint else None


def _scores(artifact: Artifact) -> Scores:
    scores = read_json(artifact.path / "scores.json")
    if not isinstance(scores, dict) or "benchmarks" not in scores:
        raise ConfigError(
            f"{artifact.id}: no scores.json there; make it anew with `nautile run --only evaluate --force`"
        )
    return scores
