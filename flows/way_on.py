"""The command that goes on after a failure, as the one who started the run can give it."""

from contextvars import ContextVar

from prefect.runtime import deployment, flow_run

from configs.schema import RunConfig
from flows.selection import Selection

# The configuration as it was named on the command line; not known to a run that was asked for in Prefect.
typed: ContextVar[str] = ContextVar("typed", default="")


def way_on(config: RunConfig, selection: Selection, label: str) -> str:
    """A run of a deployment is tried again with the form's values; one that was typed is typed again."""
    if deployment.id:
        return f"prefect flow-run retry {flow_run.id}    # or Retry on the run's page"
    # Not above: Prefect keeps the flow to the end of the process, and with it all that its module refers to; DuckDB's
    # binding, were it among that, would tell the terminal of leaks.
    from flows.run import command

    return command(typed.get() or config.name, selection, label)
