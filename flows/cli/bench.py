"""`nautile bench`: prefill and decoding speed of a checkpoint or an ONNX export on this machine, and its state size.

Times are medians of three calls, after a warm-up call that compiles. A prompt has half the context, at most 512 tokens.
The time to the first tokens covers the first `STRIDE` tokens, which decoding returns together.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from nautile.configs.model import ModelConfig
from nautile.flows.render import text_table
from nautile.model.decoding.cache import state_bytes
from nautile.model.decoding.engine import STRIDE
from nautile.model.decoding.slots import DecodeRequest, SlotPrograms, slot_settings
from nautile.model.exports.onnx.folder import WEIGHTS as EXPORTED_WEIGHTS
from nautile.model.exports.onnx.folder import is_onnx_export
from nautile.model.runtimes.load import load_runtime
from nautile.model.weights.files import WEIGHTS

# One stream is a person who chats; 32 is twice the default of `nautile serve --slots`. What lies between shows how much
# of a step's time is reading the weights, which all streams share.
STREAMS = (1, 8, 32)
# The lengths at which the sizes of the states are printed: a transformer's grows with each, this model's only by its
# few attention layers.
STATE_TOKENS = (1024, 4096, 16384, 65536)
PROMPT = 512  # tokens, fewer where the context is short
STRIDES = 4  # strides of tokens per measurement of decoding
ROWS = 4  # prompts per prefill, as in `nautile serve`
REPEATS = 3
MIB = 2**20


def bench(folders: Sequence[Path], streams: Sequence[int] = STREAMS) -> list[dict[str, Any]]:
    """Measure the model in each folder: an ONNX export with onnxruntime, a checkpoint with JAX."""
    return [_measure(folder, streams) for folder in folders]


def bench_view(results: Sequence[dict[str, Any]]) -> RenderableType:
    """Tables of the models' speeds, and of the size of their state compared with a transformer's."""
    speeds = text_table("model", "streams", "prefill tokens/s", "first tokens ms", "decode tokens/s")
    for result in results:
        for row in result["speeds"]:
            numbers = (f"{row[name]:,.1f}" for name in ("prefill_tokens_s", "first_token_ms", "decode_tokens_s"))
            speeds.add_row(result["model"], str(row["streams"]), *numbers)
    state = text_table("state of a stream, MiB", *(f"{tokens:,} tokens" for tokens in STATE_TOKENS))
    for result in results:
        for name, sizes in (("model", result["state_mib"]), ("transformer of its size", result["transformer_mib"])):
            label = result["model"] if name == "model" else name
            state.add_row(label, *(f"{sizes[str(tokens)]:,.1f}" for tokens in STATE_TOKENS))
    lines = [Text(f"{result['model']}: {result['weights_mib']:,.1f} MiB of weights") for result in results]
    return Group(*lines, Text(), speeds, Text(), state)


def state_sizes(config: ModelConfig, tokens: int) -> tuple[int, int]:
    """Bytes of decoding state after `tokens` tokens: of this model, and of a model with attention in every layer."""
    sizes = state_bytes(config)
    fixed = sizes["sca_sums"] + sizes["convolution_history"]
    attention = state_bytes(config.model_copy(update={"pattern": "A" * len(config.pattern)}))
    return fixed + sizes["kv_per_token"] * tokens, attention["kv_per_token"] * tokens


def _measure(folder: Path, streams: Sequence[int]) -> dict[str, Any]:
    exported = is_onnx_export(folder)
    runtime = load_runtime("onnx" if exported else "jax", folder)
    # An export computes in float32, so its state is float32 as well.
    config = runtime.config.model_copy(update={"compute_dtype": "float32"}) if exported else runtime.config
    # JSON keys are strings, so the lengths are strings from the start: `--json` and the table then read the same data.
    sizes = {str(tokens): [size / MIB for size in state_sizes(config, tokens)] for tokens in STATE_TOKENS}
    return {
        "model": runtime.name,
        "runtime": "onnx" if exported else "jax",
        "weights_mib": (folder / (EXPORTED_WEIGHTS if exported else WEIGHTS)).stat().st_size / MIB,
        "state_mib": {tokens: own for tokens, (own, _) in sizes.items()},
        "transformer_mib": {tokens: other for tokens, (_, other) in sizes.items()},
        "speeds": [
            {"streams": count, **_speeds(runtime.slots((), 0, count), min(PROMPT, config.context // 2))}
            for count in streams
        ],
    }


def _speeds(slots: SlotPrograms, length: int) -> dict[str, float]:
    """Speed of prefill (`ROWS` prompts) and of decoding (all slots in parallel), and one slot's first tokens."""
    slots.start()
    rows = min(ROWS, slots.count)
    tokens_RP = np.random.default_rng(0).integers(0, slots.config.vocabulary, (rows, length)).astype(np.int32)
    # The limit is higher than the number of measured tokens, so that no slot finishes early.
    request = DecodeRequest((0,), slots.config.context - length, temperature=0.0)

    # The four steps of a request, so that each can be timed alone: read the prompts, give their states to slots,
    # decode, and all three for the first tokens.
    def read(count: int) -> Any:
        prefilled, _ = slots.prefill(tokens_RP[:count], np.full(count, length, np.int32), score=False)
        return jax.block_until_ready(prefilled)

    def start(prefilled: Any, count: int) -> None:
        into = np.arange(count, dtype=np.int32)
        slots.fill(prefilled, into % rows, into, slot_settings([request] * count, 0))

    def write(count: int, strides: int) -> None:
        for _ in range(strides):
            output = slots.advance(np.arange(slots.count) < count, STRIDE)
            np.asarray(output.count_B)  # waits for the device

    def first_tokens() -> None:
        start(read(1), 1)
        write(1, 1)

    # Each decoding call continues where the last one stopped, so the slots are filled again before each: otherwise they
    # would reach the end of the context and stop.
    prefilled = read(rows)
    decode = _seconds(lambda: write(slots.count, STRIDES), before=lambda: start(prefilled, slots.count))
    return {
        "prefill_tokens_s": rows * length / _seconds(lambda: read(rows)),
        "first_token_ms": 1000 * _seconds(first_tokens),
        "decode_tokens_s": slots.count * STRIDES * STRIDE / decode,
    }


def _seconds(work: Callable[[], None], before: Callable[[], None] = lambda: None) -> float:
    """Median seconds of `REPEATS` calls of `work`, after a warm-up call that compiles; `before` is not timed."""
    times = []
    for _ in range(1 + REPEATS):
        before()
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])
