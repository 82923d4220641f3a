"""The toy chain made in this very process, in a second: the plan's executions, worked and published in order."""

import uuid
from pathlib import Path

from common.files import read_json
from configs.schema import RunConfig
from flows.dag import Execution, plan
from store.artifacts import Artifact, Store
from store.events import EventWriter
from store.manifest import now
from tasks.engine.attempt_log import write_attempt_row
from tasks.engine.job import Job
from tests.support.toy_stages import toy_stage


def make_all(root: Path, config: RunConfig) -> dict[str, dict[str, str]]:
    """Label -> kind -> artifact id, all made in the store at `root`."""
    store = Store(root)
    store.prepare()
    made: dict[str, dict[str, Artifact]] = {}
    for execution in plan(config, toy_stage):
        inputs = {name: made[need.producer][need.kind] for name, need in execution.needs.items()}
        made[execution.label] = _make(store, execution, inputs)
    return {label: {kind: artifact.id for kind, artifact in kinds.items()} for label, kinds in made.items()}


def _make(store: Store, execution: Execution, inputs: dict[str, Artifact]) -> dict[str, Artifact]:
    stage, staging, making = toy_stage(execution.stage), store.staging(execution.key), uuid.uuid4().hex
    emit = EventWriter(store.root / "events" / f"{making}.jsonl", making, stage=stage.name)
    folders = {name: artifact.path for name, artifact in inputs.items()}
    stage.work(Job(stage.name, execution.key, making, execution.section, folders, staging, emit))
    emit.close()
    row = {"id": uuid.uuid4().hex, "run": "toy", "stage": stage.name, "label": execution.label, "key": execution.key}
    row |= {"execution": making, "attempt": 1, "state": "done", "reused": False, "started": now(), "seconds": 1.5}
    write_attempt_row(store, row | {"ended": now(), "peak_bytes": 10**8})
    return {
        kind: store.publish(
            kind,
            execution.key,
            staging / "output" / kind,
            stage=stage.name,
            version=stage.version,
            config=execution.section,
            inputs=inputs,
            facts=read_json(staging / "facts" / f"{kind}.json") or {},
            execution=making,
            outputs=execution.outputs,
            run="toy",
            label=execution.label,
        )
        for kind in execution.outputs
    }
