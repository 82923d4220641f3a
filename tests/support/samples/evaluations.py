"""Publish checkpoints and evaluations of a model of known skill, without running a stage."""

import json
from collections.abc import Callable

from nautile.configs.schema import RunConfig
from nautile.evals.benchmarks.items import BenchmarkItem
from nautile.evals.running.runner import evaluate
from nautile.evals.scoring.scores import summarise
from nautile.flows.dag import evaluate_section
from nautile.store.artifacts import Artifact, Store
from nautile.store.manifest import stage_key
from nautile.tasks.evaluate import evaluate as evaluate_stage
from tests.evals.conftest import Known

ITEMS = [
    BenchmarkItem(name, n, str(n), f"{name}: {n} + 1?", "number", str(n + 1))
    for name in ("sums", "more")
    for n in range(40)
]


def checkpoint(
    store: Store,
    name: str,
    label: str = "pretrain",
    stage: str = "pretrain",
    **config: object,
) -> Artifact:
    """Publish a checkpoint without weights. `config`: of its config.json, whose `model` stands for its shape."""
    key = stage_key(stage, 1, {"name": name}, {})
    folder = store.staging(key) / "output"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model": "small", **config}))
    return store.publish("checkpoint", key, folder, stage=stage, version=1, config={}, inputs={}, facts={}, label=label)


def evaluation(
    store: Store,
    config: RunConfig,
    made_of: Artifact,
    right: Callable[[BenchmarkItem], bool],
    *,
    items: list[BenchmarkItem] = ITEMS,
    protocol: dict[str, object] | None = None,
) -> Artifact:
    """Publish what the stage `evaluate` would, for a model that answers an item correctly if `right(item)`."""
    section, stage = evaluate_section(config), evaluate_stage
    key = stage.key(section, {"checkpoint": made_of.full_id})
    folder = store.staging(key) / "output"
    folder.mkdir()
    rows = evaluate(Known(items, lambda item: item.expected if right(item) else "0"), items, folder / "rows.jsonl")
    (folder / "scores.json").write_text(json.dumps(summarise(rows, "known", protocol or {"shots": 0})))
    return store.publish(
        "evaluation",
        key,
        folder,
        stage="evaluate",
        version=stage.version,
        config=section,
        inputs={"checkpoint": made_of},
        facts={},
        label=f"evaluate:{made_of.manifest['label']}",
    )
