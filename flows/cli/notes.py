"""`nautile note`: a note about a run, and tags of a run, for the dashboard's table of runs."""

import json
from typing import Annotated, Any

import typer

from nautile.common.errors import ConfigError
from nautile.flows.cli.terminal import console_for, the_store

_NOTE = "SELECT text, tags FROM notes WHERE id = ?"


def note(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's id, its first digits, or its name.")],
    text: Annotated[str | None, typer.Argument(metavar="TEXT", help='The note; "" removes it.')] = None,
    tag: Annotated[list[str] | None, typer.Option("--tag", metavar="NAME", help="Add a tag; may be repeated.")] = None,
    untag: Annotated[list[str] | None, typer.Option("--untag", metavar="NAME", help="Remove a tag.")] = None,
) -> None:
    """Write a note about a run, or tag it, for the dashboard's table of runs. Without options: print note and tags."""
    from rich.text import Text

    from nautile.flows.cli.logs import run_id

    store = the_store()
    full_id = run_id(store, run)
    row = read_note(store, full_id)
    if text is not None or tag or untag:
        new_text = row["text"] if text is None else text
        row = write_note(store, full_id, new_text, [*row["tags"], *(tag or ())], untag or [])
    tags = f" [{', '.join(row['tags'])}]" if row["tags"] else ""
    console_for().print(Text(f"run {full_id[:8]}{tags}: {row['text'] or 'no note'}"), soft_wrap=True)


def read_note(store: Any, run: str) -> dict[str, Any]:
    """The `text` and `tags` of a run's note; both empty without a note."""
    from nautile.store.catalog import Catalog

    rows = Catalog(store).query(_NOTE, [run])
    return (
        {"text": rows[0]["text"] or "", "tags": json.loads(rows[0]["tags"] or "[]")}
        if rows
        else {"text": "", "tags": []}
    )


def write_note(store: Any, run: str, text: str, tags: list[str], without: list[str]) -> dict[str, Any]:
    """Replace the note of a run, and return it. Tags keep the order in which they were added, without duplicates."""
    from nautile.common.files import writing
    from nautile.store.catalog import Catalog
    from nautile.tasks.engine.attempt_log import write_row

    if any(not tag.strip() or len(tag) > 60 for tag in tags):
        raise ConfigError("--tag: a tag has 1 to 60 characters")
    # A tag that is added and removed by one command is removed.
    new_tags = [tag for tag in dict.fromkeys(tag.strip() for tag in tags) if tag not in without]
    # A note is an event like a metric: appended to a file, and read into the catalog from there. So `store rebuild`
    # keeps it.
    with writing(store.root):
        write_row(store, "note", {"id": run, "text": text.strip(), "tags": new_tags})
    Catalog(store).ingest()
    return {"text": text.strip(), "tags": new_tags}
