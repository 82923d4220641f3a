"""Dimensions of model and tokenizer. Letters: D width, K memory heads, H head dimension, M spectral samples."""

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, PrivateAttr, ValidationInfo, field_validator, model_validator

from nautile.common.errors import ConfigError
from nautile.common.files import read_json
from nautile.configs.base import Operational, Section

CL100K_RANKS = 100_256
MOST_RANKS = 2**20
Digits = Literal[1, 2, 3]
CHAT_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|think_start|>", "<|think_end|>")
# The end of text has the id of cl100k_base; the chat markers follow its last special token, <|endofprompt|>, 100,276.
WHOLE_SPECIAL_IDS = (100_257, 100_277, 100_278, 100_279, 100_280)
IdRanges = tuple[tuple[int, int], ...]  # ids from the first number up to the second, which is not included
MOST_LAYERS = 128  # of a pattern; each is traced apart, and with 400 of them the shapes alone take 18 s
LOSS_CHUNK = 128  # positions whose logits are in memory at the same time
LONGEST_CONTEXT = 2**20  # tokens; the state of a decoder takes memory for all of them at once


class TrainTokenizerConfig(Section):
    """Training of byte-level BPE merges on the first rows of sources (the stage `tokenizer`)."""

    megabytes: dict[str, PositiveFloat] = Field(min_length=1)  # source of `ingest` -> its text to read, in 10**6 bytes
    digits: Digits = 3  # digits of a number that one token may have at most; cl100k_base has 3


@dataclass(frozen=True)
class TrainedRanks:
    """Ranks that the stage `tokenizer` trained: the file that tiktoken reads, and `digits` of their training."""

    content: bytes = field(repr=False)
    digits: Digits

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


class TokenizerConfig(Section):
    """A BPE tokenizer: cl100k_base, whole or truncated to its first `ranks` merges, or as many trained ones.

    Merges are listed in merge order, so a prefix of them is a valid BPE. In the whole cl100k_base the chat specials
    have the ids 100,277 to 100,280, as in the author's code before its shift by one; in any other tokenizer the five
    specials follow the ranks.
    """

    train: TrainTokenizerConfig | None = None  # of a configuration; None: cl100k_base's merges
    ranks: int = Field(default=CL100K_RANKS, ge=256, le=MOST_RANKS)  # 256: single bytes only

    # Not a setting: the result of `train`, which every artifact with token ids carries (`data.tokenizer`).
    _trained: TrainedRanks | None = PrivateAttr(default=None)

    @field_validator("ranks")
    @classmethod
    def _exist(cls, ranks: int, others: ValidationInfo) -> int:
        if ranks > CL100K_RANKS and others.data.get("train") is None:
            raise ValueError(f"cl100k_base has {CL100K_RANKS:,} ranks; only a trained tokenizer can have more")
        return ranks

    @classmethod
    def of_trained(cls, ranks: int, trained: TrainedRanks) -> "TokenizerConfig":
        """The tokenizer of `ranks` trained ranks."""
        config = cls.model_construct(train=None, ranks=ranks)
        config._trained = trained
        return config

    @property
    def trained(self) -> TrainedRanks | None:
        """The ranks where they are not cl100k_base's. Raises `ConfigError` for those that a run has yet to train."""
        if self.train is not None:
            raise ConfigError(
                "tokenizer.train: this tokenizer exists once a run has trained it, and in the checkpoints of that run"
            )
        return self._trained

    @property
    def fields(self) -> dict[str, Any]:
        """The fields that an artifact with token ids names it by."""
        if (trained := self.trained) is None:
            return {"ranks": self.ranks}
        return {"ranks": self.ranks, "trained": {"sha256": trained.sha256, "digits": trained.digits}}

    @property
    def vocabulary(self) -> int:
        """Number of ids, specials included: 100,281 for the whole tokenizer, 20 of which no token has."""
        return self.special_ids[-1] + 1

    @property
    def special_ids(self) -> tuple[int, ...]:
        """The ids of `CHAT_SPECIALS`, in that order."""
        if self.ranks == CL100K_RANKS and self.train is None and self._trained is None:
            return WHOLE_SPECIAL_IDS
        return tuple(range(self.ranks, self.ranks + len(CHAT_SPECIALS)))

    def unused_ids(self, rows: int) -> IdRanges:
        """The ids below `rows`, the rows of a model's embedding, that no token has.

        They are those behind the tokenizer's last id and, in the whole cl100k_base, the gaps between its specials.
        """
        ranges, first = [], self.ranks
        for used in (*self.special_ids, rows):
            if first < min(used, rows):
                ranges.append((first, min(used, rows)))
            first = used + 1
        return tuple(ranges)


class ModelConfig(Section):
    """Hyperparameters of the model (paper §2). The stack is `blocks` times the layers of `pattern`."""

    vocabulary: PositiveInt  # rows of the embedding; at least the tokenizer's vocabulary
    width: PositiveInt = 1024  # D
    blocks: PositiveInt = 8
    pattern: str = "SSA"  # the layers of a block in order: S an SCA layer, A a Transformer layer
    context: int = Field(default=1024, ge=1, le=LONGEST_CONTEXT)  # longest sequence, in tokens

    # The SCA layers.
    memory_heads: PositiveInt = 16  # K
    query_heads: PositiveInt = 16  # K'; fewer than K share one query among several memory heads
    spectral_samples: PositiveInt = 2  # M, per head
    expand: PositiveInt = 2  # inner width / `width`
    readout_expand: PositiveInt = 3  # inner width of the SwiGLU that reads the memory / H
    convolution: PositiveInt = 4  # positions of the depthwise convolution, including the current one
    decay: Literal["relative", "window"] = "relative"  # "window": the author's arithmetic, for imported weights
    # The spectral grid θ and the integration weights ω (paper §2.2.3): the author's forms, the paper's free parameters
    # ("free"), or the author's forms with their initial values, which are not trained ("fixed").
    grid: Literal["ordered", "free", "fixed"] = "ordered"  # "ordered": increasing over M, from 0.001 to 3
    integration: Literal["normalised", "free", "fixed"] = "normalised"  # "normalised": positive, with a sum of 1 over M
    chunk: Operational[PositiveInt] = 32  # positions per chunk of the chunked form, for speed and memory
    mixing: Operational[Literal["chunked", "fused", "reference"]] = "chunked"  # "fused": Pallas kernels

    # The Transformer layers.
    attention_heads: PositiveInt = 16
    kv_heads: PositiveInt = 4  # fewer than `attention_heads`: grouped-query attention
    feed_forward: PositiveInt = 2730  # inner width of the SwiGLU
    rope_base: PositiveFloat = 10_000.0
    qk_norm: bool = True  # normalise queries and keys before their product
    # "fused": `jax.nn.dot_product_attention`, by cuDNN on a GPU in bfloat16; elsewhere with all scores in memory.
    attention: Operational[Literal["plain", "fused"]] = "plain"

    sca_norm_epsilon: PositiveFloat = 1e-5
    norm_epsilon: PositiveFloat = 1e-6
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of activations and products; weights are float32
    remat: Operational[Literal["none", "block", "layer", "dots"]] = "block"  # recomputed in the backward pass

    # Not a setting: it follows from `vocabulary` and the tokenizer, which every checkpoint names beside its model.
    _unused_ids: IdRanges = PrivateAttr(default=())

    @field_validator("pattern")
    @classmethod
    def _has_layers(cls, pattern: str) -> str:
        if not pattern or set(pattern) - {"S", "A"}:
            raise ValueError(
                f'{pattern[:40]!r} must be letters S (an SCA layer) and A (a Transformer layer), as in "SSA"'
            )
        if len(pattern) > MOST_LAYERS:
            raise ValueError(f"has {len(pattern)} letters, and a block at most {MOST_LAYERS} layers; raise `blocks`")
        return pattern

    @model_validator(mode="after")
    def _shapes_fit(self) -> "ModelConfig":
        inner = self.width * self.expand
        if inner % (self.memory_heads * self.spectral_samples):
            raise ValueError(
                f"model: width*expand = {inner} is not a multiple of memory_heads*spectral_samples = "
                f"{self.memory_heads * self.spectral_samples}, so the head dimension H is not whole"
            )
        if self.memory_heads % self.query_heads:
            raise ValueError(
                f"model: memory_heads {self.memory_heads} is not a multiple of query_heads {self.query_heads}"
            )
        if self.attention_heads % self.kv_heads:
            raise ValueError(
                f"model: attention_heads {self.attention_heads} is not a multiple of kv_heads {self.kv_heads}"
            )
        if self.width % self.attention_heads or (self.width // self.attention_heads) % 2:
            raise ValueError(
                f"model: width {self.width} over attention_heads {self.attention_heads} must be an even whole number"
            )
        return self

    def with_tokenizer(self, tokenizer: TokenizerConfig) -> "ModelConfig":
        """This model with `unused_ids`, the ids that no token of the tokenizer has."""
        model = self.model_copy()
        model._unused_ids = tokenizer.unused_ids(self.vocabulary)
        return model

    @property
    def unused_ids(self) -> IdRanges:
        """Ids without a token: they get no probability where tokens are sampled or scored (`model.loss.next_logits`).

        Empty for a model that no tokenizer was given to, such as that of a pretraining.
        """
        return self._unused_ids

    @property
    def layers(self) -> tuple[tuple[str, str], ...]:
        """The letter and the name of each layer of a block, in order: sca_0, sca_1, … and attention_0, attention_1, ….

        An attention layer that is its block's only one is named `attention`.
        """
        several, layers = self.pattern.count("A") > 1, []
        for index, letter in enumerate(self.pattern):
            number = self.pattern[:index].count(letter)
            layers.append(
                (letter, f"sca_{number}" if letter == "S" else f"attention_{number}" if several else "attention")
            )
        return tuple(layers)

    @property
    def head_dim(self) -> int:
        """H of the SCA layers: d_inner / (K*M), 64 in the paper."""
        return self.width * self.expand // (self.memory_heads * self.spectral_samples)

    @property
    def projection_width(self) -> int:
        """Columns of an SCA layer's input projection: keys, scores, real and imaginary queries; 5,136 in the paper."""
        return self.memory_heads * (self.head_dim + 1) + 2 * self.query_heads * self.head_dim * self.spectral_samples

    @property
    def attention_head_dim(self) -> int:
        """The head dimension of the Transformer layers."""
        return self.width // self.attention_heads

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the stored embedding table: a multiple of 128, so that it can be sharded and tiled."""
        return -(-self.vocabulary // 128) * 128


# Fields in which the model may differ from the checkpoint: they change no parameter's shape or meaning.
_MAY_DIFFER = {"context", "compute_dtype", "mixing", "chunk", "attention", "remat"}


def refuse_other_shape(folder: Path, name: str, model: ModelConfig, tokenizer: TokenizerConfig) -> None:
    """Raise `ConfigError` with the first difference unless the checkpoint in `folder` fits. `name` is for messages."""
    saved = read_json(folder / "config.json") or {}
    # What a run has yet to train is compared when the stage starts.
    own = {"ranks": tokenizer.ranks} if tokenizer.train else {"trained": None, **tokenizer.fields}
    for part, expected in (("model", model.model_dump(mode="json")), ("tokenizer", own)):
        actual = saved.get(part)
        if not isinstance(actual, dict):
            raise ConfigError(f"pretrain.start: {name} is not a checkpoint: its config.json has no `{part}`")
        for field_name, value in expected.items():
            default = None if field_name == "trained" else value
            if field_name not in _MAY_DIFFER and (other := actual.get(field_name, default)) != value:
                raise ConfigError(
                    f"pretrain.start: {name} has {part}.{field_name} {other!r}, and this run {value!r}: set it as "
                    "the checkpoint has it, or start from another"
                )
