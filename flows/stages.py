"""One flow for each stage, for reruns: the same keys and the same reuse as in the whole chain, and nothing else run.

`flow_of("reason")` is the Prefect flow that a deployment serves; it takes the configuration and whether to force. The
process that serves it finds it by name, as `flows.stages.reason`.
"""

from functools import cache
from typing import Any

from prefect import Flow, flow

from common.errors import ConfigError
from configs.load import STAGES
from configs.schema import RunConfig
from flows.pipeline import Outputs, pipeline
from flows.selection import Selection


@cache
def flow_of(stage: str) -> Flow[Any, Outputs]:
    """The flow that runs one stage of a configuration, everywhere the chain uses it. Its inputs must be made."""
    if stage not in STAGES:
        raise ConfigError(f"no stage {stage!r}; there are {', '.join(STAGES)}")

    def rerun(config: RunConfig, force: bool = False, store_root: str | None = None) -> Outputs:
        return pipeline.fn(config, Selection(only=stage, force=force), store_root)

    rerun.__name__ = rerun.__qualname__ = stage
    rerun.__doc__ = f"Run the stage `{stage}` of a configuration; `force` makes it anew and keeps what it replaces."
    return flow(name=stage, flow_run_name=f"{stage} of {{config.name}}", log_prints=False)(rerun)


def all_flows() -> list[Flow[Any, Outputs]]:
    """A flow for every stage, in the chain's order."""
    return [flow_of(stage) for stage in STAGES]


def __getattr__(name: str) -> Flow[Any, Outputs]:
    if name in STAGES:
        return flow_of(name)
    raise AttributeError(f"module 'flows.stages' has no attribute {name!r}")
