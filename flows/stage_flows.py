"""A flow for each stage, for deployments.

Apart from the pipeline's, which `nautile run` needs alone: Prefect computes the form of each flow when it is defined,
which takes 0.2 s for a whole configuration.
"""

from typing import Any

from prefect import Flow, flow

from configs.load import NamedConfig
from flows.pipeline import Outputs, pipeline
from flows.selection import Selection


def stage_flow(stage: str) -> Flow[Any, Outputs]:
    """A flow that runs one stage wherever the pipeline uses it, with the same keys and the same reuse.

    What the stage reads must be in the store already.
    """

    def rerun(config: NamedConfig, force: bool = False, store_root: str | None = None) -> Outputs:
        return pipeline.fn(config, Selection(only=stage, force=force), store_root)

    rerun.__name__ = rerun.__qualname__ = stage
    rerun.__doc__ = f"Run the stage `{stage}` of a configuration; `force` runs it again and keeps what it replaces."
    return flow(name=stage, flow_run_name=f"{stage} of {{config.name}}", log_prints=False)(rerun)


# Deployments name these by their path, as `flows.stage_flows.reason`.
held_out = stage_flow("held_out")
ingest = stage_flow("ingest")
index = stage_flow("index")
distill = stage_flow("distill")
pretrain = stage_flow("pretrain")
align = stage_flow("align")
reason = stage_flow("reason")
self_distill = stage_flow("self_distill")
evaluate = stage_flow("evaluate")
report = stage_flow("report")
STAGE_FLOWS = (held_out, ingest, index, distill, pretrain, align, reason, self_distill, evaluate, report)
