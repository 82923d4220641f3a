"""`nautile evaluate`: a checkpoint or an export on held-out problems. `nautile bench`: its speed and its state's size.

The problems are those of a configuration's `evaluate.held_out`, with the prompts of the stage `evaluate`; nothing is
written to the store. With `--against`, the comparison is added to the card of an ONNX export.

Times of `bench` are medians of three calls, after a warm-up call that compiles. A prompt has half the context, at most
512 tokens. The time to the first tokens covers the first `STRIDE` tokens, which decoding returns together.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from nautile.common.errors import ConfigError
from nautile.common.files import read_json
from nautile.configs.model import ModelConfig
from nautile.configs.schema import RunConfig
from nautile.evals.benchmarks.items import BenchmarkItem
from nautile.evals.benchmarks.stand_ins import HELD_OUT, held_out
from nautile.evals.running.answerers import CheckpointAnswerer
from nautile.evals.running.rows import SampleRow
from nautile.evals.running.runner import evaluate
from nautile.evals.scoring.comparison import compare, comparison_table
from nautile.evals.scoring.intervals import wilson
from nautile.flows.render import query_table, text_table
from nautile.model.capacity.flops import state_bytes
from nautile.model.decoding.engine import STRIDE
from nautile.model.decoding.slots import DecodeRequest, SlotPrograms, slot_settings
from nautile.model.exports.onnx.folder import WEIGHTS as EXPORTED_WEIGHTS
from nautile.model.exports.onnx.folder import add_measurement, is_onnx_export
from nautile.model.runtimes.load import dtype_here, load_runtime
from nautile.model.weights.files import WEIGHTS


def evaluate_folder(
    folder: Path, runtime: str, against: Path | None, config: RunConfig, problems: int | None
) -> dict[str, Any]:
    """Evaluate the model in `folder`, and with `against` compare it with that checkpoint on the same problems.

    `problems`: only the first so many. Raises `ConfigError` if the configuration has no held-out problems, or if a
    folder is not readable.
    """
    if config.evaluate.held_out is None:
        raise ConfigError(f"configuration {config.name!r} has no `evaluate.held_out`: there are no problems to ask")
    # The seed of the stage `evaluate`, so these are the same problems.
    items = held_out(config.evaluate.held_out, config.seeds.evaluation)[:problems]
    name, rows = _answer(folder, runtime, config, items)
    # A problem whose prompt does not fit, or whose reply could not be graded, is not a wrong answer.
    answered = [row for row in rows if row["left_out"] is None]
    if not answered:
        reasons = " or ".join(sorted({str(row["left_out"]).replace("_", " ") for row in rows}))
        raise ConfigError(f"{folder}: all {len(rows)} problems were left out: {reasons} (see evaluate.prompt_length)")
    correct = sum(bool(row["strict"]) for row in answered)
    low, high = wilson(correct, len(answered))
    result: dict[str, Any] = {
        "model": name, "problems": len(answered), "left_out": len(rows) - len(answered), "correct": correct,
        "accuracy": correct / len(answered), "low": low, "high": high, "comparison": None,
    }  # fmt: skip
    if against is not None:
        # The reference runs in JAX with the precision that it has here: what is measured is the export's change.
        other, other_rows = _answer(against, "jax", config, items)
        result |= {"against": other, "comparison": compare(other_rows, rows, seed=config.seeds.evaluation)}
        if runtime == "onnx":
            model = (read_json(against / "config.json") or {}).get("model") or {}
            precision = dtype_here(model.get("compute_dtype", "its own precision"))
            add_measurement(folder, _sentence(result, config.name, precision))
    return result


def evaluation_view(result: dict[str, Any]) -> RenderableType:
    """The accuracy with its confidence interval, and the comparison if there is one."""
    share = f"{100 * result['accuracy']:.1f} % [{100 * result['low']:.1f}, {100 * result['high']:.1f}]"
    left_out = f", {result['left_out']} left out (too long or not graded)" if result["left_out"] else ""
    parts: list[RenderableType] = [
        Text(
            f"{result['model']}: {share} of {result['problems']:,} held-out problems, strict{left_out}; "
            "95 % interval over problems"
        )
    ]
    if result["comparison"]:
        table = comparison_table(result["comparison"], "A", "B")
        parts.append(Text(f"A: {result['against']}\nB: {result['model']}"))
        parts += [query_table(list(table.columns), list(table.rows)), *(Text(note, "dim") for note in table.notes)]
    return Group(*parts)


def _answer(
    folder: Path, runtime: str, config: RunConfig, items: Sequence[BenchmarkItem]
) -> tuple[str, list[SampleRow]]:
    """Answer all problems with the model in `folder`: the model's name, and a row for each problem."""
    answerer = CheckpointAnswerer(folder, config.evaluate, config.tokenizer, runtime)
    # `evaluate` appends each row to a file, from which a stage would resume.
    with tempfile.TemporaryDirectory() as scratch:
        return answerer.name, evaluate(answerer, items, Path(scratch) / "rows.jsonl", config.seeds.evaluation)


def _sentence(result: dict[str, Any], config_name: str, precision: str) -> str:
    """The sentence about the comparison in the card of an export. `precision`: in which the checkpoint computes."""
    test = result["comparison"]["benchmarks"][HELD_OUT]
    return (
        f"{test['n']:,} held-out problems of `{config_name}`, greedy, strict: {100 * test['b']:.1f} % right, and "
        f"{100 * test['a']:.1f} % by {result['against']} in {precision} with JAX; a change of "
        f"{100 * test['lead']:+.1f} points [{100 * test['low']:.1f}, {100 * test['high']:.1f}] (only this one right: "
        f"{test['only_b']}, only the checkpoint: {test['only_a']}; McNemar's exact test, p = {test['p']:.2g})."
    )


# What lies between shows how much of a step's time is reading the weights, which all streams share.
STREAMS = (1, 8, 32)
# A transformer's state grows with each length, this model's only by its few attention layers.
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

    # The steps of a request, each to be timed alone.
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

    # Decoding continues where the last call stopped: the slots would reach the end of the context and stop.
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
