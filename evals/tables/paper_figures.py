"""The paper's own figures, in percent: Table 1 (GSM8K after each stage) and Table 2 (five models)."""

from collections.abc import Collection

from nautile.configs.stages import TRAINED

MODELS: dict[str, str] = {
    "nautile_370m": "Nautile 370M",
    "qwen2.5_0.5b": "Qwen2.5 0.5B",
    "granite_350m": "Granite 350M",
    "lfm2.5_350m": "LFM2.5 350M",
    "smollm2_360m": "SmolLM2 360M",
}
TRAINING_TOKENS: dict[str, str] = dict(zip(MODELS, ("~0.8T", "18T", "10-12T", "28T", "4T"), strict=True))

TABLE_2: dict[str, dict[str, float]] = {
    name: dict(zip(MODELS, figures, strict=True))
    for name, figures in {
        "openbookqa": (49.3, 34.4, 31.6, 26.4, 24.2),
        "arc": (57.0, 50.1, 30.0, 32.8, 43.7),
        "commonsense_qa": (46.8, 46.5, 36.2, 44.3, 18.4),
        "gsm8k": (33.4, 28.3, 31.5, 33.0, 7.4),
        "piqa": (61.5, 61.3, 50.8, 49.5, 48.2),
        "ifeval": (36.9, 31.6, 55.4, 62.4, 41.0),
        "trivia_qa": (23.8, 27.8, 25.2, 22.9, 28.0),
        "math_500": (2.4, 18.8, 5.6, 12.2, 0.0),
        "mmlu_pro": (14.9, 14.3, 11.2, 18.6, 10.3),
        "mmlu": (39.2, 33.7, 35.0, 39.1, 35.8),
        "gpqa_diamond": (27.3, 10.1, 26.3, 24.8, 23.2),
    }.items()
}
"""Benchmark -> model -> its figure."""
TABLE_2_AVERAGE: dict[str, float] = dict(zip(MODELS, (35.7, 32.4, 30.8, 33.3, 25.5), strict=True))

TABLE_1: dict[str, float] = {"pretrain": 27.98, "align": 28.96, "reason": 31.36, "self_distill": 33.43}
TABLE_1_ROWS: dict[str, str] = {
    "pretrain": "After SFT (baseline)",
    "align": "+ Dr. GRPO (Stage 1)",
    "reason": "+ Gradient-balanced GRPO (Stage 2)",
    "self_distill": "+ Scored self-distillation (Stage 3)",
}


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
