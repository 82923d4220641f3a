"""The commands of `nautile` for whoever looks after runs: what a stage says, and what dead processes left behind."""

import os

import typer

from flows.terminal import Json, console_for, show_as, the_store

watching = typer.Typer()


@watching.command()
def reconcile(as_json: Json = False) -> None:
    """Settle what processes that died left behind: runs shown as running, rests of staging, lock files."""
    from flows import prefect_env
    from flows.reconcile import lost_runs, unfinished
    from flows.reconcile import reconcile as settle
    from flows.services import server_url
    from flows.text import settled_view

    store = the_store()
    if not lost_runs(store):
        found = [*settle(store), *unfinished(store)]
    else:
        prefect_env.quiet(store)
        if url := server_url(store):
            os.environ.setdefault("PREFECT_API_URL", url)
        with console_for(stderr=True).status("asking Prefect"), prefect_env.api():
            found = [*settle(store), *unfinished(store)]
    show_as([one.row() for one in found], as_json, lambda _: settled_view([one.line() for one in found]))
