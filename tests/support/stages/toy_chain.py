"""The toy chain made in this very process, in a second: the DAG's steps, run and published in order."""

import uuid
from pathlib import Path

from nautile.common.files import read_json
from nautile.configs.schema import RunConfig
from nautile.flows.dag import Step, build_dag
from nautile.store.artifacts import Artifact, Store
from nautile.store.events import EventWriter
from nautile.store.manifest import now
from nautile.tasks.engine.attempt_log import write_attempt_row
from nautile.tasks.engine.job import Job
from tests.support.stages.toy_dag import toy_dag


def make_all(root: Path, config: RunConfig) -> dict[str, dict[str, str]]:
    """Label -> kind -> artifact id, all made in the store at `root`."""
    store = Store(root)
    store.prepare()
    made: dict[str, dict[str, Artifact]] = {}
    for step in build_dag(config, toy_dag):
        inputs = {name: made[need.producer][need.kind] for name, need in step.needs.items()}
        inputs |= {name: store.get(full_id) for name, full_id in step.stored_inputs.items()}
        made[step.label] = _make(store, step, inputs)
    return {label: {kind: artifact.id for kind, artifact in kinds.items()} for label, kinds in made.items()}


def _make(store: Store, step: Step, inputs: dict[str, Artifact]) -> dict[str, Artifact]:
    stage, staging, making = step.stage, store.staging(step.key), uuid.uuid4().hex
    emit = EventWriter(store.root / "events" / f"{making}.jsonl", making, stage=stage.name)
    folders = {name: artifact.path for name, artifact in inputs.items()}
    stage.work(Job(stage.name, step.key, making, step.section, folders, staging, emit))
    emit.close()
    row = {"id": uuid.uuid4().hex, "run": "toy", "stage": stage.name, "label": step.label, "key": step.key}
    row |= {"execution": making, "attempt": 1, "state": "done", "reused": False, "started": now(), "seconds": 1.5}
    write_attempt_row(store, row | {"ended": now(), "peak_bytes": 10**8})
    return {
        kind: store.publish(
            kind,
            step.key,
            staging / "output" / kind,
            stage=stage.name,
            version=stage.version,
            config=step.section,
            inputs=inputs,
            facts=read_json(staging / "facts" / f"{kind}.json") or {},
            execution=making,
            outputs=step.outputs,
            run="toy",
            label=step.label,
        )
        for kind in step.outputs
    }
