"""A second run in a store where the toy chain has run, to compare with it."""

import json

from nautile.store.artifacts import Store
from nautile.store.events import EventWriter
from nautile.store.manifest import now
from nautile.tasks.engine.attempt_log import write_attempt_row, write_row
from tests.support.samples.stage_store import filled, key_of

RUN = "b0b0b0b0-1111"


def add_second_run(store: Store, outputs: dict[str, dict[str, str]]) -> None:
    """Add one that shares its pretraining and has a better reinforcement of its own. `outputs`: see `make_all`."""
    for label in ("pretrain", "evaluate:pretrain"):
        artifact = store.get(next(iter(outputs[label].values())))
        row = {"id": f"{RUN}-{label}", "run": RUN, "config": "toy", "stage": label.partition(":")[0], "label": label}
        row |= {"key": artifact.key, "execution": artifact.execution, "attempt": 1, "state": "reused", "reused": True}
        write_attempt_row(store, row | {"started": now(), "seconds": 0.1, "ended": now()})
    for label, execution in (("reason", "ours"), ("evaluate:reason", "evaluated")):
        row = {"id": f"{RUN}-{label}", "run": RUN, "config": "toy", "stage": label.partition(":")[0], "label": label}
        row |= {"key": key_of(label), "execution": execution, "attempt": 1, "state": "done", "reused": False}
        write_attempt_row(store, row | {"started": now(), "seconds": 60.0, "ended": now()})
    emit = EventWriter(store.root / "events" / "ours.jsonl", "ours", stage="reason")
    for step, value in enumerate((0.1, 0.9, 0.7), 1):
        emit("metric", name="reward", step=step, value=value)
    emit.close()
    before = store.get(outputs["evaluate:reason"]["evaluation"]).path / "rows.jsonl"
    rows = [json.loads(line) | {"strict": True} for line in before.read_text(encoding="utf-8").splitlines()]
    files = {"rows.jsonl": "".join(json.dumps(row) + "\n" for row in rows)}
    store.publish(
        "evaluation",
        key_of("evaluate:reason"),
        filled(store.staging(key_of("evaluate:reason")) / "output", files),
        **{"stage": "evaluate", "version": 1, "config": {}, "inputs": {}, "facts": {}, "label": "evaluate:reason"},
        execution="evaluated",
    )
    for run, steps in (("toy", 30), (RUN, 3)):
        settings = {"name": run, "seed": 0, "reason": {"policy": {"steps": steps}}}
        row = {"id": f"plan-{run}", "run": run, "config": "toy", "name": f"the {run[:3]} run", "state": "done"}
        write_row(store, "plan", row | {"steps": [], "settings": settings, "started": now()})
