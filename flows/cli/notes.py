"""`nautile note`: a note about a run, and tags of a run, for the dashboard's table of runs."""

from typing import Annotated

import typer

from nautile.flows.cli.terminal import console_for, the_store


def note(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's id, its first digits, or its name.")],
    text: Annotated[str | None, typer.Argument(metavar="TEXT", help='The note; "" removes it.')] = None,
    tag: Annotated[list[str] | None, typer.Option("--tag", metavar="NAME", help="Add a tag; may be repeated.")] = None,
    untag: Annotated[list[str] | None, typer.Option("--untag", metavar="NAME", help="Remove a tag.")] = None,
) -> None:
    """Write a note about a run, or tag it, for the dashboard's table of runs. Without options: print note and tags."""
    from rich.text import Text

    from nautile.flows.logs import run_id
    from nautile.flows.notes import read_note, write_note

    store = the_store()
    full_id = run_id(store, run)
    row = read_note(store, full_id)
    if text is not None or tag or untag:
        new_text = row["text"] if text is None else text
        row = write_note(store, full_id, new_text, [*row["tags"], *(tag or ())], untag or [])
    tags = f" [{', '.join(row['tags'])}]" if row["tags"] else ""
    console_for().print(Text(f"run {full_id[:8]}{tags}: {row['text'] or 'no note'}"), soft_wrap=True)
