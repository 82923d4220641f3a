"""The plan of a configuration as data: memory, time and cost by the compiler, by arithmetic, and of paid calls.

`nautile plan` prints it, `nautile.plan` returns it. `flows.device_plan` plans by formulas alone.
"""

import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nautile.common.errors import ConfigError, Retryable
from nautile.configs.base import fingerprint
from nautile.configs.operation import PlanConfig
from nautile.configs.schema import RunConfig
from nautile.flows.dag import pipeline_steps, resolve_starts
from nautile.flows.device_plan import assumed_mfu
from nautile.flows.forecast import CallForecast, PackedAnew, SourceReading, forecast_calls, forecast_reading, pack_anew
from nautile.flows.readiness import (
    Answers,
    ask_online,
    missing_settings,
    missing_webhook,
    price_differences,
    refuse_missing_rows,
)
from nautile.model.capacity.flops import TrainingEstimate, estimate_training
from nautile.model.capacity.topology import check_compiler, parse_topology
from nautile.store.artifacts import Store
from nautile.tasks.engine.attempt import run_stage
from nautile.tasks.engine.progress import StageUpdate, subscribe
from nautile.tasks.engine.stage import RunContext
from nautile.tasks.reporting.capacity import plan_capacity


@dataclass(frozen=True)
class Plan:
    """The plan of a run. Lists of it are tables: `pandas.DataFrame(plan.calls)`."""

    topology: str
    folder: Path | None  # of the artifact with the compiler's plan; None: `error` says why there is none
    compiled: dict[str, Any] | None  # its plan.json
    error: ConfigError | Retryable | None
    estimate: TrainingEstimate | None  # by arithmetic; None for this machine's own devices, or with some errors
    calls: list[CallForecast]
    sources: dict[str, SourceReading]
    rows: list[PackedAnew]  # for other lengths of a row, if asked for
    missing: list[str]  # settings that would stop the run later
    prices: list[str]  # that differ from the vendor's list
    online: Answers | None  # None: nobody was asked

    def as_json(self) -> dict[str, Any]:
        """What `nautile plan --json` prints."""
        plan = {"refused": str(self.error)} if self.compiled is None else self.compiled
        return {
            **plan,
            "calls": [asdict(row) for row in self.calls],
            "missing": self.missing,
            "prices": self.prices,
            "sources": {name: asdict(row) for name, row in self.sources.items()},
            "rows": [asdict(row) for row in self.rows],
            "estimate": self.estimate and asdict(self.estimate),
            "online": self.online and asdict(self.online),
        }


def plan_run(
    config: RunConfig,
    store: Store,
    topology: str | None = None,
    *,
    price: float | None = None,
    mfu: float | None = None,
    fsdp: int | None = None,
    largest: bool = True,
    row_lengths: Sequence[int] = (),
    online: bool = False,
    show: Callable[[str], object] = lambda _: None,
) -> Plan:
    """Plan `config` for chips that need not be here. `topology`: None for that of the configuration.

    `price`: dollars a chip and hour. `mfu`: the utilisation to assume. `largest`: search for the largest batch that
    fits. `online`: ask the Hub and the endpoints, without paying. `show`: called with a line of progress.
    """
    if price is not None:
        launch = config.launch.model_copy(update={"dollars_per_chip_hour": price})
        config = config.model_copy(update={"launch": launch})
    topology = topology or config.launch.topology
    steps = pipeline_steps(config)
    # Everything that would stop the real run later is collected here, also where the compiler cannot plan for the
    # chips.
    missing = [*refuse_missing_rows(steps), *missing_settings(steps), *missing_webhook(config.operation)]
    answers = ask_online(steps, show) if online else None
    folder = compiled = error = estimate = None
    try:
        mfu = assumed_mfu(config, topology) if mfu is None else mfu
        estimate = estimate_pretraining(config, topology, mfu, fsdp)
        folder = plan_pretraining(store, config, topology, mfu, fsdp, largest, show)
        compiled = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    except (ConfigError, Retryable) as refusal:
        # Who plans for chips that the compiler does not know still wants the forecast of the calls.
        error = refusal
    return Plan(
        topology, folder, compiled, error, estimate, forecast_calls(steps, store), forecast_reading(config, store),
        pack_anew(config, store, row_lengths), missing, price_differences(steps), answers,
    )  # fmt: skip


def estimate_pretraining(config: RunConfig, topology: str, mfu: float, fsdp: int | None) -> TrainingEstimate | None:
    """Memory, time and cost of pretraining on named chips, without a compiler; None for this machine's own devices.

    Raises `ConfigError` for an unknown topology, or a batch or mesh that does not divide among its chips.
    """
    if not 0 < mfu <= 1:
        raise ConfigError(f"--mfu {mfu} must be above 0 and at most 1")
    if topology == "local":
        return None
    target, price = parse_topology(topology), config.launch.dollars_per_chip_hour
    pretrain = config.pretrain.model_copy(update={"fsdp": fsdp} if fsdp else {})
    return estimate_training(pretrain, config.model, config.ingest.row_length, target, mfu, price)


def plan_pretraining(
    store: Store,
    config: RunConfig,
    topology: str,
    mfu: float,
    fsdp: int | None,
    largest: bool,
    show: Callable[[str], object],
) -> Path:
    """Make the artifact of a plan, or reuse that of an equal earlier request; returns its folder. `show`: progress."""
    store.refresh()
    # A stage that starts from a checkpoint of the store is planned with that checkpoint's full id, as a run would do
    # it.
    config = resolve_starts(config, store)
    pretrain = config.pretrain.model_copy(update={"fsdp": fsdp} if fsdp else {})
    plan = PlanConfig(topology=topology, row_length=config.ingest.row_length, mfu=mfu, largest=largest)
    # The RL stages are planned along with pretraining, so their sections are part of the key: a changed batch of
    # rollouts is another plan.
    others = {name: getattr(config, name) for name in config.trained if name != "pretrain"}
    sections = {"plan": plan, "pretrain": pretrain, "model": config.model, **others}
    # `plan-` marks an attempt that belongs to no pipeline run; `nautile logs` lists these last.
    context = RunContext(f"plan-{uuid.uuid4().hex[:8]}", str(store.root), config=config.name)

    def on_update(update: StageUpdate) -> None:
        if update.note:
            show(update.note)

    settings = {name: section.model_dump(mode="json") for name, section in sections.items()}
    # A plan also depends on operational fields such as the mesh, which keys leave out: add a hash of all fields.
    settings["every_field"] = fingerprint(settings)
    # The process of the stage would take ten seconds to say that there is no compiler.
    target = None if topology == "local" else parse_topology(topology)
    if target is not None and target.chip is not None and store.find("plan", plan_capacity.key(settings, {})) is None:
        check_compiler(topology, target.chip)
    unsubscribe = subscribe(on_update)
    try:
        outputs = run_stage(plan_capacity, settings, {}, context)
    finally:
        unsubscribe()
    return store.get(outputs["plan"]).path
