"""Notes about runs, and their tags: written by `nautile note` and on the dashboard's table of runs."""

import json
from typing import Any

from nautile.common.errors import ConfigError
from nautile.common.files import writing
from nautile.store.artifacts import Store
from nautile.store.catalog import Catalog
from nautile.tasks.engine.attempt_log import write_row

_NOTE = "SELECT text, tags FROM notes WHERE id = ?"


def read_note(store: Store, run: str) -> dict[str, Any]:
    """The `text` and `tags` of a run's note; both empty without a note."""
    rows = Catalog(store).query(_NOTE, [run])
    return (
        {"text": rows[0]["text"] or "", "tags": json.loads(rows[0]["tags"] or "[]")}
        if rows
        else {"text": "", "tags": []}
    )


def write_note(store: Store, run: str, text: str, tags: list[str], without: list[str]) -> dict[str, Any]:
    """Replace the note of a run, and return it. Tags keep the order in which they were added, without duplicates."""
    if any(not tag.strip() or len(tag) > 60 for tag in tags):
        raise ConfigError("--tag: a tag has 1 to 60 characters")
    new_tags = [tag for tag in dict.fromkeys(tag.strip() for tag in tags) if tag not in without]
    # An event like a metric: read into the catalog from a file, so that `store rebuild` keeps it.
    with writing(store.root):
        write_row(store, "note", {"id": run, "text": text.strip(), "tags": new_tags})
    Catalog(store).ingest()
    return {"text": text.strip(), "tags": new_tags}
