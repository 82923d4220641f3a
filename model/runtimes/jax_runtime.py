"""The JAX runtime, for checkpoints."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from nautile.common.files import sha256_of
from nautile.model.decoding.generate import Completion, Generator
from nautile.model.decoding.sampling import Sampling
from nautile.model.decoding.slots import JaxSlots
from nautile.model.layers.common import Params
from nautile.model.weights.files import WEIGHTS, load_weights


class JaxSampler:
    """`model.runtimes.protocol.ReplySampler` with a `Generator`."""

    def __init__(self, params: Params, generator: Generator) -> None:
        self._params, self._generator = params, generator
        self.prompt_length = generator.prompt_length

    def __call__(self, prompts: Sequence[Sequence[int]], seeds: Sequence[tuple[int, ...]]) -> list[Completion]:
        return self._generator(self._params, prompts, seeds)

    def stream(self, prompt: Sequence[int], seed: tuple[int, ...]) -> Iterator[Completion]:
        return self._generator.stream(self._params, prompt, seed)


class JaxRuntime:
    """A `model.runtimes.protocol.Runtime` for the checkpoint in `folder`. Raises ConfigError if it cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.params, self.config, self.tokenizer = load_weights(folder)
        self.name = f"checkpoint {sha256_of(folder / WEIGHTS)[:12]}"

    def sampler(self, sampling: Sampling, rows: int, prompt_length: int) -> JaxSampler:
        return JaxSampler(self.params, Generator(self.config, sampling, rows, prompt_length))

    def slots(self, stops: tuple[int, ...], think_end: int, count: int, longest: int | None = None) -> JaxSlots:
        return JaxSlots(self.params, self.config, stops, think_end, count, longest)
