"""`nautile plan`: run the stage `plan` outside of a pipeline run, or compare settings of the model (`--compare`)."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.text import amount, markdown_table
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
    """Make the artifact of a plan, or reuse that of an equal earlier request; returns its folder. `show`: progress."""
    if not 0 < mfu <= 1:
        raise ConfigError(f"--mfu {mfu} must be above 0 and at most 1")
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

    unsubscribe = subscribe(on_update)
    try:
        settings = {name: section.model_dump(mode="json") for name, section in sections.items()}
        # A plan also depends on operational fields such as the mesh, which keys leave out: add a hash of all fields.
        outputs = run_stage(plan_capacity, {**settings, "every_field": fingerprint(settings)}, {}, context)
    finally:
        unsubscribe()
    return store.get(outputs["plan"]).path


def compare_settings(
    store: Store,
    config: RunConfig,
    topologies: str,
    fsdp: int | None,
    settings: Sequence[str],
    show: Callable[[str], object],
) -> list[dict[str, Any]]:
    """Compile one block alone in several settings, for each of `topologies` (comma-separated); returns JSON data.

    `settings`: mixing/chunk/remat; if empty, `model.capacity.speed.compare` chooses them. Results are cached in the
    store, so an interrupted comparison resumes. Raises `ConfigError` for an unknown topology or setting.
    """
    from model.capacity import topology

    topology.enable_compilers()  # before JAX is imported
    from model.capacity.speed import compare, parse_setting

    parsed_settings = [parse_setting(text) for text in settings]
    targets = [topology.parse_topology(name) for name in topologies.split(",")]
    # Beside the compilation cache: a comparison compiles dozens of programs, and each is a file here as soon as it is
    # done.
    folder, length = store.root / "compiled" / "blocks", config.ingest.row_length
    pretrain = config.pretrain.model_copy(update={"fsdp": fsdp} if fsdp else {})
    return [compare(pretrain, config.model, length, target, parsed_settings, folder, show) for target in targets]


def comparison_markdown(comparison: Mapping[str, Any]) -> str:
    """The comparison of one topology from `compare_settings` as Markdown, best setting first."""
    with_estimate = any(row.get("tokens_per_second_estimate") for row in comparison["settings"])
    rows = [_setting_cells(row, comparison["configured"]) for row in comparison["settings"]]
    by = "the compiler's estimate" if with_estimate else "the bound: this compiler estimates no time"
    peak = comparison["peak"]
    return "\n\n".join(
        [
            f"# One block on {comparison['topology']}: {comparison['rows_per_chip']} rows of "
            f"{comparison['row_length']} tokens a chip",
            f"Compiled alone, forward and backward; nothing is measured. Ordered by tokens/s, from {by}. A chip: "
            + (f"{peak / 1e12:.0f} TFLOP/s, " if peak else "peak unknown, ")
            + f"{comparison['bandwidth'] / 1e9:,.0f} GB/s. Bound: FLOPs at that peak or bytes at that bandwidth, "
            "whichever takes longer. XLA does not count Pallas kernels: their FLOPs, bytes and minimum time are added "
            "by formula. Communication between chips is not included.",
            markdown_table(_SETTING_COLUMNS, rows),
        ]
    )


_SETTING_COLUMNS = (
    "mixing/chunk/remat", "GFLOP", "GB", "bound", "compiler's estimate", "of it kernels, by formula", "temporaries",
    "kept by all blocks", "tokens/s, bound", "tokens/s, compiler's estimate", "share of the peak",
)  # fmt: skip


def _setting_cells(row: Mapping[str, Any], configured: str) -> list[str]:
    """The cells of one setting: the block's forward and backward together, then the whole model on all chips."""
    name = row["setting"] + (" (configured)" if row["setting"] == configured else "")
    if "refused" in row:
        return [name, f"does not fit: {row['refused']}", *[""] * (len(_SETTING_COLUMNS) - 2)]
    programs = [row["programs"][part] for part in ("forward", "backward")]

    def total(field: str) -> float | None:
        values = [program[field] for program in programs]
        # A sum with an unknown term is unknown: a partial sum would look like a fast program.
        return None if None in values else sum(values)

    def milliseconds(field: str) -> str:
        seconds = total(field)
        return "no figure" if seconds is None else f"{1000 * seconds:.1f} ms"

    # The share of the peak comes from the compiler's estimate where there is one, else from the bound, like the order
    # of the rows.
    rate, share = row["tokens_per_second_estimate"], row["mfu_estimate"] or row["mfu_bound"]
    return [
        name + (", a loop of unknown length counted once" if total("unknown_loops") else ""),
        f"{(total('flops') or 0) / 1e9:,.0f}",
        f"{(total('bytes') or 0) / 1e9:.1f}",
        milliseconds("bound"),
        milliseconds("estimate"),
        milliseconds("kernels") if total("kernels_counted") else "",
        f"{max(program['temporaries'] for program in programs) / 2**30:.2f} GiB",
        f"{row['kept_by_all_blocks'] / 2**30:.2f} GiB",
        amount(row["tokens_per_second_bound"]),
        "no figure" if rate is None else amount(rate),
        "unknown" if share is None else f"{share:.0%}",
    ]
