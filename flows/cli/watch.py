"""The commands of `nautile` for whoever looks after runs: what a stage says, and what dead processes left behind."""

import contextlib
import os
import sys
from typing import Annotated

import typer

from flows.cli.terminal import Json, console_for, show_as, the_store

watching = typer.Typer()


@watching.command()
def reconcile(as_json: Json = False) -> None:
    """Settle what processes that died left behind: runs shown as running, rests of staging, lock files."""
    from flows.cli.tables import settled_view
    from flows.operate import prefect_server
    from flows.operate.services import url_of

    store, results = the_store(), []
    if store.root.exists():
        prefect_server.quiet(store)
        with contextlib.ExitStack() as stack:
            if store.lost_runs():  # only then is a server needed
                if url := url_of(store, "server"):
                    os.environ.setdefault("PREFECT_API_URL", url)
                stack.enter_context(console_for(stderr=True).status("asking Prefect"))
                stack.enter_context(prefect_server.api())
            # Imports Prefect, which reads its settings once: after `quiet` and `api` have set them.
            from flows.operate.reconcile import reconcile, unfinished

            results = [*reconcile(store), *unfinished(store)]
    show_as([one.row() for one in results], as_json, lambda _: settled_view([one.line() for one in results]))


@watching.command()
def logs(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="its id, or the beginning of it; the newest run if none")
    ] = None,
    stage: Annotated[
        str | None, typer.Option(metavar="STAGE", help="or one use: evaluate:align; else the one at work, or the last")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="go on as it is written, from stage to stage, until the run ends")
    ] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="the last of them; 0: all")] = 200,
) -> None:
    """What a stage's process has said, while it works and after."""
    from flows.cli import logs as reading

    store, notes = the_store(), console_for(stderr=True)
    told = reading.choose(store, run, stage)

    def head(one: reading.Told) -> None:
        where = one.log(store) or "nothing is left of its log"
        notes.print(f"{one.label} of run {one.run[:8]}: {where}", style="dim", soft_wrap=True)

    head(told)
    if follow:
        for one, piece in reading.follow(store, told, stage is None, lines):
            if one != told:
                told = one
                head(one)
            sys.stdout.write(piece)
            sys.stdout.flush()
        return
    if path := told.log(store):
        sys.stdout.write(reading.last_lines(path, lines))
    for path in told.units(store):
        notes.print(f"under way: {path}", style="dim", soft_wrap=True)
        sys.stdout.write(reading.last_lines(path, lines))
