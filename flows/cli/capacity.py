"""`nautile plan`: run the stage `plan` on its own, outside of a pipeline run."""

import uuid
from collections.abc import Callable
from pathlib import Path

from common.errors import ConfigError
from configs.base import fingerprint
from configs.operation import PlanConfig
from configs.schema import RunConfig
from flows.starts import resolve_starts
from store.artifacts import Store
from tasks.engine.attempt import run_stage
from tasks.engine.progress import StageUpdate, subscribe
from tasks.engine.stage import RunContext
from tasks.reporting.capacity import plan_capacity


def plan_pretraining(
    store: Store,
    config: RunConfig,
    topology: str,
    mfu: float,
    fsdp: int | None,
    largest: bool,
    show: Callable[[str], object],
) -> Path:
    """The folder of the plan's artifact, made now or reused from an equal earlier request. `show` gets progress."""
    if not 0 < mfu <= 1:
        raise ConfigError(f"--mfu {mfu} must be above 0 and at most 1")
    store.refresh()
    config = resolve_starts(config, store)
    pretrain = config.pretrain.model_copy(update={"fsdp": fsdp} if fsdp else {})
    plan = PlanConfig(topology=topology, row_length=config.ingest.row_length, mfu=mfu, largest=largest)
    rest = {name: getattr(config, name) for name in ("model", "align", "reason", "self_distill")}
    sections = {"plan": plan, "pretrain": pretrain, **rest}
    context = RunContext(f"plan-{uuid.uuid4().hex[:8]}", str(store.root), config=config.name)

    def on_update(update: StageUpdate) -> None:
        if update.note:
            show(update.note)

    unsubscribe = subscribe(on_update)
    try:
        settings = {name: section.model_dump(mode="json") for name, section in sections.items()}
        # A plan depends on operational fields, such as the mesh, which keys leave out.
        outputs = run_stage(plan_capacity, {**settings, "every_field": fingerprint(settings)}, {}, context)
    finally:
        unsubscribe()
    return store.get(outputs["plan"]).path
