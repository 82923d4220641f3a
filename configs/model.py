"""The model's and the tokenizer's shape. Dimension letters: D width, K memory heads, H head dim, M spectral samples."""

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from configs.base import Section

CL100K_RANKS = 100_256
CHAT_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|think_start|>", "<|think_end|>")


class TokenizerConfig(Section):
    """cl100k_base, whole or cut to its first `ranks` merges (they stand in merge order, so a prefix is a valid BPE).

    Whole, the chat specials take ids 100,277 to 100,280, as in the author's code before the shift by one. Cut, the
    five specials follow the ranks.
    """

    ranks: PositiveInt = CL100K_RANKS

    @model_validator(mode="after")
    def _within(self) -> "TokenizerConfig":
        if not 256 <= self.ranks <= CL100K_RANKS:
            raise ValueError(f"tokenizer.ranks must be 256 to {CL100K_RANKS}, not {self.ranks}")
        return self

    @property
    def vocabulary(self) -> int:
        """Ids in use, specials included: 100,281 for the whole tokenizer."""
        return 100_281 if self.ranks == CL100K_RANKS else self.ranks + len(CHAT_SPECIALS)


class ModelConfig(Section):
    """Paper §2, the table of hyperparameters. The stack is `blocks` times (SCA x `sca_per_block`, Transformer)."""

    vocabulary: PositiveInt
    width: PositiveInt = 1024
    blocks: PositiveInt = 8
    sca_per_block: NonNegativeInt = 2
    context: PositiveInt = 1024

    memory_heads: PositiveInt = 16
    query_heads: PositiveInt = 16
    spectral_samples: PositiveInt = 2
    expand: PositiveInt = 2
    readout_expand: PositiveInt = 3
    convolution: PositiveInt = 4
    decay: Literal["relative", "window"] = "relative"
    chunk: PositiveInt = 32
    mixing: Literal["chunked", "fused", "reference"] = "chunked"

    attention_heads: PositiveInt = 16
    kv_heads: PositiveInt = 4
    feed_forward: PositiveInt = 2730
    rope_base: PositiveFloat = 10_000.0
    qk_norm: bool = True

    sca_norm_epsilon: PositiveFloat = 1e-5
    norm_epsilon: PositiveFloat = 1e-6
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    remat: Literal["none", "block", "layer", "dots"] = "block"

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

    @property
    def head_dim(self) -> int:
        """H of the SCA layers: d_inner / (K*M), 64 in the paper."""
        return self.width * self.expand // (self.memory_heads * self.spectral_samples)

    @property
    def attention_head_dim(self) -> int:
        return self.width // self.attention_heads

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the embedding table as stored: a multiple of 128 so that it shards and tiles."""
        return -(-self.vocabulary // 128) * 128
