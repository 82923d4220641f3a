"""The short form of a run in Prefect: a configuration by its name, overrides, which steps, and what the run is called.

Prefect's server checks what is sent against the types here before it makes a run, and names the field. What only the
configuration can decide is checked when the run starts: it then fails with one message, and without a stack trace.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.exceptions import FailedRun
from prefect.runtime import flow_run
from prefect.states import Failed
from pydantic import Field

from configs.forms import WORKERS_OWN
from configs.operation import OPERATED
from configs.schema import RunConfig

_SECTIONS = "|".join(name for name in RunConfig.model_fields if name not in WORKERS_OWN)

ConfigName = Annotated[str, Field(min_length=1)]
Overrides = Sequence[Annotated[str, Field(pattern=rf"^({_SECTIONS})(\.[^=\s]+)?\s*=")]]
# Both are empty by default, for a field that may be null is shown with a switch between text and none.
StageName = Annotated[str, Field(pattern=rf"^(({'|'.join(OPERATED)})(:\S+)?)?$")]
RunName = Annotated[str, Field(max_length=100, pattern=r"^(\S(.*\S)?)?$")]


def run_name() -> str:
    """What the run that begins is called: its parameter `name`, else the name it has.

    A scheduled run, which nobody has named, is called after its flow and configuration.
    """
    parameters = flow_run.parameters
    context = FlowRunContext.get()
    if name := parameters.get("name"):
        return str(name)
    if context is not None and context.flow_run is not None and context.flow_run.auto_scheduled:
        return f"{flow_run.flow_name} of {Path(str(parameters.get('config'))).name.removesuffix('.toml')}"
    return str(flow_run.name)


def refused(error: Exception) -> State[Any]:
    """The end of a run whose form cannot be followed: its message, where an exception would be logged with a trace.

    The process of a deployment's run raises `FailedRun` for this end, and Prefect would log that with its trace.
    """
    logging.getLogger("prefect.flow_runs").addFilter(_is_no_failed_run)
    return Failed(message=f"The form cannot be followed: {error}")


def _is_no_failed_run(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], FailedRun))
