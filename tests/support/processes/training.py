"""A training run of a few seconds: learnable token shards, and a model of one block."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nautile.common.events import Emit, silent
from nautile.configs.base import TrainOn, canonical
from nautile.configs.model import ModelConfig, TokenizerConfig
from nautile.configs.training import PretrainConfig
from nautile.data.tokenizer import tokenizer_for
from nautile.data.tokens.shards import ConcatPacker, FirstFitPacker, ShardIndex, write_index, write_shard
from nautile.model.training.loop import Pretraining, train
from nautile.model.training.step import Program

TOKENIZER = TokenizerConfig(ranks=256)
ROW = 32
STEPS = 24
MODEL = ModelConfig(
    vocabulary=TOKENIZER.vocabulary, width=16, blocks=1, pattern="SA", context=ROW, memory_heads=2, query_heads=2,
    spectral_samples=1, chunk=8, attention_heads=2, kv_heads=1, feed_forward=16, compute_dtype="float32", remat="none",
)  # fmt: skip


def write_tokens(folder: Path, seed: int, documents: int = 100, ranks: int = 256, row: int = ROW) -> Path:
    """A `tokens` artifact of documents that count up by threes: easy to learn, different for each seed."""
    config = TokenizerConfig(ranks=ranks)
    tokenizer, rng, entries = tokenizer_for(config), np.random.default_rng(seed), []
    for split, count in (("train", documents), ("validation", documents // 10)):
        packer = ConcatPacker(row)
        for _ in range(count):
            start, length = rng.integers(200), rng.integers(10, 60)
            packer.add(np.array([*(start + 3 * np.arange(length)) % 250, tokenizer.end_of_text], np.uint32))
        entries.append(write_shard(folder, 0, split, packer.finish(), tokenizer.vocabulary))
    write_index(folder, ShardIndex(config, tokenizer.fingerprint, row, "web", tuple(entries)))
    return folder


def write_chat_tokens(folder: Path, seed: int, documents: int = 60, row: int = ROW) -> Path:
    """A `tokens` artifact of chat records: a prompt of random ids, and a reply that counts up from its last one."""
    tokenizer, rng, entries = tokenizer_for(TOKENIZER), np.random.default_rng(seed), []
    for split, count in (("train", documents), ("validation", documents // 10)):
        packer = FirstFitPacker(row)
        for _ in range(count):
            prompt = rng.integers(250, size=rng.integers(3, 12))
            reply = (prompt[-1] + 3 * np.arange(1, rng.integers(2, 9))) % 250
            packer.add(np.array([*prompt, *reply, tokenizer.im_end], np.uint32), len(prompt))
        entries.append(write_shard(folder, 0, split, packer.finish(), tokenizer.vocabulary))
    write_index(folder, ShardIndex(TOKENIZER, tokenizer.fingerprint, row, "synth", tuple(entries)))
    return folder


def settings(**changes: Any) -> PretrainConfig:
    """Two phases of 12 steps: `web`, then `web` and `synth`. Saved every 4 steps, so also where the phase changes."""
    phase = STEPS // 2 * 4 * ROW
    defaults = {
        "phases": [
            {"name": "one", "tokens": phase, "mixture": {"web": 1.0}},
            {"name": "two", "tokens": phase, "mixture": {"web": 1.0, "synth": 1.0}},
        ],
        "batch_rows": 4, "save_every": 4, "keep": 2, "log_every": 3, "validate_every": 8, "validation_rows": 6,
        "optimizer": {"learning_rate": 0.01, "warmup_steps": 2},
    }  # fmt: skip
    return PretrainConfig.model_validate({**defaults, **changes})


def sources(root: Path) -> dict[str, Path]:
    """The two sources of `settings`, written once under `root`."""
    folders = {"web": root / "web", "synth": root / "synth"}
    for seed, folder in enumerate(folders.values()):
        if not (folder / "index.json").exists():
            write_tokens(folder, seed)
    return folders


def run(
    root: Path,
    config: PretrainConfig | None = None,
    emit: Emit = silent,
    name: str = "run",
    seed: int = 0,
    train_on: Mapping[str, TrainOn] | None = None,
) -> dict[str, Any]:
    """Train under `root`, with shared shards, and work and output in the folder `name`."""
    pretraining = Pretraining(
        config or settings(), MODEL, TOKENIZER, sources(root), seed, seed, train_on=train_on or {}
    )
    return train(pretraining, root / name / "work", root / name / "out", emit)


def shared_programs() -> Callable[..., Program]:
    """In place of `Program`: a module's runs with equal settings trace it once, which takes longer than a run."""
    programs: dict[tuple[Any, ...], Program] = {}

    def shared(config: PretrainConfig, model: ModelConfig, *rest: Any) -> Program:
        settings = config.model_dump(mode="json", exclude={"skip_limit", "spike_factor", "spike_steps", "rollbacks"})
        key = canonical(settings), canonical(model), *rest
        return programs.get(key) or programs.setdefault(key, Program(config, model, *rest))

    return shared
