"""`nautile plan`: the estimate of pretraining as text, and the comparison of settings of the model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nautile.common.text import amount, dollars, markdown_table
from nautile.configs.schema import RunConfig
from nautile.model.capacity.flops import TrainingEstimate
from nautile.model.capacity.topology import GIB, enable_compilers, parse_topology
from nautile.store.artifacts import Store


def estimate_markdown(estimate: TrainingEstimate, compiled: bool) -> str:
    """The estimate as Markdown; with the compiler's figures above it (`compiled`) only the cost of the chips."""
    cost = f"Cost of the chips: {_chip_cost(estimate)}"
    if compiled:
        return cost
    kinds = [estimate.state, estimate.gradients, estimate.activations, estimate.memory, estimate.memory_limit]
    cells = [estimate.rows_per_chip, *(f"{count / GIB:.1f} GiB" for count in kinds), "yes" if estimate.fits else "no"]
    time = "not known, because no peak of this chip in bfloat16 is published"
    if estimate.days is not None:
        time = f"{estimate.days:.1f} days at an assumed utilisation of {estimate.mfu_assumed:.0%}"
    return "\n\n".join(
        [
            f"# {amount(estimate.parameters)} parameters on {estimate.topology}, estimated by arithmetic",
            "Nothing was compiled or measured. Memory is that of the parameters, the optimizer's moments, the "
            "gradients and the activations by formula; for the published model the compilers reported up to 20 % "
            "more or less.",
            markdown_table(_ESTIMATE_COLUMNS, [cells]),
            f"Time: {time}; {_work(estimate)}.\n{cost}",
        ]
    )


_ESTIMATE_COLUMNS = (
    "rows at once a chip", "parameters and moments", "gradients", "activations", "in all", "a chip has", "fits"
)  # fmt: skip


def _work(estimate: TrainingEstimate) -> str:
    return f"{amount(estimate.tokens)} tokens of {amount(estimate.flops_per_token)}FLOP each on {estimate.chips} chips"


def _chip_cost(estimate: TrainingEstimate) -> str:
    """The cost of the chips in one sentence, or why it is not known."""
    if estimate.chip_hours is None:
        return "not known, as the time is not."
    hours = f"{estimate.chip_hours:,.0f} chip-hours"
    if estimate.dollars is None or estimate.dollars_per_chip_hour is None:
        return f"{hours}, of a chip without a list price: give yours with --price."
    total, rate = dollars(estimate.dollars), f"${estimate.dollars_per_chip_hour:.2f}"
    return f"{total} for {hours} at {rate} each, estimated with the time; your price: --price."


def compare_settings(
    store: Store,
    config: RunConfig,
    topologies: str,
    fsdp: int | None,
    settings: Sequence[str],
    show: Callable[[str], object],
) -> list[dict[str, Any]]:
    """Compile one block alone in several settings, for each of `topologies` (comma-separated); returns JSON data.

    `settings`: mixing/chunk/remat; if empty, `model.capacity.compiled.compare` chooses them. Results are cached in the
    store, so an interrupted comparison resumes. Raises `ConfigError` for an unknown topology or setting.
    """
    enable_compilers()  # before JAX is imported
    from nautile.model.capacity.compiled import compare, parse_setting

    parsed_settings = [parse_setting(text) for text in settings]
    targets = [parse_topology(name) for name in topologies.split(",")]
    # Beside the compilation cache: a comparison compiles dozens of programs, and each is a file here as soon as it is
    # done.
    folder, length = store.compiled / "blocks", config.ingest.row_length
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
        f"{max(program['temporaries'] for program in programs) / GIB:.2f} GiB",
        f"{row['kept_by_all_blocks'] / GIB:.2f} GiB",
        amount(row["tokens_per_second_bound"]),
        "no figure" if rate is None else amount(rate),
        "unknown" if share is None else f"{share:.0%}",
    ]
