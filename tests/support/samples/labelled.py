"""A checkpoint of a tiny model, and labelled rows that it can learn, for the tests of the uses of a model."""

import json
from pathlib import Path

from nautile.configs.model import ModelConfig, TokenizerConfig
from nautile.model.nautile import initialise
from nautile.model.weights.files import save_weights

TOKENIZER = TokenizerConfig(ranks=512)
MODEL = ModelConfig(
    vocabulary=TOKENIZER.vocabulary, width=16, blocks=1, pattern="SA", context=96, memory_heads=2, query_heads=2,
    spectral_samples=1, chunk=8, attention_heads=2, kv_heads=1, feed_forward=16, compute_dtype="float32", remat="none",
)  # fmt: skip
WORDS = {"animal": ("cat", "dog", "cow"), "plant": ("oak", "ash", "fir")}


def write_checkpoint(folder: Path) -> Path:
    """An untrained checkpoint."""
    save_weights(folder, initialise(MODEL, 0), MODEL, TOKENIZER)
    return folder


def labelled_records(count: int) -> list[dict[str, str]]:
    """Texts that name an animal or a plant."""
    records = []
    for i in range(count):
        label = ("animal", "plant")[i % 2]
        records.append({"text": f"{i // 6} {WORDS[label][i // 2 % 3]}", "label": label})
    return records


def write_records(path: Path, records: list[dict]) -> Path:
    """The records as JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path
