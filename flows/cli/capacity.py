"""`nautile plan`: the stage `plan` by itself, without a run around it."""

import uuid
from collections.abc import Callable
from pathlib import Path

from common.errors import ConfigError
from configs.operation import PlanConfig
from configs.schema import RunConfig
from store.artifacts import Store
from tasks.engine.attempt import run_stage
from tasks.engine.progress import StageUpdate, subscribe
from tasks.engine.stage import RunContext
from tasks.reporting.capacity import planning


def plan_pretraining(
    store: Store,
    config: RunConfig,
    topology: str,
    mfu: float,
    fsdp: int | None,
    largest: bool,
    show: Callable[[str], object],
) -> Path:
    """The folder of the plan's artifact: made now, or found if the same was asked before."""
    if not 0 < mfu <= 1:
        raise ConfigError(f"--mfu {mfu} must be above 0 and at most 1")
    pretrain = config.pretrain.model_copy(update={"fsdp": fsdp} if fsdp else {})
    asked = PlanConfig(topology=topology, row_length=config.ingest.row_length, mfu=mfu, largest=largest)
    rest = {name: getattr(config, name) for name in ("model", "align", "reason", "self_distill")}
    section = {"plan": asked, "pretrain": pretrain, **rest}
    context = RunContext(f"plan-{uuid.uuid4().hex[:8]}", str(store.root), config=config.name)

    def hear(update: StageUpdate) -> None:
        if update.note:
            show(update.note)

    unsubscribe = subscribe(hear)
    try:
        made = run_stage(planning, {name: part.model_dump(mode="json") for name, part in section.items()}, {}, context)
    finally:
        unsubscribe()
    return store.get(made["plan"]).path
