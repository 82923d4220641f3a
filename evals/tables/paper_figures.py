"""The paper's own figures, in percent: Table 1 (GSM8K after each stage) and Table 2 (five models)."""

from collections.abc import Collection
from functools import cache

from nautile.configs.stages import TRAINED

MODELS: dict[str, str] = {
    "nautile_370m": "Nautile 370M",
    "qwen2.5_0.5b": "Qwen2.5 0.5B",
    "granite_350m": "Granite 350M",
    "lfm2.5_350m": "LFM2.5 350M",
    "smollm2_360m": "SmolLM2 360M",
}
TRAINING_TOKENS: dict[str, str] = dict(zip(MODELS, ("~0.8T", "18T", "10-12T", "28T", "4T"), strict=True))

TABLE_2_AVERAGE: dict[str, float] = dict(zip(MODELS, (35.7, 32.4, 30.8, 33.3, 25.5), strict=True))

TABLE_1: dict[str, float] = {"pretrain": 27.98, "align": 28.96, "reason": 31.36, "self_distill": 33.43}
TABLE_1_ROWS: dict[str, str] = {
    "pretrain": "After SFT (baseline)",
    "align": "+ Dr. GRPO (Stage 1)",
    "reason": "+ Gradient-balanced GRPO (Stage 2)",
    "self_distill": "+ Scored self-distillation (Stage 3)",
}


@cache
def table_2() -> dict[str, dict[str, float]]:
    """Benchmark -> model -> its figure. Imports the catalogue, with all graders."""
    from nautile.evals.benchmarks.catalogue import PAPER

    return {entry.name: dict(zip(MODELS, entry.paper, strict=True)) for entry in PAPER if entry.paper}


def ladder_rows(evaluated: Collection[str]) -> dict[str, tuple[str, float | None]]:
    """The stages of a run in order, each with its title and the paper's figure.

    All of the paper's, and those of `evaluated` that it does not have, without a figure: the gain of the next stage is
    over them.
    """
    return {
        stage: (TABLE_1_ROWS.get(stage, f"+ {stage} (not of the paper)"), TABLE_1.get(stage))
        for stage in TRAINED
        if stage in TABLE_1 or stage in evaluated
    }
