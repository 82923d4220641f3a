"""Protocols of a runtime (JAX with a checkpoint, or onnxruntime), as used by `nautile chat`, `serve` and `evaluate`."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from nautile.configs.model import ModelConfig, TokenizerConfig
from nautile.model.decoding.generate import Sampled
from nautile.model.decoding.sampling import Sampling
from nautile.model.decoding.slots import SlotPrograms


class ReplySampler(Protocol):
    """Protocol of a sampler with fixed settings. Equal prompt and seed give equal samples."""

    prompt_length: int

    def __call__(self, prompts: Sequence[Sequence[int]], seeds: Sequence[tuple[int, ...]]) -> Sequence[Sampled]:
        """One sample per prompt, in order."""
        ...

    def stream(self, prompt: Sequence[int], seed: tuple[int, ...]) -> Iterator[Sampled]:
        """Yield the growing sample of one prompt; the last is complete."""
        ...


class Runtime(Protocol):
    """Protocol of loaded weights. `name` contains their digest."""

    config: ModelConfig
    tokenizer: TokenizerConfig
    name: str

    def sampler(self, sampling: Sampling, rows: int, prompt_length: int) -> ReplySampler:
        """A sampler of at most `rows` samples at a time. Raises ConfigError if prompt and reply exceed the context."""
        ...

    def slots(self, stops: tuple[int, ...], think_end: int, count: int, longest: int | None = None) -> SlotPrograms:
        """The slots of a batching engine. `longest`: the longest prompt in tokens, if known."""
        ...
