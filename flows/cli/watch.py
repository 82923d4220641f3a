"""`nautile status`, `nautile runs` and `nautile logs`: show the state and output of runs, once or continuously."""

import contextlib
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from nautile.common.commands import shell_command
from nautile.common.errors import ConfigError, Retryable
from nautile.common.text import duration, one_line, visible
from nautile.flows.cli.terminal import Json, SetOption, complete_config, console_for, listed_as, show_as, the_store

if TYPE_CHECKING:
    from nautile.store.artifacts import Store

EVERY_S = 2.0
RunOrConfig = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN|CONFIG",
        help="A run: its id, the first digits of it, or its name; or a configuration. Default: the live or newest run.",
        autocompletion=complete_config,
    ),
]


def status(
    what: RunOrConfig = None,
    step: Annotated[str | None, typer.Argument(metavar="STEP", help="With --why: one step, such as pretrain.")] = None,
    why: Annotated[
        bool, typer.Option("--why", help="Show why each missing step must run: what changed its key.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Update the table every two seconds, until Ctrl-C.")] = False,
    settings: SetOption = None,
    as_json: Json = False,
) -> None:
    """Show a run: its state, changes, steps and time left. Without RUN: the live or newest run.

    With a configuration: the state of each of its steps in the store, independent of the run that made them.
    """
    from rich.text import Text

    from nautile.flows.cli import runs
    from nautile.flows.run_state import reading
    from nautile.store.catalog import events_left_out

    if watch and as_json:
        raise ConfigError("--json prints one snapshot: leave out --watch")
    if (watch and why) or (step and not why):
        raise ConfigError("a step is named with --why, which cannot be combined with --watch")
    store = the_store()
    # Prefect's server is asked only where what it says is shown: without RUN, and for one that the store does not know.
    # First, so that a run which begins meanwhile is in one of the two.
    queued = [] if what or why or settings or as_json else runs_without_record(store)
    try:
        # Options that only a configuration has decide without a look at the catalog.
        run, left_out = None, dict[str, int]()
        if not (why or settings):
            with reading(store) as query:
                run = runs.run_unless_config(store, what)
                left_out = events_left_out(query)
    except ConfigError:  # it has no record in the store before a process begins it
        queued = runs_without_record(store)
        if (found := runs.run_named(what or "", {row["id"]: row["name"] for row in queued})) is None:
            raise
        show_as([], as_json, lambda _: Text(queued_text(next(row for row in queued if row["id"] == found))))
        return
    if run is not None or not (what or why or settings):
        if watch:

            def read() -> list[dict[str, Any]]:
                current = runs.run_unless_config(store, run.run if run and what else None)
                return runs.step_rows(current) if current else []

            watch_status(read, runs.run_view)
        if run is not None:
            show_as(runs.step_rows(run), as_json, partial(runs.run_view, run=runs.run_row(run)))
            if queued:
                console_for().print(visible("\n".join(["", *map(queued_text, queued)])), soft_wrap=True, markup=False)
            _note_left_out(left_out)
            return
        # No default configuration here: its keys take seconds to compute, and a run that starts now is recorded sooner.
        message = "\n".join(map(queued_text, queued)) or (
            f"no run in {store.root} yet: `nautile run` starts one; `nautile status CONFIG` shows which steps of a "
            "configuration are in the store"
        )
        show_as([], as_json, lambda _: Text(message))
        return
    from nautile.configs.load import load
    from nautile.flows.cli import inspect
    from nautile.flows.cli.tables import status_table

    run_config = load(what or "local", settings)
    if why:
        from nautile.flows.cli.inspect import explain
        from nautile.flows.cli.tables import why_text

        show_as(explain(store, run_config, step), as_json, why_text)
        return
    if watch:
        watch_status(lambda: inspect.status(store, run_config), status_table)
    show_as(inspect.status(store, run_config), as_json, status_table)
    # A hint at the end, where it stays visible: the steps of a configuration do not say that a run works on them.
    current = None if as_json else runs.newest_run(store)
    if current is not None and current.state in ("running", "waiting"):
        command = shell_command("nautile", "status", current.run[:8])
        line = f"run {current.run[:8]} ({one_line(current.name)}) is {current.state}: `{command}`"
        console_for().print(line, soft_wrap=True)


def runs_without_record(store: "Store") -> list[dict[str, Any]]:
    """The runs that wait in the server of `nautile up` for their first process."""
    from nautile.flows.run_state import NAMES_OF_RUNS, reading

    if not (queued := _queued_runs(store)):
        return []
    with reading(store) as query:
        known = {row["run"] for row in query(NAMES_OF_RUNS)}
    return [row for row in queued if row["id"] not in known]


def _queued_runs(store: "Store") -> list[dict[str, Any]] | None:
    """As `run_actions.queued_runs`, whose import takes a quarter of a second, if `nautile up` was ever called here."""
    if not store.services.exists():
        return []
    from nautile.flows.operate.run_actions import queued_runs

    return queued_runs(store)


def queued_text(row: dict[str, Any]) -> str:
    """What a run waits for that no process has begun."""
    since = datetime.fromisoformat(row["since"])
    waits = duration((datetime.now(UTC) - since).total_seconds())
    due = f"due at {since.astimezone():%Y-%m-%d %H:%M}, {waits} ago"
    return f"run {row['id'][:8]} ({one_line(row['name'])}): queued\n{due}\n{row['why']}"


def runs(
    most: Annotated[int, typer.Option("--most", "--limit", "-n", min=1, help="Number of runs to list.")] = 20,
    match: Annotated[
        str,
        typer.Option(
            metavar="TEXT", help="Only those with all of its words in id, name, changes, state, note or tags."
        ),
    ] = "",
    sort: Annotated[
        str, typer.Option(metavar="ORDER", help="newest, oldest, best, worst (score), time (longest first), or name.")
    ] = "newest",
    state: Annotated[
        str | None, typer.Option(metavar="STATE", help="Only those in this state: running, failed, interrupted, ...")
    ] = None,
    as_json: Json = False,
) -> None:
    """List runs with their name, state, and changes from their base configuration."""
    from nautile.flows.cli.runs import list_runs, queued_rows, runs_table
    from nautile.flows.run_state import reading
    from nautile.store.catalog import events_left_out

    store = the_store()
    with reading(store) as query:
        rows, total = list_runs(store, most, match, sort, state)
        left_out = events_left_out(query)
    queued = _queued_runs(store)
    waiting = [] if match or state not in (None, "queued") else queued_rows(queued or [], rows)
    if (match or state) and not (rows or waiting or as_json):
        which = [f"is {state}"] if state else []
        which += [f"has {match!r} in its id, name, configuration, changes, state, note or tags"] if match else []
        raise ConfigError(f"no run {' and '.join(which)}")
    show_as([*waiting, *rows], as_json, runs_table)
    if queued is None:
        line = "the server of `nautile up` does not answer: runs that wait there for a process are not listed"
        console_for(stderr=True).print(line, style="yellow", soft_wrap=True)
    if len(rows) < total and not as_json:
        command = shell_command("nautile", "runs", *listed_as(total, match, sort, "newest", state))
        console_for().print(f"{len(rows):,} of {total:,} runs: `{command}` lists all", style="dim", soft_wrap=True)
    _note_left_out(left_out)


def _note_left_out(left_out: dict[str, int]) -> None:
    """Print, on standard error, how many events are not shown because their form is unknown."""
    from nautile.flows.cli.tables import left_out_text

    if left_out:
        line = f"{left_out_text(sum(left_out.values()))}; `nautile store verify` names the files"
        console_for(stderr=True).print(line, style="yellow", soft_wrap=True)


def watch_status(read: Callable[[], list[dict[str, Any]]], view: Callable[[list[dict[str, Any]]], Any]) -> NoReturn:
    """Redraw the status table every two seconds, until Ctrl-C (`KeyboardInterrupt`).

    Without a terminal, print a line for each stage whose state has changed.
    """
    from rich.live import Live
    from rich.text import Text

    console = console_for()
    rows: list[dict[str, Any]] = []
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None
    with live or contextlib.nullcontext():
        while True:
            previous = rows
            with contextlib.suppress(Retryable):  # another process has the catalog open: read it at the next redraw
                rows = read()
            if live is None:
                for line in state_changes(previous, rows):
                    console.print(Text(line), soft_wrap=True)
            elif rows:
                live.update(view(rows), refresh=True)
            time.sleep(EVERY_S)


def state_changes(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[str]:
    """A line `label: state` for each stage whose state differs between two lists of status rows."""
    known = {row["label"]: row["state"] for row in before}
    return [f"{row['label']}: {row['state']}" for row in after if known.get(row["label"]) != row["state"]]


def logs(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="A run's id, its first digits, or its name. Default: the live or newest."),
    ] = None,
    stage: Annotated[
        str | None,
        typer.Option(
            metavar="STAGE",
            help="A stage, or one step: evaluate:align. Default: the step that runs, else failed, else is the last.",
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new output as it is written, until the run ends.")
    ] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Print the last N lines; 0: all.")] = 200,
) -> None:
    """Print the output of a stage's process, during and after its execution."""
    from nautile.flows import logs

    store, notes = the_store(), console_for(stderr=True)
    log = logs.choose(store, run, stage)

    def print_heading(log: logs.LogFile) -> None:
        where = log.path(store) or "its log has been deleted"
        notes.print(f"{log.label} of run {log.run[:8]}: {where}", style="dim", soft_wrap=True)

    print_heading(log)
    if follow:
        current = log
        for source, text in logs.follow(store, log, stage is None, lines):
            if source != current:
                current = source
                print_heading(source)
            sys.stdout.write(text)
            sys.stdout.flush()
        return
    if path := log.path(store):
        sys.stdout.write(logs.last_lines(path, lines))
    for path in log.item_logs(store):
        notes.print(f"in progress: {path}", style="dim", soft_wrap=True)
        sys.stdout.write(logs.last_lines(path, lines))


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
