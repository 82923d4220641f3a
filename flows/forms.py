"""Parameters of the Prefect flows: configuration name, overrides, selected steps, and the name of the run.

Prefect's server validates a request against these types before it creates a run, and its error names the field. What
depends on the configuration is checked when the run starts: the run then fails with one message and no stack trace.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.exceptions import FailedRun
from prefect.runtime import deployment, flow_run
from prefect.states import Failed
from pydantic import Field

from nautile.common.errors import ConfigError
from nautile.common.processes import die_with_parent
from nautile.configs.forms import WORKERS_SECTIONS
from nautile.configs.load import load_form
from nautile.configs.schema import RunConfig
from nautile.configs.stages import STAGES
from nautile.store.catalog import hide_leak_report

SERVED_BY = "NAUTILE_SERVED_BY"  # the process that serves the deployments, set for the flow runs that it starts
_SECTIONS = "|".join(name for name in RunConfig.model_fields if name not in WORKERS_SECTIONS)

ConfigName = Annotated[str, Field(min_length=1)]
Overrides = Sequence[Annotated[str, Field(pattern=rf"^({_SECTIONS})(\.[^=\s]+)?\s*=")]]
# Both default to an empty string: Prefect shows a nullable field with an additional switch between text and null.
StageName = Annotated[str, Field(pattern=rf"^(({'|'.join(STAGES)})(:\S+)?)?$")]
RunName = Annotated[str, Field(max_length=100, pattern=r"^(\S(.*\S)?)?$")]


def begin_process() -> None:
    """Settle the process that Prefect has started for a deployment's run; in any other process nothing changes.

    It ends if the process of `nautile deploy` that started it is killed: nobody could cancel the run any more, because
    another such process does not know this one.
    """
    if deployment.id:
        hide_leak_report()
    if os.environ.get(SERVED_BY) == str(os.getppid()):
        die_with_parent(os.getppid())


def run_name() -> str:
    """The name of the flow run that begins: its parameter `name`, else the name that Prefect has given it.

    A scheduled run is named after its flow and configuration.
    """
    parameters = flow_run.parameters
    context = FlowRunContext.get()
    if name := parameters.get("name"):
        return str(name)
    # Prefect invents names such as "adjective-animal"; a run that nobody started by hand deserves to say what it is.
    if context is not None and context.flow_run is not None and context.flow_run.auto_scheduled:
        return f"{parameters.get('only') or flow_run.flow_name} of {_configuration(str(parameters.get('config')))}"
    return str(flow_run.name)


def _configuration(argument: str) -> str:
    """The name of a configuration, as its deployments have it; of one that cannot be loaded that of its file."""
    try:
        return load_form(argument)[0].name
    except ConfigError:
        return Path(argument).name.removesuffix(".toml")


def failed_state(message: str) -> State[Any]:
    """The state of a run that a flow returns instead of raising: only the message, without stack traces.

    In the process of a deployment's run Prefect raises `FailedRun` for this state; the filter keeps its stack trace out
    of the log.
    """

    def is_not_failed_run(record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], FailedRun))

    logging.getLogger("prefect.flow_runs").addFilter(is_not_failed_run)
    return Failed(message=message)
