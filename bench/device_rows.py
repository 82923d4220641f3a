"""The rows of `bench/device.py`: what each measures, and at which shapes.

Every function imports JAX itself, because the parent process of the bench only reads the names of the rows.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

SECTIONS = ["chip", "kernels", "train_100m", "rl", "train_370m", "decode"]
Row = dict[str, Any]
Task = tuple[str, Callable[[], Row]]


@dataclass(frozen=True, eq=False)
class Shapes:
    """The shapes of all sections; hashed by identity. `layer`: B, L, K, H, M. `models`: fields of `ModelConfig`."""

    layer: tuple[int, int, int, int, int]
    chunks: tuple[int, ...]
    models: dict[str, Row]
    rows: dict[str, dict[str, int]]  # rows of a step, by model and `remat`
    steps: dict[str, int]
    rates: dict[str, float]  # highest learning rates
    groups: tuple[int, int]  # prompts, completions of each
    prompt: int
    completion: int
    micro_rows: int
    decoded: int
    side: int  # of the matrix product that measures the chip
    repeats: int


PUBLISHED = Shapes(
    layer=(4, 1024, 16, 64, 2),
    chunks=(32, 128),
    models={
        "train_100m": {
            "width": 768, "blocks": 5, "memory_heads": 12, "query_heads": 12, "attention_heads": 12, "kv_heads": 4,
            "feed_forward": 2048, "vocabulary": 16_389,  # configs/nautile_100m.toml
        },
        "train_370m": {"vocabulary": 100_300},
    },
    rows={"train_100m": {"layer": 32, "none": 16}, "train_370m": {"layer": 16, "none": 8}},
    steps={"train_100m": 50, "train_370m": 10},
    # 1e-3 after two steps of warm-up throws the larger model back: its loss then says nothing about the form.
    rates={"train_100m": 1e-3, "train_370m": 1e-4},
    groups=(8, 8), prompt=64, completion=768, micro_rows=8, decoded=256, side=8192, repeats=5,
)  # fmt: skip
_TINY = {
    "width": 32, "blocks": 1, "memory_heads": 2, "query_heads": 2, "attention_heads": 2, "kv_heads": 1,
    "feed_forward": 40, "vocabulary": 200, "context": 64,
}  # fmt: skip
SMALL = Shapes(
    layer=(2, 48, 2, 16, 2),
    chunks=(),  # on a CPU the fused form is the chunked one
    models={"train_100m": _TINY, "train_370m": {**_TINY, "blocks": 2}},
    rows={name: {"layer": 4, "none": 4} for name in ("train_100m", "train_370m")},
    steps={"train_100m": 12, "train_370m": 6},
    rates={"train_100m": 1e-3, "train_370m": 1e-3},
    groups=(2, 2), prompt=8, completion=24, micro_rows=4, decoded=12, side=64, repeats=1,
)  # fmt: skip


def gib(size: float) -> float:
    return round(size / 2**30, 3)


def memory(name: str) -> float | None:
    """A figure of the first device's allocator in GiB; None where it keeps none, as on CPU."""
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    return gib(stats[name]) if name in stats else None


def seconds_of(call: Callable[[], Any], repeats: int, calls: int = 5) -> float:
    """Median seconds of a call, after one that is not counted; `calls` are started before the last is waited for."""
    import jax

    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            result = call()
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


def chip(shapes: Shapes) -> Row:
    """What the chip reaches on a large product of random bfloat16 matrices, and on a copy."""
    import jax
    import jax.numpy as jnp

    side = shapes.side
    left, right = (jax.random.normal(jax.random.key(seed), (side, side), jnp.bfloat16) for seed in (0, 1))
    wide = jnp.ones((side, 4 * side), jnp.float32)
    product = seconds_of(partial(jax.jit(jnp.matmul), left, right), shapes.repeats)
    copy = seconds_of(partial(jax.jit(lambda array: array + 1), wide), shapes.repeats)
    return {
        "tflops_bfloat16": round(2 * side**3 / product / 1e12, 2),
        "copy_gb_per_s": round(2 * wide.nbytes / copy / 1e9, 1),
        "memory_gib": memory("bytes_limit"),
    }


@cache
def layer_inputs(shapes: Shapes, dtype: str) -> tuple[Any, Any, Any]:
    """Random operands of the mixing operator, the segments of packed rows, and cotangents of both readouts."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from nautile.model.layers.mixing.chunked import Operands

    batch, length, heads, head_dim, samples = shapes.layer
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    keys, queries, grid = (batch, length, heads, head_dim), (batch, length, heads, head_dim, samples), 0.02
    operands = Operands(
        normal(*keys).astype(dtype), jax.nn.softplus(normal(*keys[:3])),
        jnp.asarray(np.geomspace(0.001, 0.1, heads), jnp.float32), 1 + grid * normal(heads),
        normal(*queries[2:]), 0.5 + grid * normal(*queries[2:]), normal(*queries).astype(dtype),
        normal(*queries).astype(dtype),
    )  # fmt: skip
    # Three documents in every row, and padding at the end of the first.
    segments = np.repeat(1 + 3 * np.arange(length)[None] // length, batch, axis=0).astype(np.int32)
    segments[0, length - length // 8 :] = 0
    return operands, jnp.asarray(segments), tuple(normal(*keys).astype(dtype) for _ in range(2))


def layer_passes(form: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The forward pass of a form, and its values with the gradients of all eight operands."""
    import jax

    def forward(operands: Any, segments: Any) -> tuple:
        return form(operands, segments)[:2]

    def gradients(operands: Any, segments: Any, cotangents: Any) -> tuple:
        values, back = jax.vjp(lambda operands: forward(operands, segments), operands)
        return values, back(cotangents)[0]

    return forward, gradients


@cache
def layer_truth(shapes: Shapes, dtype: str) -> Any:
    """Values and gradients of the matrix form in float64, from operands that were rounded to `dtype`."""
    import jax
    import numpy as np

    from nautile.model.layers.mixing.chunked import timeline
    from nautile.model.layers.mixing.operator import empty_state, reference

    operands, segments, cotangents = layer_inputs(shapes, dtype)
    _, _, heads, head_dim, samples = shapes.layer
    state, times = empty_state(segments.shape[0], heads, head_dim, samples), timeline(segments)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), (operands, cotangents, state))
        _, gradients = layer_passes(lambda operands, _: reference(operands, times, wide[2]))
        return jax.device_get(jax.jit(gradients)(wide[0], segments, wide[1]))


def layer_row(shapes: Shapes, dtype: str, form: str, chunk: int) -> Row:
    """Errors and times of one form of the mixing operator."""
    import jax
    import numpy as np

    from nautile.model.layers.mixing.operator import mix

    operands, segments, cotangents = layer_inputs(shapes, dtype)
    forward, gradients = layer_passes(lambda operands, segments: mix(operands, segments, form=form, chunk=chunk))
    start = time.perf_counter()
    run_forward = jax.jit(forward).lower(operands, segments).compile()
    run_gradients = jax.jit(gradients).lower(operands, segments, cotangents).compile()
    compile_s = time.perf_counter() - start
    text, results = run_gradients.as_text(), jax.device_get(run_gradients(operands, segments, cotangents))

    def relative(got: Any, want: Any) -> float:
        want = np.asarray(want, np.float64)
        return float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))

    truth = layer_truth(shapes, dtype)
    values = dict(zip(("re", "im"), map(relative, results[0], truth[0]), strict=True))
    errors = dict(zip(operands._fields, map(relative, results[1], truth[1]), strict=True))
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    return {
        # Without a kernel for this device the fused form is the chunked one.
        "kernels": sum(text.count(f'custom_call_target="{name}') for name in ("__gpu$xla.gpu.triton", "tpu_custom")),
        "value_error": float(f"{max(values.values()):.2e}"),
        "gradient_error": float(f"{errors[worst]:.2e}"),
        "worst": worst,
        "forward_ms": round(1e3 * seconds_of(partial(run_forward, operands, segments), shapes.repeats), 3),
        "gradients_ms": round(
            1e3 * seconds_of(partial(run_gradients, operands, segments, cotangents), shapes.repeats), 3
        ),
        "temporaries_gib": gib(run_gradients.memory_analysis().temp_size_in_bytes),
        "compile_s": round(compile_s, 1),
        "errors": {name: float(f"{error:.2e}") for name, error in (values | errors).items()},
    }


def model_config(shapes: Shapes, name: str, **changes: Any) -> Any:
    from nautile.configs.model import ModelConfig

    return ModelConfig(**{"compute_dtype": "bfloat16", **shapes.models[name], **changes})


def ngram_batches(vocabulary: int, rows: int, length: int, steps: int) -> Iterator[dict[str, Any]]:
    """Batches for a training step: each row is a sequence of n-grams, drawn from 64 random ones of 16 tokens."""
    import numpy as np

    rng = np.random.default_rng(0)
    table = rng.integers(0, vocabulary, (64, 16))
    for _ in range(steps):
        drawn = rng.integers(0, len(table), (rows, -(-(length + 1) // 16)))
        tokens = table[drawn].reshape(rows, -1)[:, : length + 1].astype(np.int32)
        yield {
            "tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segments": np.ones((rows, length), np.int32),
            "positions": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
            "weights": np.ones((rows, length), np.float32),
            "source": np.zeros(rows, np.int32), "bytes": np.full(rows, length, np.int32),
        }  # fmt: skip


def training_program(shapes: Shapes, name: str, mixing: str, remat: str, attention: str) -> Any:
    from nautile.configs.base import OptimizerConfig
    from nautile.configs.training import PhaseConfig, PretrainConfig
    from nautile.model.sharding import make_mesh
    from nautile.model.training.step import Program

    model = model_config(shapes, name, mixing=mixing, remat=remat, attention=attention)
    steps = shapes.steps[name]
    rows = shapes.rows[name][remat]
    phase = PhaseConfig(name="bench", tokens=rows * model.context * steps, mixture={"bench": 1.0})
    optimizer = OptimizerConfig(learning_rate=shapes.rates[name], warmup_steps=steps // 5)
    config = PretrainConfig(phases=(phase,), batch_rows=rows, optimizer=optimizer)
    return Program(config, model, make_mesh(1), steps, 1, model.context, 0)


VARIANTS = [(mixing, remat, "plain") for remat in ("layer", "none") for mixing in ("fused", "chunked")]
VARIANTS.append(("fused", "none", "fused"))


@cache
def compiled_steps(shapes: Shapes, name: str, variants: tuple[tuple[str, ...], ...]) -> dict[tuple, Future]:
    """Each variant's program, its compiled step and the seconds that this took.

    On an accelerator they compile at the same time, one in each thread: compilation is most of what this bench costs.
    """
    import jax

    from nautile.model.training.step import TrainState

    def compiled(*variant: str) -> tuple[Any, Any, float]:
        start = time.perf_counter()
        program = training_program(shapes, name, *variant)
        lowered = program.step.lower(TrainState._make(program.state_shapes()), program.batch_shapes())
        return program, lowered.compile(), time.perf_counter() - start

    pool = ThreadPoolExecutor(1 if jax.default_backend() == "cpu" else len(variants))
    futures = {variant: pool.submit(compiled, *variant) for variant in variants}
    pool.shutdown(wait=False)
    return futures


@cache
def fresh_state(shapes: Shapes, name: str) -> Callable[[], Any]:
    """The initial state of training; the same whatever `mixing` and `remat`, so it is compiled once."""
    return training_program(shapes, name, *VARIANTS[0]).fresh


def train_row(shapes: Shapes, name: str, variant: tuple[str, ...], variants: tuple[tuple[str, ...], ...]) -> Row:
    """Training steps of one form: time, tokens/s, memory, utilisation, and the loss of the first and last step."""
    import jax

    from nautile.model.capacity.flops import parameter_counts, training_flops
    from nautile.model.capacity.topology import chip_of
    from nautile.model.sharding import put_rows

    program, step, compile_s = compiled_steps(shapes, name, variants)[variant].result()
    model, rows = model_config(shapes, name), program.rows
    analysis = step.memory_analysis()
    row: Row = {"rows": rows, "compile_s": round(compile_s, 1), "temporaries_gib": gib(analysis.temp_size_in_bytes)}
    batches = [
        put_rows(batch, program.mesh)
        for batch in ngram_batches(model.vocabulary, rows, model.context, shapes.steps[name])
    ]
    state, losses = fresh_state(shapes, name)(), []
    for number, batch in enumerate(batches):
        if number == 2:  # the first two steps load the program and fill the allocator's pool
            jax.block_until_ready(state)
            start = time.perf_counter()
        state, metrics = step(state, batch)
        losses.append(metrics.source_loss_S[0] / metrics.source_weight_S[0])
    jax.block_until_ready(state)
    seconds = (time.perf_counter() - start) / (len(batches) - 2)
    numbers = [float(loss) for loss in losses]
    tokens = rows * model.context
    row |= {
        "parameters": sum(parameter_counts(model).values()),
        "step_ms": round(1e3 * seconds, 2),
        "tokens_per_s": round(tokens / seconds),
        "first_loss": round(numbers[0], 3),
        "last_loss": round(numbers[-1], 3),
        "falls": numbers[-1] < numbers[0],
        "peak_gib_so_far": memory("peak_bytes_in_use"),
        "losses": [round(number, 3) for number in numbers],
    }
    chip = chip_of(jax.devices()[0].device_kind)
    if chip and chip.peak:
        row["utilisation"] = round(training_flops(model, model.context) * tokens / seconds / chip.peak, 4)
    return row


@cache
def policy_params(shapes: Shapes, name: str, spread: float) -> Any:
    """Random weights, the table scaled by `spread`: the logits then have `spread` times the deviation."""
    from nautile.model.nautile import initialise

    params = initialise(model_config(shapes, name), 0)
    return {**params, "embedding": params["embedding"] * spread}


def rollout_config(shapes: Shapes) -> Any:
    from nautile.configs.training import RolloutConfig

    prompts, group = shapes.groups
    return RolloutConfig(prompts=prompts, group=group, prompt_length=shapes.prompt, max_tokens=shapes.completion)


@cache
def generator(shapes: Shapes, name: str, rows: int, tokens: int, **changes: Any) -> Any:
    """The sampler, which never stops before `tokens` tokens, for models of random weights have no end marker."""
    from nautile.model.decoding.generate import Generator
    from nautile.model.decoding.sampling import Sampling

    return Generator(model_config(shapes, name, **changes), Sampling(tokens), rows, shapes.prompt)


def prompts_of(shapes: Shapes, name: str, count: int) -> list[list[int]]:
    import numpy as np

    vocabulary = shapes.models[name]["vocabulary"]
    return np.random.default_rng(1).integers(0, vocabulary, (count, shapes.prompt)).tolist()


@cache
def sampled_groups(shapes: Shapes, name: str, mixing: str, spread: float) -> tuple[Any, float]:
    """Groups of completions with rewards 1 and 0 in turn, and the sampler's tokens/s, without compilation."""
    from nautile.data.chat_template import ParsedReply
    from nautile.data.sources.reasoning_gym import Problem
    from nautile.model.program_thread import working_seconds
    from nautile.rl.rewards import advantages
    from nautile.rl.rollouts import Group, Rollout

    count, size = shapes.groups
    prompts = prompts_of(shapes, name, count)
    rows = [prompt for prompt in prompts for _ in range(size)]
    sample = generator(shapes, name, count * size, shapes.completion, mixing=mixing)
    start = working_seconds()
    completions = sample(policy_params(shapes, name, spread), rows, [(0, index) for index in range(len(rows))])
    seconds = working_seconds() - start
    rewards = [float(index % 2) for index in range(size)]
    groups = [
        Group(
            number,
            Problem("bench", number, "", "", ""),
            [
                Rollout(
                    prompt, completion.ids, completion.logprobs, completion.truncated,
                    ParsedReply("", None, False, False), "", reward, {}, advantage,
                )
                for completion, reward, advantage in zip(
                    completions[number * size : (number + 1) * size], rewards, advantages(rewards), strict=True
                )
            ],
        )
        for number, prompt in enumerate(prompts)
    ]  # fmt: skip
    return groups, len(rows) * shapes.completion / seconds


@cache
def scorer(config: Any) -> Callable[..., Any]:
    """The learner's log-probabilities of whole rows: `forward`, then `token_logprobs`."""
    import jax

    from nautile.model.loss import token_logprobs
    from nautile.model.nautile import forward

    def score(params: Any, batch: Any) -> Any:
        hidden_BLD = forward(params, config, batch["tokens"], batch["segments"], batch["positions"])
        return token_logprobs(params, config, hidden_BLD, batch["targets"])

    return jax.jit(score)


def gap_row(shapes: Shapes, name: str, mixing: str, spread: float) -> Row:
    """Statistics of |log p sampler - log p learner| over all sampled tokens, in nats."""
    import numpy as np

    from nautile.rl.learner import rows_of
    from nautile.rl.training_rows import batches

    groups, rate = sampled_groups(shapes, name, mixing, spread)
    config, params = model_config(shapes, name, mixing=mixing), policy_params(shapes, name, spread)
    rows = [row for group in rows_of(groups) for row in group]
    differences, entropies = [], []
    for batch in batches(rows, shapes.micro_rows, shapes.prompt + shapes.completion):
        scores, entropy = (np.asarray(part) for part in scorer(config)(params, batch))
        sampled = batch["weights"] > 0
        differences.append((scores - batch["sampled"])[sampled])
        entropies.append(entropy[sampled])
    difference = np.concatenate(differences).astype(np.float64)
    gap, ratio = np.abs(difference), np.exp(difference)
    return {
        "tokens": len(gap),
        "entropy": round(float(np.concatenate(entropies).mean()), 3),
        "mean_nats": float(f"{gap.mean():.3e}"),
        "p99_nats": float(f"{np.quantile(gap, 0.99):.3e}"),
        "largest_nats": float(f"{gap.max():.3e}"),
        "largest_ratio": round(float(ratio.max()), 4),
        # Of a whole completion: the error of its log-probability.
        "completion_nats": float(f"{np.abs(difference.reshape(len(rows), -1).sum(axis=1)).mean():.3e}"),
        "sampled_tokens_per_s": round(rate),
        "peak_gib_so_far": memory("peak_bytes_in_use"),
    }


def update_row(shapes: Shapes, name: str, mixing: str) -> Row:
    """A balanced policy-gradient update (paper §4.3) on the completions of `gap_row`."""
    import jax

    from nautile.configs.base import OptimizerConfig
    from nautile.configs.training import PolicyConfig
    from nautile.model.sharding import make_mesh
    from nautile.rl.learner import Learner
    from nautile.rl.objective_registry import Balance

    groups, _ = sampled_groups(shapes, name, mixing, 1.0)
    model = model_config(shapes, name, mixing=mixing, remat="layer")
    optimizer = OptimizerConfig(learning_rate=5e-5, schedule="constant")
    policy = PolicyConfig(steps=2, micro_rows=shapes.micro_rows, optimizer=optimizer)
    params = policy_params(shapes, name, 1.0)
    learner = Learner(model, policy, rollout_config(shapes), params, Balance(), make_mesh(1))
    start = time.perf_counter()
    first = learner.update(groups)
    jax.block_until_ready(learner.trained)
    middle = time.perf_counter()
    learner.update(groups)
    jax.block_until_ready(learner.trained)
    seconds = time.perf_counter() - middle
    tokens = sum(len(rollout.ids) for group in groups for rollout in group.rollouts)
    return {
        "tokens": tokens,
        "update_s": round(seconds, 3),
        "tokens_per_s": round(tokens / seconds),
        "first_update_s": round(middle - start, 1),
        **{name: float(f"{value:.4g}") for name, value in first.items()},
        "peak_gib_so_far": memory("peak_bytes_in_use"),
    }


def decode_row(shapes: Shapes, name: str, rows: int) -> Row:
    """Tokens/s of the sampler of reinforcement and evaluation, in the second call."""
    from nautile.model.capacity.flops import parameter_counts

    sample = generator(shapes, name, rows, shapes.decoded)
    params, prompts = policy_params(shapes, name, 1.0), prompts_of(shapes, name, rows)
    times = []
    for number in range(2):
        start = time.perf_counter()
        sample(params, prompts, [(number, row) for row in range(rows)])
        times.append(time.perf_counter() - start)
    parameters = sum(parameter_counts(model_config(shapes, name)).values())
    return {
        "tokens_per_s": round(rows * shapes.decoded / times[1], 1),
        "ms_per_token": round(1e3 * times[1] / shapes.decoded, 3),
        # Every parameter is read once for a token of all rows, 2 bytes each.
        "weights_gb_per_s": round(2 * parameters * shapes.decoded / times[1] / 1e9, 1),
        "first_call_s": round(times[0], 1),
    }


def engine_row(shapes: Shapes, name: str, slots: int) -> Row:
    """Tokens/s of the engine of `nautile serve`, all slots busy: from the submission to the last token."""
    import threading

    from nautile.model.decoding.engine import Engine
    from nautile.model.decoding.slots import Chunk, DecodeRequest, JaxSlots, RequestFailed

    config = model_config(shapes, name)
    programs = JaxSlots(policy_params(shapes, name, 1.0), config, (), config.vocabulary, slots, shapes.prompt)
    engine, ended, left, failures = Engine(programs, slots), threading.Event(), [slots], []

    def listen(events: list) -> None:
        failures.extend(event.message for _, event in events if isinstance(event, RequestFailed))
        left[0] -= sum(isinstance(event, Chunk) and event.finish is not None for _, event in events)
        if failures or not left[0]:
            ended.set()

    start = time.perf_counter()
    engine.start(listen)
    while not engine.ready.wait(0.1):
        if engine.failure:
            raise RuntimeError(engine.failure)
    ready = time.perf_counter()
    engine.submit(
        [
            DecodeRequest(tuple(prompt), shapes.decoded, (index,))
            for index, prompt in enumerate(prompts_of(shapes, name, slots))
        ]
    )
    ended.wait()
    seconds = time.perf_counter() - ready
    engine.close()
    if failures:
        raise RuntimeError(failures[0])
    return {"tokens_per_s": round(slots * shapes.decoded / seconds, 1), "ready_s": round(ready - start, 1)}


def tasks(shapes: Shapes, sections: list[str]) -> Iterator[Task]:
    """The rows to measure, in order: name, and the function that measures it."""
    if "chip" in sections:
        yield "chip", partial(chip, shapes)
    if "kernels" in sections:
        for dtype in ("float32", "bfloat16"):
            forms = [("fused", 32), *(("chunked", chunk) for chunk in shapes.chunks), ("reference", 32)]
            for form, chunk in forms:
                label = f"{form} {chunk}" if form == "chunked" else form
                yield f"kernels: {dtype}, {label}", partial(layer_row, shapes, dtype, form, chunk)
    for section in ("train_100m", "rl", "train_370m"):
        if section in sections and section != "rl":
            variants = tuple(VARIANTS if shapes is PUBLISHED else VARIANTS[:1])
            for variant in variants:
                fused_attention = ", fused attention" * (variant[2] == "fused")
                label = f"{section}: {variant[0]}, remat {variant[1]}{fused_attention}"
                yield label, partial(train_row, shapes, section, variant, variants)
        elif section in sections:
            for spread in (1.0, 5.0):
                yield f"rl: gap, fused, table x {spread:g}", partial(gap_row, shapes, "train_370m", "fused", spread)
            yield "rl: update, fused", partial(update_row, shapes, "train_370m", "fused")
            if shapes is PUBLISHED:
                yield "rl: gap, chunked, table x 5", partial(gap_row, shapes, "train_370m", "chunked", 5.0)
    if "decode" in sections:
        for rows in (1, 64 if shapes is PUBLISHED else 4):
            yield f"decode: sampler, batch {rows}", partial(decode_row, shapes, "train_370m", rows)
        yield f"decode: engine, {rows} slots", partial(engine_row, shapes, "train_370m", rows)
