"""Runs that only the catalog knows: a plan with settings, and the accuracy of an evaluation."""

from collections.abc import Sequence
from typing import Any

from nautile.store.artifacts import Store
from nautile.store.events import EventWriter
from nautile.store.manifest import host, now
from nautile.tasks.engine.attempt_log import write_attempt_row, write_row
from tests.support.samples.stage_store import key_of


def recorded_run(
    store: Store, name: str, settings: dict[str, Any], label: str, accuracy: float, execution: str = ""
) -> None:
    """A run with a plan and one evaluation, of which the catalog has the accuracy on the held-out problems."""
    row = {"run": name, "config": name, "started": now()}
    write_row(store, "plan", row | {"id": f"plan-{name}", "state": "done", "steps": [], "settings": settings})
    attempt = {"stage": "evaluate", "label": label, "key": f"key-{name}", "execution": execution or f"execution-{name}"}
    attempt |= {"id": f"attempt-{name}", "state": "done", "reused": False, "attempt": 1, "seconds": 1.0}
    write_attempt_row(store, row | attempt | {"ended": now()})
    emit = EventWriter(store.root / "events" / f"{name}.jsonl", attempt["execution"], stage="evaluate")
    emit("metric", name="evaluate/held_out/accuracy", step=0, value=accuracy)
    emit.close()


def planned(store: Store, labels: Sequence[str], run: str = "r1", **fields: Any) -> None:
    """Record the start of a run of these steps, one after the other."""
    steps = [
        {"label": label, "stage": label.partition(":")[0], "key": key_of(label), "after": [*labels[max(0, i - 1) : i]]}
        for i, label in enumerate(labels)
    ]
    row = {"id": run, "run": run, "config": "toy", "steps": steps, "started": now(), "host": host()}
    write_row(store, "plan", row | {"state": "running", "resume": "nautile run toy"} | fields)


def attempted(store: Store, label: str, state: str, run: str = "r1", **fields: Any) -> None:
    """Record an attempt that has ended, or is at work."""
    row = {"id": f"{run}-{label}", "run": run, "stage": label.partition(":")[0], "label": label, "key": key_of(label)}
    row |= {"execution": f"e-{label}", "attempt": 1, "state": state, "started": now(), "host": host()}
    write_attempt_row(store, row | ({} if state == "running" else {"ended": now(), "seconds": 1.0}) | fields)
