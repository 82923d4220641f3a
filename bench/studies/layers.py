"""What can an SCA layer do alone, and what does each ratio to attention buy? Small stacks on synthetic tasks.

    python bench/studies/layers.py --minutes 60      runs cells for an hour, in the order below; again: the ones left
    python bench/studies/layers.py --report          prints the tables and draws docs/results/layers.svg

A cell is an arm on a task: stacks of about 0.1 M parameters beside the embedding, trained on rows of 64 tokens for
`STEPS` updates of `BATCH` fresh rows, the first seed at each rate and the others at its best. The layers are the
project's; the labels stand at single positions (`layer_tasks.py`), which no stage of the pipeline trains on, and so a
cell is no run of the pipeline. Each result is a row of docs/results/layers.json.

Letters of a pattern: S the SCA layer; L the same with θ = 0, gated sums without a phase, the nearest linear attention;
P the same with one phase for the whole head, φ_m = ⟨θ_m, softsign(η k)⟩ as in the paper's theory (§2.2.1), in place of
one for each of its H numbers; A attention; C attention after a causal convolution of four tokens.

Decided before the cells ran; the number of updates and the rates after a pilot of CC alone on recall of 8 (seed 1: at
6e-3 0.08 of the answers are right after 300 updates and 0.98 after 600, at 2e-3 0.06 and 0.14):

1. The rate of a cell is the one with which seed 1 has the highest accuracy on selection rows; all figures are of other
   rows. An interval is over seeds (`evals.scoring.over_seeds`, 95 %), three of them.
2. "Can": the lower end at length 64 is above 0.9. "Cannot": the upper end is below chance and 0.05. "In part": else.
3. The primary contrasts, with Holm's correction for their number: SS against LL on recall of 8 (does the phase help?);
   SSA against CC on recall of 16 (does the hybrid reach attention with a convolution?); SSA against SA, and SSSA
   against SSA, on recall of 16 (what does a ratio buy?); PP against SS on recall of 8 (does one phase a head help?).
   A difference below 10 points is of no interest.
4. We would change the layer to P if PP leads SS by 20 points or more on recall of 8, its interval excludes 0, and it
   is not behind by 10 points or more on any other task that was run.
"""

import math
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from bench.measure import argument_parser
from bench.studies.layer_tasks import TASKS, VOCABULARY, Task, chance_of
from nautile.common.files import read_json, write_json
from nautile.configs.model import ModelConfig
from nautile.evals.scoring.intervals import holm
from nautile.evals.scoring.over_seeds import lead, summary
from nautile.model.layers.attention import Attention, attention
from nautile.model.layers.common import Params, causal_convolution, parameters_of, rms_norm
from nautile.model.layers.mixing.chunked import Operands, softsign
from nautile.model.layers.mixing.operator import MixState, readout
from nautile.model.layers.sca import SCA, sca

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "layers.json"
PARAMETERS = 100_000  # of the layers
LENGTH, BATCH, STEPS, WARMUP = 64, 32, 900, 60
MICRO = 8  # rows whose gradient is computed at once: all 32 leave a core's cache and take 1.5 times as long
RATES, SEEDS = (3e-3, 8e-3), (1, 2, 3)
TEST_LENGTHS, TEST_TOKENS = (64, 128, 256, 512), 16_384  # 256 rows of 64 tokens, 32 of 512
HEADS, TAPS = 4, 4
PHASE_DEVIATION = 2.0  # of the initial θ of P: phases then spread over about a turn


@dataclass(frozen=True)
class Arm:
    """A stack: its layers by letter, spectral samples M, and the forms of θ and ω (`configs.model`)."""

    pattern: str
    samples: int = 2
    grid: str = "ordered"

    @property
    def name(self) -> str:
        spectral = bool(set(self.pattern) & set("SP"))
        free = f", θ and ω {self.grid}" if self.grid != "ordered" else ""
        return self.pattern + (f" M={self.samples}{free}" if spectral else "")

    def config(self, width: int) -> ModelConfig:
        """The sizes of the layers at a width D."""
        grid = "free" if set(self.pattern) & set("LP") else self.grid
        return ModelConfig.model_validate(
            {
                "vocabulary": VOCABULARY, "width": width, "blocks": 1, "pattern": "S" * len(self.pattern),
                "context": max(TEST_LENGTHS), "memory_heads": HEADS, "query_heads": HEADS, "attention_heads": HEADS,
                "kv_heads": HEADS // 2, "feed_forward": round(8 * width / 3), "compute_dtype": "float32",
                "spectral_samples": self.samples, "grid": grid,
                "integration": self.grid if self.grid != "ordered" else "normalised",
            }
        )  # fmt: skip

    def fitted(self) -> ModelConfig:
        """The config of the width whose layers are nearest to `PARAMETERS`."""
        widths = range(32, 161, 16)
        return min((self.config(width) for width in widths), key=lambda c: abs(_layer_parameters(self, c) - PARAMETERS))

    def state_bytes(self, length: int) -> int:
        """What a decoder holds for one sequence after `length` tokens, in float32, without the convolutions."""
        config = self.fitted()
        sums = 2 * HEADS * config.head_dim * config.spectral_samples + HEADS
        keys = 2 * length * config.kv_heads * config.attention_head_dim
        return 4 * sum(keys if letter in "AC" else sums for letter in self.pattern)


# In the order of priority: recall, then each other task by the layer alone and by attention, then what the contrasts of
# the harder recall need; then the samples and forms of the spectral grid, and all that is left.
PATTERNS = ("SS", "CC", "SSA", "SA", "LL", "PP", "AA", "S", "A", "LA", "SSSA", "CA", "PA")
_ORDERED = [
    *(("recall 8", Arm(pattern)) for pattern in PATTERNS[:6]),
    *((task, Arm(pattern)) for task in ("copying", "counting", "parity") for pattern in ("SS", "CC")),
    *(("recall 16", Arm(pattern)) for pattern in ("SSA", "CC", "SA", "SSSA")),
    *(("recall 8", Arm("SS", samples)) for samples in (1, 4, 8)),
    *(("recall 8", Arm("PP", samples)) for samples in (4, 8)),
    *(("recall 8", Arm("SS", 2, grid)) for grid in ("free", "fixed")),
    *((task, Arm(pattern)) for task in ("copying", "counting", "parity") for pattern in PATTERNS[:6]),
    *(("recall 4", Arm(pattern)) for pattern in ("S", "SS", "LL", "PP")),
    *((task, Arm(pattern)) for task in ("selective copying", "S5") for pattern in PATTERNS[:6]),
    *((task, Arm(pattern)) for task in ("recall 8", "recall 16") for pattern in PATTERNS),
    *((task, Arm(pattern)) for task in ("copying", "counting", "parity", "S5") for pattern in PATTERNS[6:]),
]
CELLS: list[tuple[str, Arm]] = list(dict.fromkeys(_ORDERED))
CONTRASTS = [
    ("recall 8", Arm("LL"), Arm("SS")), ("recall 16", Arm("CC"), Arm("SSA")), ("recall 16", Arm("SA"), Arm("SSA")),
    ("recall 16", Arm("SSA"), Arm("SSSA")), ("recall 8", Arm("SS"), Arm("PP")),
]  # fmt: skip


def initialise(arm: Arm, config: ModelConfig, key: Array) -> Params:
    """Initial parameters: the embedding, which is also the head, and a dict for each layer."""
    keys = jax.random.split(key, 2 * len(arm.pattern) + 1)
    depth = len(arm.pattern) + sum(letter in "AC" for letter in arm.pattern)
    layers = []
    for letter, own, other in zip(arm.pattern, keys[1::2], keys[2::2], strict=True):
        rngs = nnx.Rngs(params=own)
        layer = parameters_of(Attention(config, depth, rngs) if letter in "AC" else SCA(config, depth, rngs))
        if letter == "L":
            layer["theta"] = jnp.zeros_like(layer["theta"])
        elif letter == "P":
            layer["theta"] = PHASE_DEVIATION * jax.random.normal(other, layer["theta"].shape)
        elif letter == "C":
            layer["taps"] = jax.random.normal(other, (TAPS, config.width)) * (2 / TAPS) ** 0.5
        layers.append(layer)
    return {"embedding": 0.02 * jax.random.normal(keys[0], (VOCABULARY, config.width)), "layers": layers}


def logits(params: Params, arm: Arm, config: ModelConfig, tokens_BL: Array) -> Array:
    """Logits of the label at every position [B, L, V]."""
    segments_BL = jnp.ones_like(tokens_BL)
    positions_BL = jnp.broadcast_to(jnp.arange(tokens_BL.shape[1]), tokens_BL.shape)
    x_BLD = jax.nn.one_hot(tokens_BL, VOCABULARY) @ params["embedding"]
    for letter, layer in zip(arm.pattern, params["layers"], strict=True):
        if letter == "C":
            normed_BLD = rms_norm(x_BLD, None, config.norm_epsilon)
            x_BLD = x_BLD + jax.nn.silu(causal_convolution(normed_BLD, layer["taps"], segments_BL))
        if letter in "AC":
            x_BLD, _ = attention(layer, config, x_BLD, segments_BL, positions_BL)
        elif letter == "P":
            x_BLD, _ = sca(layer, config, x_BLD, segments_BL, positions_BL, operator=mix_by_projection)
        else:
            x_BLD, _ = sca(layer, config, x_BLD, segments_BL, positions_BL)
    return rms_norm(x_BLD, None, config.norm_epsilon) @ params["embedding"].T


def mix_by_projection(
    operands: Operands, times: Any = None, state: Any = None, **_: Any
) -> tuple[Array, Array, MixState]:
    """The mixing operator with one phase for each head and sample: φ_m = ⟨θ_m, softsign(η k)⟩; whole rows of text."""
    length = operands.keys.shape[1]
    distance_TS = jnp.arange(length)[:, None] - jnp.arange(length)
    decays_KTS = jnp.exp(-operands.decay_K[:, None, None] * jnp.maximum(distance_TS, 0))
    alpha_BKTS = jnp.where(distance_TS >= 0, decays_KTS, 0) * jnp.swapaxes(operands.gates, 1, 2)[:, :, None]
    projected_BLKM = jnp.einsum(
        "blkh,khm->blkm", softsign(operands.phase_scale_K[:, None] * operands.keys), operands.grid_KHM
    )
    sums = [
        jnp.einsum("bkts,bskh,bskm->btkhm", alpha_BKTS, operands.keys, wave(projected_BLKM))
        for wave in (jnp.cos, jnp.sin)
    ]
    states = MixState(sums[0], sums[1], jnp.swapaxes(alpha_BKTS.sum(axis=-1), 1, 2))
    re_BLKH, im_BLKH = readout(states, operands.weights_KHM, operands.q_re, operands.q_im)
    return re_BLKH, im_BLKH, jax.tree.map(lambda part: part[:, -1], states)


def run_cell(name: str, arm: Arm, steps: int = STEPS) -> list[dict[str, Any]]:
    """Train the arm on a task: the first seed at all rates, then the other seeds at its best; a row for each."""
    task, began = TASKS[name], time.process_time()
    first = train(task, arm, steps, [(rate, SEEDS[0]) for rate in RATES])
    best = max(first, key=lambda row: row["selection"])
    rows = first + train(task, arm, steps, [(best["rate"], seed) for seed in SEEDS[1:]])
    about = {"task": name, "arm": arm.name, "steps": steps, "state_bytes": arm.state_bytes(LENGTH)}
    seconds = round((time.process_time() - began) / len(rows), 1)
    return [about | row | {"processor_seconds": seconds} for row in rows]


@cache
def programs(arm: Arm) -> tuple[Any, Any, Any]:
    """Three compiled functions of the arm: initial parameters and optimizer state, an update, answers [N, B, L].

    Their arguments have a leading axis of N models, which are computed one after the other: what a model of this size
    works on then stays in the cache, and a step takes 1.5 times less processor time than with `vmap` over the models.
    """
    config = arm.fitted()
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.98))

    def start(seed: Array) -> tuple[Params, Any]:
        params = initialise(arm, config, jax.random.key(seed))
        return params, optimizer.init(params)

    def loss_of(params: Params, tokens_BL: Array, labels_BL: Array, asked: Array) -> Array:
        losses_BL = optax.softmax_cross_entropy_with_integer_labels(logits(params, arm, config, tokens_BL), labels_BL)
        return jnp.sum(jnp.where(labels_BL > 0, losses_BL, 0)) / asked

    def update(model: tuple[Params, Any, Array, Array, Array]) -> tuple[Params, Any, Array]:
        params, state, rate, tokens_BL, labels_BL = model
        asked = jnp.sum(labels_BL > 0)

        def add(sums: tuple[Array, Params], rows: tuple[Array, Array]) -> tuple[tuple[Array, Params], None]:
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss_of)(params, *rows, asked)), None

        parts = tuple(array.reshape(-1, MICRO, array.shape[-1]) for array in (tokens_BL, labels_BL))
        nothing = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        (loss, gradient), _ = jax.lax.scan(add, nothing, parts)
        changes, state = optimizer.update(gradient, state, params)
        changes = jax.tree.map(lambda change: -rate * change, changes)
        for letter, layer in zip(arm.pattern, changes["layers"], strict=True):
            if letter == "L":
                layer["theta"] = jnp.zeros_like(layer["theta"])
        return optax.apply_updates(params, changes), state, loss

    def answer(params: Params, tokens_BL: Array) -> Array:
        return jax.lax.map(lambda own: jnp.argmax(logits(own, arm, config, tokens_BL), -1), params)

    updates = jax.jit(lambda *models: jax.lax.map(update, models), donate_argnums=(0, 1))
    return jax.jit(jax.vmap(start)), updates, jax.jit(answer)


def train(task: Task, arm: Arm, steps: int, models: list[tuple[float, int]]) -> list[dict[str, Any]]:
    """Train a model for each rate and seed; its last loss and its accuracies."""
    start, update, answer = programs(arm)
    params, state = start(jnp.array([seed for _, seed in models]))
    rates = np.array([rate for rate, _ in models], np.float32)
    drawn = {seed: np.random.default_rng([seed, 0]) for _, seed in models}
    losses = rates
    for step in range(steps):
        by_seed = {seed: task.draw(rng, BATCH, LENGTH) for seed, rng in drawn.items()}
        tokens, labels = (np.stack(part) for part in zip(*(by_seed[seed] for _, seed in models), strict=True))
        warm = min(1.0, (step + 1) / WARMUP)
        factor = warm * (0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)
        params, state, losses = update(params, state, np.float32(factor) * rates, tokens, labels)
    selection = _accuracies(task, params, answer, LENGTH, 1)
    tests = {length: _accuracies(task, params, answer, length, 2) for length in TEST_LENGTHS}
    return [
        {
            "rate": rate, "seed": seed, "width": arm.fitted().width, "parameters": _layer_parameters(arm, arm.fitted()),
            "loss": round(float(losses[n]), 4), "selection": selection[n],
            "accuracy": {str(length): found[n] for length, found in tests.items()},
        }
        for n, (rate, seed) in enumerate(models)
    ]  # fmt: skip


def _accuracies(task: Task, params: Params, answer: Any, length: int, seed: int) -> list[float]:
    """The share of right labels of each model, on rows that no training draws."""
    rng, right, asked = np.random.default_rng([seed, 1]), 0, 0
    for _ in range(TEST_TOKENS // (BATCH * length)):
        tokens_BL, labels_BL = task.draw(rng, BATCH, length)
        asked_BL = labels_BL > 0
        right = right + np.sum((np.asarray(answer(params, tokens_BL)) == labels_BL) & asked_BL, axis=(1, 2))
        asked += asked_BL.sum()
    return [round(float(count / asked), 4) for count in np.asarray(right)]


def _layer_parameters(arm: Arm, config: ModelConfig) -> int:
    shapes = jax.eval_shape(lambda: initialise(arm, config, jax.random.key(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes["layers"]))


Rows = list[dict[str, Any]]


def chosen(rows: Iterable[Mapping[str, Any]], task: str, arm: str, length: int = LENGTH) -> dict[int, float]:
    """The accuracies of a cell by seed, at the rate that rule 1 chooses; empty if it has not run."""
    own = [row for row in rows if (row["task"], row["arm"]) == (task, arm)]
    if not own:
        return {}
    rate = max((row for row in own if row["seed"] == SEEDS[0]), key=lambda row: row["selection"])["rate"]
    return {row["seed"]: row["accuracy"][str(length)] for row in own if row["rate"] == rate}


def verdict(values: Mapping[int, float], chance: float) -> str:
    """What rule 2 says of a cell."""
    found = summary(values)
    low, high = (found.mean if end is None else end for end in (found.low, found.high))
    return "can" if low > 0.9 else "cannot" if high < chance + 0.05 else "in part"


def markdown(rows: Rows) -> str:
    """The tables: accuracy by arm and task at the trained length, longer rows, and the primary contrasts."""
    arms = list(dict.fromkeys(arm.name for _, arm in CELLS))
    ran = [task for task in TASKS if any(row["task"] == task for row in rows)]
    facts = {row["arm"]: row for row in rows}
    lines = [
        f"| arm | parameters | bytes of state at {LENGTH} | " + " | ".join(ran) + " |",
        "|" + " --- |" * (3 + len(ran)),
        "| chance | | | " + " | ".join(f"{chance_of(TASKS[task], LENGTH):.3f}" for task in ran) + " |",
    ]
    for arm in arms:
        if arm in facts:
            cells = [_cell(chosen(rows, task, arm), chance_of(TASKS[task], LENGTH)) for task in ran]
            lines.append(
                f"| {arm} | {facts[arm]['parameters']:,} | {facts[arm]['state_bytes']:,} | {' | '.join(cells)} |"
            )
    lines += [
        "",
        "| task | arm | " + " | ".join(map(str, TEST_LENGTHS)) + " |",
        "|" + " --- |" * (2 + len(TEST_LENGTHS)),
    ]
    for task in ran:
        for arm in arms:
            if chosen(rows, task, arm):
                means = [summary(chosen(rows, task, arm, length)).mean for length in TEST_LENGTHS]
                if means[0] > chance_of(TASKS[task], LENGTH) + 0.2:
                    lines.append(f"| {task} | {arm} | " + " | ".join(f"{mean:.3f}" for mean in means) + " |")
    lines += ["", "| contrast | lead | 95 % over seeds | p (Holm) | detectable |", "|" + " --- |" * 5]
    tests = {}
    for task, first, other in CONTRASTS:
        pair = chosen(rows, task, first.name), chosen(rows, task, other.name)
        if all(pair):
            tests[f"{task}: {other.name} over {first.name}"] = lead(
                *pair, tests=len(CONTRASTS), problems=TEST_TOKENS // LENGTH
            )
    corrected = holm({name: test.p for name, test in tests.items() if test.p is not None})
    for name, test in tests.items():
        spread = "–" if test.low is None else f"[{test.low:+.3f}, {test.high:+.3f}]"
        power = "–" if test.detectable is None else f"{test.detectable:.3f}"
        lines.append(f"| {name} | {test.lead:+.3f} | {spread} | {corrected[name]:.3g} | {power} |")
    return "\n".join(lines) + "\n"


def _cell(values: Mapping[int, float], chance: float) -> str:
    if not values:
        return "–"
    found = summary(values)
    spread = "" if found.deviation is None else f" ± {found.deviation:.3f}"
    return f"{found.mean:.3f}{spread} ({verdict(values, chance)})"


def draw(rows: Rows, path: Path) -> None:
    """The field's figure: accuracy of recall against bytes of state, and accuracy against length."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams.update({"svg.hashsalt": "nautile", "svg.fonttype": "none", "font.size": 9})
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for task, marker in (("recall 8", "o"), ("recall 16", "s")):
        for row in {row["arm"]: row for row in rows if row["task"] == task}.values():
            mean = summary(chosen(rows, task, row["arm"])).mean
            left.plot(row["state_bytes"], mean, marker, color="tab:blue" if marker == "o" else "tab:orange")
            left.annotate(row["arm"], (row["state_bytes"], mean), fontsize=6, xytext=(3, 3), textcoords="offset points")
        left.plot([], [], marker, color="tab:blue" if marker == "o" else "tab:orange", label=task)
    left.set(xscale="log", xlabel=f"bytes of state after {LENGTH} tokens", ylabel="accuracy", ylim=(0, 1.03))
    left.legend()
    for arm in ("SS M=2", "LL", "SA M=2", "SSA M=2", "CC", "PP M=2"):
        points = [chosen(rows, "recall 8", arm, length) for length in TEST_LENGTHS]
        if all(points):
            right.plot(TEST_LENGTHS, [summary(values).mean for values in points], marker=".", label=arm)
    right.set(xscale="log", xlabel=f"tokens of a row (trained: {LENGTH}), recall of 8", ylim=(0, 1.03))
    right.set_xticks(TEST_LENGTHS, [str(length) for length in TEST_LENGTHS])
    right.minorticks_off()
    right.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    arguments = argument_parser(__doc__, minutes=0.0, report=False, file=RESULTS).parse_args()
    rows: Rows = read_json(arguments.file) or []
    until = time.monotonic() + 60 * arguments.minutes
    for task, arm in CELLS:
        if time.monotonic() > until:
            break
        if not any((row["task"], row["arm"]) == (task, arm.name) for row in rows):
            rows += run_cell(task, arm)
            write_json(arguments.file, rows)
            print(task, arm.name, chosen(rows, task, arm.name), f"{rows[-1]['processor_seconds']} s each", flush=True)
    if rows:
        print(markdown(rows))
        draw(rows, arguments.file.with_suffix(".svg"))


if __name__ == "__main__":
    main()
