"""What `nautile chat`, `serve` and `evaluate` need of whatever computes: JAX from a checkpoint, or onnxruntime."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from configs.model import ModelConfig, TokenizerConfig
from model.decoding.generate import Sampled
from model.decoding.sampling import Sampling
from model.decoding.slot_programs import SlotPrograms


class ReplySampler(Protocol):
    """Protocol of sampling with one set of settings. Equal prompt and seed give an equal sample."""

    prompt_length: int

    def __call__(self, prompts: Sequence[Sequence[int]], seeds: Sequence[tuple[int, ...]]) -> Sequence[Sampled]:
        """One sample per prompt, in order."""
        ...

    def stream(self, prompt: Sequence[int], seed: tuple[int, ...]) -> Iterator[Sampled]:
        """The sample of one prompt as it grows; the last is the whole one."""
        ...


class Runtime(Protocol):
    """Protocol of loaded weights. `name` derives from their digest."""

    config: ModelConfig
    tokenizer: TokenizerConfig
    name: str

    def sampler(self, sampling: Sampling, rows: int, prompt_length: int) -> ReplySampler:
        """Sample at most `rows` at a time. Raises ConfigError where prompt and reply do not fit the context."""
        ...

    def slots(self, stops: tuple[int, ...], think_end: int, count: int, longest: int | None = None) -> SlotPrograms:
        """The slots of a batching engine. `longest`: of the prompts, in tokens, if that is known."""
        ...
