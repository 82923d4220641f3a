"""Where the deployments of a configuration run: `[deploy.NAME]`, for the pipeline, a stage or the evaluation."""

from typing import Any, Literal

from pydantic import Field

from configs.base import Section

Deployed = Literal[
    "pipeline", "held_out", "ingest", "index", "distill", "pretrain", "align", "reason", "self_distill", "evaluate",
    "report", "evaluation", "regression",
]  # fmt: skip


class DeployConfig(Section):
    """The work pool of one deployment, and what its stage uses there.

    The `pipeline` runs all of its stages where its own pool says; a stage's pool is that of the stage's own deployment.
    """

    pool: str = Field(default="nautile", pattern=r"^[^/%&><\n]+$")  # the name of a Prefect work pool, of any type
    resource: Literal["accelerator", "cpu", "network"] | None = None  # whose limit its steps take; None: as in the DAG
    job_variables: dict[str, Any] = {}  # of the pool's job template; its `env` is added to ours. Never a secret
