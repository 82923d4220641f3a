"""Compare an evaluation with earlier ones: the last, and the best on the same benchmarks.

Only comparable evaluations are used: of checkpoints with the same model shape, with the same protocol, and with a row
per question. Others are skipped and counted by reason.
"""

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from nautile.common.errors import ConfigError
from nautile.common.files import read_json
from nautile.configs.operation import ScheduleConfig
from nautile.evals.running.rows import read_rows
from nautile.evals.scoring.comparison import (
    Comparison,
    best_of,
    compare,
    comparison_table,
    protocol_differences,
    regressed,
    scored_benchmarks,
)
from nautile.evals.scoring.scores import Scores
from nautile.evals.tables.results import ResultTable
from nautile.store.artifacts import Artifact, Store
from nautile.store.manifest import recorded_execution

ROWS = "rows.jsonl"
# Protocol fields that may differ: rows are paired by their prompts, and sampled answers are no part of the comparison.
_PER_BENCHMARK = ("sources", "likelihood", "samples", "sample_temperature")


@dataclass(frozen=True)
class EarlierEvaluations:
    """The earlier evaluations to compare with by role ("last", "best"), and the number of skipped ones by reason."""

    by_role: dict[str, Artifact]
    skipped: dict[str, int]


@dataclass(frozen=True)
class EarlierComparison:
    """The comparison with one earlier evaluation, which is the last, the best or both (`roles`)."""

    roles: tuple[str, ...]
    artifact: Artifact
    comparison: Comparison
    unmatched: list[str]  # benchmarks that only one of the two has a score for, which are left out
    regressions: list[dict[str, Any]]

    @property
    def role(self) -> str:
        return " and ".join(self.roles)


def find_earlier(
    store: Store, new: Artifact, schedule: ScheduleConfig, of_others: Set[str] = frozenset()
) -> EarlierEvaluations:
    """Find the last and the best comparable evaluation of another checkpoint that was made before `new`.

    `of_others`: executions that made checkpoints of other configurations, which are skipped.
    """
    new_scores = _scores(new)
    skipped: Counter[str] = Counter()
    candidates: list[Artifact] = []
    # In the order of their publication: the clocks of the machines that made them differ.
    published = store.by_publication(store.list("evaluation"))
    for artifact in takewhile(lambda artifact: artifact.version_id != new.version_id, published):
        # An evaluation of an endpoint's model has no checkpoint; one of the same checkpoint is no earlier state of the
        # model.
        inputs = artifact.manifest["inputs"]
        if "checkpoint" not in inputs or inputs["checkpoint"] == new.manifest["inputs"]["checkpoint"]:
            continue
        if recorded_execution(artifact.manifest["input_executions"]["checkpoint"]) in of_others:
            skipped["of another configuration"] += 1
        elif reason := _not_comparable(store, artifact, new, new_scores):
            skipped[reason] += 1
        else:
            candidates.append(artifact)
    if not candidates:
        return EarlierEvaluations({}, dict(skipped))
    by_role = {"last": candidates[-1]}
    # Best on the benchmarks that the new one has too: an evaluation of other benchmarks cannot win.
    index = best_of([_scores(artifact) for artifact in candidates], scored_benchmarks(new_scores))
    if index is not None:
        by_role["best"] = candidates[index]
    return EarlierEvaluations({role: by_role[role] for role in schedule.against if role in by_role}, dict(skipped))


def compare_with_earlier(
    new: Artifact, earlier: EarlierEvaluations, schedule: ScheduleConfig
) -> tuple[list[EarlierComparison], list[str]]:
    """Compare `new` with each earlier evaluation, once if it has both roles.

    Returns the comparisons, and the reasons why others failed. Raises `ConfigError` if the rows of `new` are damaged.
    """
    rows, new_scores = read_rows(new.path / ROWS), _scores(new)
    comparisons, problems = [], []
    # Often the last one is also the best; it is then compared once and named as both.
    for artifact in {artifact.id: artifact for artifact in earlier.by_role.values()}.values():
        roles = tuple(role for role, other in earlier.by_role.items() if other.id == artifact.id)
        try:
            comparison = compare(read_rows(artifact.path / ROWS), rows)
        except ConfigError as error:  # no question in common, or damaged rows
            problems.append(f"{artifact.id}: {error}")
            continue
        regressions = regressed(comparison, schedule.rule, schedule.margin)
        left_out = protocol_differences(_scores(artifact), new_scores)
        comparisons.append(EarlierComparison(roles, artifact, comparison, left_out, regressions))
    return comparisons, problems


def earlier_table(earlier: EarlierComparison) -> ResultTable:
    """The table of a paired comparison as in `nautile compare`, with a note about benchmarks that were left out."""
    table = comparison_table(earlier.comparison, earlier.role.capitalize(), "New")
    notes = list(table.notes)
    if left_out := earlier.unmatched:
        notes.append(f"Scored on one side only, and left out: {len(left_out)} ({', '.join(left_out)}).")
    title = f"Against the {earlier.role}: {earlier.artifact.id}"
    return ResultTable(title, table.columns, table.rows, tuple(notes), table.data)


def _not_comparable(store: Store, artifact: Artifact, new: Artifact, new_scores: Scores) -> str:
    """Why `artifact` cannot be compared with `new`; "" if it can."""
    scores = read_json(artifact.path / "scores.json")
    if not (artifact.path / ROWS).is_file() or not isinstance(scores, dict) or "benchmarks" not in scores:
        return "without a row for each question"
    if _protocol(scores) != _protocol(new_scores):
        return "by another protocol"
    # Where a checkpoint was removed its shape is unknown, and the rows decide: they are paired by prompt anyway.
    shapes = [_model_shape(store, evaluation) for evaluation in (artifact, new)]
    return "of another model" if all(shapes) and shapes[0] != shapes[1] else ""


def _protocol(scores: Scores) -> dict[str, Any]:
    return {name: value for name, value in scores.get("protocol", {}).items() if name not in _PER_BENCHMARK}


def _model_shape(store: Store, evaluation: Artifact) -> Any:
    """The `model` section of the evaluated checkpoint; None if the checkpoint was removed or has no such section."""
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
            f"{artifact.id} has no scores.json: evaluate again with `nautile run --only evaluate --force`"
        )
    return scores
