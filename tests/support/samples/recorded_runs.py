"""Runs that only the catalog knows: a plan with settings, and the accuracy of an evaluation."""

from typing import Any

from nautile.store.artifacts import Store
from nautile.store.events import EventWriter
from nautile.store.manifest import now
from nautile.tasks.engine.attempt_log import write_attempt_row, write_row


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
