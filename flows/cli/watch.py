"""`nautile status` and `nautile logs`: what a run is doing, once or as it changes."""

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer

from common.errors import ConfigError, Retryable
from flows.cli.terminal import Json, SetOption, complete_config, console_for, show_as, the_store

EVERY_S = 2.0
RunOrConfig = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN|CONFIG",
        help="A run id, or its first digits; or a configuration, as `run` takes it. Default: the live or newest run.",
        autocompletion=complete_config,
    ),
]


def status(
    what: RunOrConfig = None,
    step: Annotated[str | None, typer.Argument(metavar="STEP", help="With --why: one step, such as pretrain.")] = None,
    why: Annotated[
        bool, typer.Option("--why", help="Show what made the key of each missing step differ from an earlier one.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Keep the table up to date until Ctrl-C.")] = False,
    settings: SetOption = None,
    as_json: Json = False,
) -> None:
    """Show a run: its state, changes, steps and time left. Without RUN: the live or newest one.

    With a configuration: the state of each of its steps in the store, whichever run made them.
    """
    from rich.text import Text

    from flows.cli import runs

    if watch and as_json:
        raise ConfigError("--json prints one snapshot: leave out --watch")
    if (watch and why) or (step and not why):
        raise ConfigError("a step is named with --why, which cannot be combined with --watch")
    store = the_store()
    run = None if why or settings else runs.run_unless_config(store, what)
    if run is not None or not (what or why or settings):
        if watch:

            def read() -> list[dict[str, Any]]:
                now = runs.run_unless_config(store, run.run if run and what else None)
                return runs.step_rows(now) if now else []

            watch_status(read, runs.run_view)
        if run is not None:
            show_as(runs.step_rows(run), as_json, runs.run_view)
            return
        # Before the first run nothing is computed: that would take seconds, and `run` records itself within these.
        none = (
            f"no run in {store.root} yet: `nautile run` starts one; `nautile status CONFIG` shows what is there of one"
        )
        show_as([], as_json, lambda _: Text(none))
        return
    from configs.load import load
    from flows.cli import inspect
    from flows.cli.tables import status_table

    run_config = load(what or "local", settings)
    if why:
        from flows.cli.tables import why_text
        from flows.cli.why import explain

        show_as(explain(store, run_config, step), as_json, why_text)
        return
    if watch:
        watch_status(lambda: inspect.status(store, run_config), status_table)
    show_as(inspect.status(store, run_config), as_json, status_table)
    current = None if as_json else runs.newest_run(store)
    if current is not None and current.state in ("running", "waiting"):
        line = f"run {current.run[:8]} ({current.name}) is {current.state}: `nautile status {current.run[:8]}`"
        console_for().print(line, soft_wrap=True)


def runs(
    most: Annotated[int, typer.Option("--most", "-n", min=1, help="List this many, the newest first.")] = 20,
    as_json: Json = False,
) -> None:
    """List the runs: their names, states, and what each changed against its base configuration."""
    from flows.cli.runs import list_runs, runs_table

    show_as(list_runs(the_store(), most), as_json, runs_table)


def watch_status(read: Callable[[], list[dict[str, Any]]], view: Callable[[list[dict[str, Any]]], Any]) -> NoReturn:
    """Redraw the table of the stages every two seconds, until Ctrl-C (`KeyboardInterrupt`).

    Without a terminal, print a line for each stage whose state has changed instead.
    """
    from rich.live import Live
    from rich.text import Text

    console, rows = console_for(), []
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None
    with live or contextlib.nullcontext():
        while True:
            previous = rows
            with contextlib.suppress(Retryable):  # another process has the catalog open: the next read will do
                rows = read()
            if live is None:
                for line in state_changes(previous, rows):
                    console.print(Text(line), soft_wrap=True)
            elif rows:
                live.update(view(rows), refresh=True)
            time.sleep(EVERY_S)


def state_changes(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[str]:
    """`label: state` of each stage whose state differs between two lists of status rows."""
    known = {row["label"]: row["state"] for row in before}
    return [f"{row['label']}: {row['state']}" for row in after if known.get(row["label"]) != row["state"]]


def logs(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="A run id, or its first digits. Default: the newest run.")
    ] = None,
    stage: Annotated[
        str | None,
        typer.Option(
            metavar="STAGE",
            help="A stage, or one step: evaluate:align. Default: the one that is running, else the last.",
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing new output, stage after stage, until the run ends.")
    ] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Print the last N lines; 0: all.")] = 200,
) -> None:
    """Print the output of a stage's process, while it runs and after."""
    from flows.cli import logs

    store, notes = the_store(), console_for(stderr=True)
    log = logs.choose(store, run, stage)

    def print_heading(log: logs.LogFile) -> None:
        where = log.path(store) or "its log is gone"
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
