"""The commands of `nautile` that keep it running: services and the dashboard."""

import os
from typing import Annotated

import typer

from flows.terminal import ConfigArgument, console_for, the_store

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
    limit: Annotated[int, typer.Option(min=1, help="flow runs at once")] = 1,
) -> None:
    """Serve the pipeline and every stage as Prefect deployments, until stopped. PREFECT_API_URL names the server."""
    from configs.load import load
    from flows import prefect_env

    shape = load(config)
    prefect_env.quiet(the_store())
    prefect_env.require_api()
    from flows.deployments import serve

    console_for(stderr=True).print(f"serving {shape.name}; runs are asked for in Prefect's page (end it with Ctrl-C)")
    serve(shape, limit)


@operating.command()
def up(
    config: ConfigArgument = "local",
    port: Annotated[int, typer.Option(min=1, max=65535, help="of Prefect's server and page")] = 4200,
    dashboard_port: Annotated[int, typer.Option(min=1, max=65535)] = 8501,
) -> None:
    """Start Prefect's server, the deployments and the dashboard on this machine, and say where they are."""
    from configs.load import load
    from flows import services
    from flows.reconcile import quietly
    from flows.text import service_table

    load(config)
    store, console = the_store(), console_for()
    with console.status("starting") as shown:
        running = services.up(store, config, port, dashboard_port, shown.update)
        os.environ.setdefault("PREFECT_API_URL", services.url_of(store, "server") or "")
        for settled in quietly(store):
            console.print(settled.line(), soft_wrap=True)
    console.print(service_table(running))


@operating.command()
def down() -> None:
    """End what `nautile up` has started, and nothing else."""
    from flows import services

    for service in services.down(the_store()):
        console_for().print(f"ended {service.name} (process {service.pid})")
