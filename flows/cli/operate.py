"""Commands that operate runs and services: dashboard, server, deploy, approve, up, down, reconcile."""

import contextlib
import os
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from nautile.common.commands import shell_command
from nautile.common.errors import ConfigError
from nautile.common.processes import collector_paused, is_loopback, url_host
from nautile.common.text import visible
from nautile.flows.cli.terminal import ConfigArgument, Json, SetOption, console_for, show_as, the_store

if TYPE_CHECKING:
    from nautile.configs.schema import RunConfig


def dashboard(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8501,
    host: Annotated[str, typer.Option(help="Address to listen on. Default: this machine only.")] = "127.0.0.1",
) -> None:
    """Serve the web dashboard of the store: runs, curves, rollouts, evaluations, lineage. Read-only."""
    from nautile.flows.dashboard.command import arguments, serve

    command = arguments(host, port)  # raises for a port in use, before an address is printed that is another's
    console = console_for(stderr=True)
    console.print(f"the dashboard is at http://{url_host(host)}:{port} (Ctrl-C stops it)", soft_wrap=True)
    if not is_loopback(host):
        console.print(f"it has no login: anyone who can reach {host} can read the store", soft_wrap=True)
    serve(command)


def server(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 4200,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Other than loopback, it requires PREFECT_API_AUTH_STRING.")
    ] = "127.0.0.1",
) -> None:
    """Serve Prefect's API and web UI in the foreground until stopped, for containers and service managers."""
    from nautile.flows.operate import prefect_server

    prefect_server.prepare_to_serve(the_store(), host, port)
    address = f"http://{url_host(host)}:{port}"
    console_for(stderr=True).print(f"Prefect's server is at {address} (Ctrl-C stops it)", soft_wrap=True)
    prefect_server.serve(port)


def deploy(
    config: ConfigArgument = "local",
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum parallel steps per resource, over all runs of the server. Default: those of [resources].",
        ),
    ] = None,
    runs: Annotated[
        int, typer.Option(min=1, help="Maximum parallel flow runs, including those that wait for a slot.")
    ] = 8,
    pool: Annotated[
        str | None, typer.Option(metavar="TYPE", help="Register for a work pool: process, kubernetes or cloud.")
    ] = None,
    settings: SetOption = None,
) -> None:
    """Serve the pipeline, each stage and the scheduled evaluation as Prefect deployments, until stopped.

    PREFECT_API_URL must be the address of the Prefect server.
    With --pool, the deployments are only registered, for your own workers.
    """
    from nautile.configs.load import load
    from nautile.flows.operate import prefect_server

    run_config = load(config, settings)
    prefect_server.configure_prefect(the_store())
    prefect_server.require_api()
    # Imports Prefect, which reads its settings at import: they must be set by `configure_prefect` before.
    with collector_paused():
        from nautile.flows.operate.deployments import register, serve

    print_changes = partial(print_kept_changes, run_config, os.environ["PREFECT_API_URL"], limit)
    if pool is not None:
        console_for(stderr=True).print(register(run_config, config, pool, limit), soft_wrap=True)
        print_changes()
        return
    console_for(stderr=True).print(f"serving {run_config.name}; start runs from Prefect's page (Ctrl-C stops serving)")
    serve(run_config, config, limit, runs, print_changes)


def approve(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="A run id, or its first digits.")] = None,
    as_json: Json = False,
) -> None:
    """Approve the stage that a run waits for. Without RUN: list the waiting runs and their questions."""
    from nautile.flows.cli.tables import waiting_table
    from nautile.flows.operate import questions, services

    services.use_login(the_store())
    if run is None:
        show_as(questions.waiting(the_store()), as_json, waiting_table)
        return
    approved = questions.approve(the_store(), run, os.environ.get("PREFECT_API_URL"))
    stage = f" with {approved['label']}" if approved["label"] else ""
    show_as(approved, as_json, lambda _: f"approved: run {approved['run'][:8]} continues{stage}")


def retry(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run of a deployment: its id, or its first digits.")],
) -> None:
    """Start a run again that failed, crashed or was cancelled, on its Prefect server. Finished steps are reused.

    For runs of a form, a schedule or an API call: a run from a terminal continues with its own command.
    After `nautile down`, the services are started again first, as `nautile up` was called last.
    """
    from nautile.flows.logs import full_id
    from nautile.flows.operate import run_actions, services

    store = the_store()
    run, api = full_id(store, run), os.environ.get("PREFECT_API_URL")
    # Without the deployments the server would wait for ever for a process that begins the run.
    if not api and not all(services.url_of(store, name) for name in ("server", "deployments")):
        services.up_again(store)
    api = api or services.url_of(store, "server")
    assert api  # `up_again` raises unless it runs
    services.use_login(store)
    run_actions.retry_ended(api, run)
    console_for().print(f"run {run[:8]} starts again: `{shell_command('nautile', 'status', run[:8])}` shows it")


def up(
    config: ConfigArgument = "local",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of Prefect's server and page.")] = 4200,
    dashboard_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the dashboard.")] = 8501,
    host: Annotated[
        str, typer.Option(help="Address of the server. Other than loopback, a login is generated and required.")
    ] = "127.0.0.1",
) -> None:
    """Start Prefect's server, the deployments and the dashboard on this machine, and print their addresses."""
    from nautile.configs.load import load
    from nautile.flows.cli.tables import service_table
    from nautile.flows.operate import prefect_server, services

    run_config = load(config)  # raises for an invalid configuration before anything is started
    store, console = the_store(), console_for()
    last, had_server = services.last_up(store), services.url_of(store, "server") is not None
    with console.status("starting") as spinner:
        running = services.up(store, config, port, dashboard_port, spinner.update, host)
        os.environ.setdefault("PREFECT_API_URL", services.url_of(store, "server") or "")
        # Imports Prefect, which reads its settings at import: the address must be set before.
        from nautile.flows.operate.reconcile import reconcile_if_possible

        # A machine that went down left runs that Prefect still shows as running.
        for result in reconcile_if_possible(store):
            console.print(result.line(), soft_wrap=True)
    console.print(service_table(running), crop=False)
    line = "" if had_server else prefect_server.other_history(store, last.home if last else None)
    if line:
        console_for(stderr=True).print(line, style="yellow", soft_wrap=True)
    print_kept_changes(run_config, os.environ["PREFECT_API_URL"])
    console.print(
        "`nautile run` uses this server if it has the same store; elsewhere, and for Prefect's own commands:\n"
        + shell_command("export", f"PREFECT_API_URL={services.url_of(store, 'server')}"),
        soft_wrap=True,
    )
    if login := services.use_login(store):
        console.print(
            f"the server requires the login in {login}: its page asks for it, other programs read it from "
            "PREFECT_API_AUTH_STRING",
            soft_wrap=True,
        )


def print_kept_changes(config: "RunConfig", api: str, limit: int | None = None) -> None:
    """Print, on standard error, where the server differs from the configuration, or from `--limit`."""
    from nautile.flows.operate.kept_changes import kept_changes

    heading = "changed in Prefect's page, and kept until it is changed there or in the configuration:"
    try:
        lines = kept_changes(api, config, limit)
        text = "\n  ".join([heading, *lines]) if lines else ""
    except ConfigError as error:
        text = str(error)
    if text:
        console_for(stderr=True).print(visible(text), style="yellow", soft_wrap=True, markup=False)


def down() -> None:
    """Stop the services that `nautile up` started and the runs of their forms, and nothing else."""
    from nautile.flows.operate import services

    def report(run: str) -> None:
        console_for().print(
            f"stopping run {run[:8]}; its finished work is kept, and "
            f"`{shell_command('nautile', 'retry', run[:8])}` continues it",
            soft_wrap=True,
        )

    for service in services.down(the_store(), report):
        console_for().print(f"stopped {service.name} (process {service.pid})")


def reconcile(as_json: Json = False) -> None:
    """Clean up after dead processes: runs still shown as running, leftover staging folders, lock files."""
    from nautile.flows.cli.tables import reconciled_view
    from nautile.flows.operate import prefect_server
    from nautile.flows.operate.services import join_server

    store, results = the_store(), []
    if store.root.exists():
        prefect_server.configure_prefect(store)
        with contextlib.ExitStack() as stack:
            # The server that runs may have lost slots. Only a lost run needs one that has to be started.
            join_server(store)
            if store.lost_runs():  # Prefect still shows these as running, so its server is needed
                stack.enter_context(console_for(stderr=True).status("connecting to Prefect"))
                stack.enter_context(prefect_server.prefect_api())
            # Imports Prefect, which reads its settings at import: `configure_prefect` and `prefect_api` set them.
            from nautile.flows.operate.reconcile import reconcile, unfinished

            results = [*reconcile(store), *unfinished(store)]
    show_as(
        [result.row() for result in results],
        as_json,
        lambda _: reconciled_view([result.line() for result in results]),
    )
