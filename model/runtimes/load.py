"""The runtimes by name, as for the option `--runtime`: JAX for checkpoints, onnxruntime for exports.

Both have the configurations of the model and its tokenizer, a `name` with the digest of the weights, a `sampler` of
replies (equal prompt and seed, equal sample), the `slots` of a batching engine, a `scorer` of continuations, and the
`pooled_states` and `token_states` of texts.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import jax
import numpy as np

from nautile.common.errors import ConfigError
from nautile.common.files import sha256_of
from nautile.model.decoding.generate import Completion, Generator
from nautile.model.decoding.sampling import Sampling
from nautile.model.decoding.scoring import Pooling, SharedPrefixScorer, pooled_states, token_states
from nautile.model.decoding.slots import JaxSlots
from nautile.model.exports.onnx.folder import is_onnx_export
from nautile.model.layers.common import Params
from nautile.model.weights.files import WEIGHTS, load_weights

if TYPE_CHECKING:
    from nautile.model.runtimes.onnx_runtime import OnnxRuntime


class JaxSampler:
    """A `Generator` with its parameters."""

    def __init__(self, params: Params, generator: Generator) -> None:
        self._params, self._generator = params, generator
        self.prompt_length = generator.prompt_length

    def __call__(self, prompts: Sequence[Sequence[int]], seeds: Sequence[tuple[int, ...]]) -> list[Completion]:
        return self._generator(self._params, prompts, seeds)

    def stream(self, prompt: Sequence[int], seed: tuple[int, ...]) -> Iterator[Completion]:
        return self._generator.stream(self._params, prompt, seed)


def dtype_here(compute_dtype: str) -> str:
    """The type in which a checkpoint with this `compute_dtype` answers here: on a CPU always float32.

    XLA emulates bfloat16 on a CPU: a token of the published model takes 340 ms of a core, and 80 in float32.
    """
    return "float32" if jax.default_backend() == "cpu" else compute_dtype


class JaxRuntime:
    """The runtime for the checkpoint in `folder`. Raises ConfigError if it cannot be read.

    `config` is the checkpoint's, with the type of `dtype_here`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.params, config, self.tokenizer = load_weights(folder)
        self.config = config.model_copy(update={"compute_dtype": dtype_here(config.compute_dtype)})

    @cached_property
    def name(self) -> str:
        """Not before it is asked for: a digest of gigabytes takes seconds."""
        return f"checkpoint {sha256_of(self._folder / WEIGHTS)[:12]}"

    def sampler(self, sampling: Sampling, rows: int, prompt_length: int) -> JaxSampler:
        return JaxSampler(self.params, Generator(self.config, sampling, rows, prompt_length))

    def slots(self, stops: tuple[int, ...], think_end: int, count: int, longest: int | None = None) -> JaxSlots:
        return JaxSlots(self.params, self.config, stops, think_end, count, longest)

    def scorer(self, rows: int) -> SharedPrefixScorer:
        return SharedPrefixScorer(self.params, self.config, rows)

    def pooled_states(self, texts: Sequence[Sequence[int]], rows: int, pooling: Pooling) -> np.ndarray:
        return pooled_states(self.params, self.config, texts, rows, pooling)

    def token_states(self, texts: Sequence[Sequence[int]], rows: int) -> list[np.ndarray]:
        return token_states(self.params, self.config, texts, rows)


def onnx_runtime(folder: Path) -> "OnnxRuntime":
    """The runtime for the ONNX export in `folder`. Imports onnxruntime, which the core lacks."""
    from nautile.model.runtimes.onnx_runtime import OnnxRuntime

    return OnnxRuntime(folder)


Runtime: TypeAlias = "JaxRuntime | OnnxRuntime"
RUNTIMES: dict[str, Callable[[Path], Runtime]] = {"jax": JaxRuntime, "onnx": onnx_runtime}


def runtime_of(folder: Path) -> str:
    """The name of the runtime that can load `folder`."""
    return "onnx" if is_onnx_export(folder) else "jax"


def load_runtime(name: str, folder: Path) -> Runtime:
    """Load a checkpoint (jax) or an ONNX export (onnx) from `folder`. Raises ConfigError if that fails."""
    check_runtime(name, folder)
    return RUNTIMES[name](folder)


def check_runtime(name: str, folder: Path) -> None:
    """Raise ConfigError unless the runtime called `name` can load `folder`."""
    if name not in RUNTIMES:
        raise ConfigError(f"--runtime {name}: is not one of {', '.join(RUNTIMES)}")
    fitting = runtime_of(folder)
    if (name, fitting) == ("jax", "onnx"):
        raise ConfigError(f"{folder}: is an ONNX export: add `--runtime onnx`")
    if (name, fitting) == ("onnx", "jax"):
        raise ConfigError(f"{folder}: is no ONNX export; `nautile export CHECKPOINT FOLDER --format onnx` creates one")
