"""Events as another version, another machine or a stranger may have written them into a store that is shared."""

import json
from typing import Any

from nautile.store.artifacts import Store

PLAN: dict[str, Any] = {
    "id": "p",
    "run": "r2",
    "state": "done",
    "started": "2026-11-26T12:00:00+00:00",
    "resume": "nautile run toy",
    "settings": {"seed": 0},
    "steps": [{"label": "align", "stage": "align", "key": "a" * 64, "after": [], "inputs": []}],
    "changes": [{"field": "seed", "before": 0, "after": 1}],
}
# What no reader of a plan expects, in place of its own fields.
OF_ANOTHER_FORM: list[dict[str, Any]] = [
    *({"changes": value} for value in ("x", {"a": 1}, [1], [{"after": 2}], [["seed", 0, 1]])),
    *({"steps": value} for value in ("x", {"a": 1}, [None], [{"stage": "align"}], [{"label": "a", "after": 3}])),
    *({"steps": [{"label": "a", name: value}]} for name in ("key", "stage") for value in ("..", "a/../b")),
    *({"settings": value} for value in ("x", [1], 3)),
    *({"run": value} for value in ("../../x", "..", "a/b", "a\x1b[1m", 5, "", "x" * 129, ["r2"])),
    *({"state": value} for value in (None, "paused", 1, ["done"])),
    *({name: value} for name in ("started", "ended") for value in (5, "yesterday", "2026-11-26T12:00:00")),
    *({"started": value} for value in ("9999-12-31T23:59:59+00:00", "0001-01-01T00:00:00+14:00")),
]


def event_of(kind: str, **fields: Any) -> dict[str, Any]:
    return {"id": "p", "kind": kind, "execution": "", "stage": "", "time": 1_795_694_548_952_836, "fields": fields}


def write_events(store: Store, *events: dict[str, Any]) -> None:
    """Write an event file as it comes from a remote."""
    (store.root / "events" / "other.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
