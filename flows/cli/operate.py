"""The commands of `nautile` that keep it running: services and the dashboard."""

import os
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.terminal import ConfigArgument, Json, console_for, show_as, the_store

operating = typer.Typer()


@operating.command()
def dashboard(
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8501,
    host: Annotated[str, typer.Option(help="whom to listen to; this machine alone unless told")] = "127.0.0.1",
) -> None:
    """Pages over the store for people who look: runs, curves, rollouts, evaluations, lineage. Read-only."""
    from flows.dashboard.command import serve

    console_for(stderr=True).print(f"the dashboard is at http://{host}:{port} (end it with Ctrl-C)")
    serve(host, port)


@operating.command()
def deploy(
    config: ConfigArgument = "local",
    limit: Annotated[int, typer.Option(min=1, help="stages at work at once, of all runs on the server")] = 1,
    runs: Annotated[int, typer.Option(min=1, help="flow runs at once, those included that wait")] = 8,
    pool: Annotated[
        str | None, typer.Option(metavar="TYPE", help="for a work pool: process, kubernetes or cloud")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="with --pool: write prefect.yaml and register nothing")
    ] = None,
) -> None:
    """Serve the pipeline, every stage and the scheduled evaluation as Prefect deployments, until stopped.

    PREFECT_API_URL names the server. With --pool nothing is served: they are registered for workers of your own.
    """
    from configs.load import load
    from flows.operate import prefect_server as prefect_env

    shape = load(config)
    if out is not None:
        from flows.operate.work_pool import write

        console_for(stderr=True).print(write(shape, pool or "process", out), soft_wrap=True)
        return
    prefect_env.quiet(the_store())
    prefect_env.require_api()
    if pool is not None:
        from flows.operate.work_pool import register

        console_for(stderr=True).print(register(shape, pool, limit), soft_wrap=True)
        return
    from flows.operate.deployments import serve

    console_for(stderr=True).print(f"serving {shape.name}; runs are asked for in Prefect's page (end it with Ctrl-C)")
    serve(shape, limit, runs)


@operating.command()
def approve(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="its id, or the first digits of it")] = None,
    as_json: Json = False,
) -> None:
    """Let a run go on that waits for an answer; without RUN, list those that wait and what they ask."""
    from flows.cli.tables import waiting_table
    from flows.operate import approval

    if run is None:
        show_as(approval.waiting(the_store()), as_json, waiting_table)
        return
    found = approval.approve(the_store(), run, os.environ.get("PREFECT_API_URL"))
    show_as(
        found, as_json, lambda one: f"run {one['run'][:8]} goes on" + (f" with {one['label']}" if one["label"] else "")
    )


@operating.command()
def up(
    config: ConfigArgument = "local",
    port: Annotated[int, typer.Option(min=1, max=65535, help="of Prefect's server and page")] = 4200,
    dashboard_port: Annotated[int, typer.Option(min=1, max=65535)] = 8501,
) -> None:
    """Start Prefect's server, the deployments and the dashboard on this machine, and say where they are."""
    from configs.load import load
    from flows.cli.tables import service_table
    from flows.operate import services

    load(config)
    store, console = the_store(), console_for()
    with console.status("starting") as shown:
        running = services.up(store, config, port, dashboard_port, shown.update)
        os.environ.setdefault("PREFECT_API_URL", services.url_of(store, "server") or "")
        # Imports Prefect, which reads its settings once: after its address is set.
        from flows.operate.reconcile import reconcile_if_possible

        for result in reconcile_if_possible(store):
            console.print(result.line(), soft_wrap=True)
    console.print(service_table(running))


@operating.command()
def down() -> None:
    """End what `nautile up` has started, and nothing else."""
    from flows.operate import services

    for service in services.down(the_store()):
        console_for().print(f"ended {service.name} (process {service.pid})")
