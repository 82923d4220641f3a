"""Fine-tuning of all weights or LoRA adapters, on replies (cross-entropy) or distributions over options (forward KL).

Uses one device. All batches of a run have one shape. The order of the rows depends only on seed and epoch, so a run
that was killed continues from its last saved state with the same result.

A LoRA adapter is two narrow trained matrices for each frozen matrix of the blocks (Hu et al., arXiv:2106.09685): the
weight is W + alpha/rank · A·B. B starts at zero, so the tuned model starts equal to the frozen one.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array

from nautile.common.errors import ConfigError
from nautile.common.events import Emit, flush, silent
from nautile.common.files import read_json, write_json
from nautile.configs.base import OptimizerConfig
from nautile.configs.model import ModelConfig
from nautile.data.shuffle import permute
from nautile.data.tokens.loader import target_weights
from nautile.model.layers.common import Params
from nautile.model.loss import token_logprobs
from nautile.model.nautile import forward
from nautile.model.sharding import is_stacked
from nautile.model.training import optimizer
from nautile.model.training.checkpoint import TrainCheckpoints
from nautile.model.training.optimizer import matrix_axes
from nautile.uses.labelled.config import TuneConfig

Batch = dict[str, np.ndarray]
SAVE_EVERY = 100  # steps between states to resume from
LORA_ALPHA = 16
COLUMNS = 32  # lengths are multiples of the mixing operator's chunk, so that no remainder is compiled separately


class TuningRow(NamedTuple):
    """A prompt and its reply, or a question's options and the share of people who chose each.

    Only continuations are trained on: the prompt has weight 0, as with `train_on = "replies"` in pretraining.
    """

    prompt: Sequence[int]
    continuations: Sequence[Sequence[int]]
    shares: Sequence[float] = (1.0,)
    weight: float = 1.0  # of its tokens in the loss


def fine_tune(
    params: Params,
    model: ModelConfig,
    rows: Sequence[TuningRow],
    config: TuneConfig,
    seed: int,
    folder: Path,
    identity: dict[str, Any],
    emit: Emit = silent,
) -> tuple[Params, list[float]]:
    """Fine-tune, and return the parameters (adapters merged) and each epoch's mean loss in nats per token or question.

    A run of the same `identity` resumes from `folder`. Raises `ConfigError` for a too long row and for an update that
    is not finite.
    """
    check_lengths(rows, model)
    steps = -(-len(rows) // config.batch_rows) * config.epochs
    # LoRA trains adapters beside frozen parameters; otherwise all parameters are trained and none frozen.
    scale = LORA_ALPHA / config.rank if config.method == "lora" else None
    tx = optimizer.build(config.optimizer, steps)
    trained = new_adapters(params, config.rank, seed) if scale is not None else jax.tree.map(jnp.asarray, params)
    frozen = params if scale is not None else {}
    state = (trained, tx.init(trained))
    checkpoints = TrainCheckpoints(folder, 1, {**identity, "seed": seed, "steps": steps, "rows": len(rows)})
    with closing(checkpoints):  # waits for the last save, also if the run fails
        losses: list[list[float]] = [[] for _ in range(config.epochs)]
        first = checkpoints.latest() or 0
        if first:
            state, extra = checkpoints.restore(first, state)
            losses = extra["losses"]
        program = _program(model, config.optimizer, steps, config.loss, scale)
        shape = _batch_shape(rows, model, config.batch_rows)
        per_epoch = steps // config.epochs
        for step in range(first, steps):
            epoch, batch = divmod(step, per_epoch)
            # The permutation of an epoch is computed at each place: there is no order to save or to restore.
            index = np.arange(batch * config.batch_rows, min(len(rows), (batch + 1) * config.batch_rows))
            batch_members = [rows[i] for i in permute(index, len(rows), f"tune/{seed}/{epoch}")]
            *state, loss, finite = program(frozen, *state, batch_of(batch_members, shape))
            state = tuple(state)
            if not finite:
                raise ConfigError(
                    f"tune: the update of step {step + 1} is not finite; lower tune.optimizer.learning_rate"
                )
            losses[epoch].append(float(loss))
            emit("metric", name="loss", step=step + 1, value=losses[epoch][-1])
            emit("progress", done=step + 1, total=steps, unit="steps", note=f"loss {losses[epoch][-1]:.3f}")
            if (step + 1) % SAVE_EVERY == 0:
                flush(emit)  # a crash must not keep the checkpoint and lose the events before it
                checkpoints.save(step + 1, state, {"losses": losses})
    tuned = state[0] if scale is None else merge_adapters(params, state[0], scale)
    return tuned, [float(np.mean(values)) for values in losses]


def mean_loss(
    params: Params, model: ModelConfig, rows: Sequence[TuningRow], loss: Literal["reply", "options"], batch_rows: int
) -> float:
    """Evaluate the loss of `rows`: nats per token of the replies, or the mean KL of the questions."""
    check_lengths(rows, model)
    shape = _batch_shape(rows, model, batch_rows)
    total, weight = 0.0, 0.0
    for start in range(0, len(rows), batch_rows):
        sums = np.asarray(_loss_sums(params, model, batch_of(rows[start : start + batch_rows], shape), loss))
        total, weight = total + float(sums[0]), weight + float(sums[1])
    return total / weight


def check_lengths(rows: Sequence[TuningRow], model: ModelConfig) -> None:
    """Raise `ConfigError` for a row without prompt or reply, or one over the model's context with its longest reply."""
    if not all(row.prompt and row.continuations and all(row.continuations) for row in rows):
        raise ConfigError("tune: a row has no prompt or no reply")
    lengths = [len(row.prompt) + max(map(len, row.continuations)) for row in rows]
    if over := [length for length in lengths if length > model.context]:
        raise ConfigError(
            f"tune: {len(over)} of {len(rows)} rows are over the model's context of {model.context} tokens, the "
            f"longest with {max(over)}; lower tune.longest, shorten tune.instructions, or leave such rows out"
        )


def batch_of(rows: Sequence[TuningRow], shape: tuple[int, int, int]) -> Batch:
    """Batch arrays for `shape` = (questions, options, length); each option of a question is a row of tokens.

    tokens, targets, segments, positions (int32 [questions·options, length]), weights (float32, the same shape: the
    row's weight where the target belongs to the continuation), shares (float32 [questions, options]), real (bool, the
    same shape).
    """
    questions, options, length = shape
    batch: Batch = {
        name: np.zeros((questions * options, length), np.int32) for name in ("tokens", "targets", "segments")
    }
    batch["positions"] = np.tile(np.arange(length, dtype=np.int32), (questions * options, 1))
    batch["weights"] = np.zeros((questions * options, length), np.float32)
    batch["shares"] = np.zeros((questions, options), np.float32)
    batch["real"] = np.zeros((questions, options), bool)
    columns = np.arange(length)  # each row is one document, so a column is a position
    for question, row in enumerate(rows):
        for option, (continuation, share) in enumerate(zip(row.continuations, row.shares, strict=True)):
            place = question * options + option
            ids = [*row.prompt, *continuation]
            batch["tokens"][place, : len(ids)] = ids
            batch["targets"][place, : len(ids) - 1] = ids[1:]
            batch["segments"][place, : len(ids)] = 1
            batch["weights"][place] = row.weight * target_weights(columns < len(ids) - 1, columns, len(row.prompt))
            batch["shares"][question, option], batch["real"][question, option] = share, True
    return batch


def _batch_shape(rows: Sequence[TuningRow], model: ModelConfig, batch_rows: int) -> tuple[int, int, int]:
    """The smallest shape that fits any `batch_rows` of the rows; its length is a multiple of `COLUMNS`."""
    longest = max(len(row.prompt) + max(map(len, row.continuations)) for row in rows)
    options = max(len(row.continuations) for row in rows)
    return batch_rows, options, min(model.context, -(-longest // COLUMNS) * COLUMNS)


def _sums(params: Params, model: ModelConfig, batch: dict[str, Array], loss: str) -> Array:
    """[Σ loss, number of tokens or questions], float32. Options: Σ KL(shares ‖ softmax of the log-likelihoods)."""
    hidden_RLD = forward(params, model, batch["tokens"], batch["segments"], batch["positions"])
    logprobs_RL, _ = token_logprobs(params, model, hidden_RLD, batch["targets"])
    weights_RL = batch["weights"]
    if loss == "reply":
        return jnp.stack([-jnp.sum(logprobs_RL * weights_RL), jnp.sum(weights_RL)])
    # The model's distribution over the options, from their log-likelihoods; padding options are excluded.
    real_QO, shares_QO = batch["real"], batch["shares"]
    sums_QO = jnp.sum(logprobs_RL * weights_RL, axis=1).reshape(real_QO.shape)
    # Not -inf: a share of zero times an infinity would be NaN, and in the gradient as well.
    model_QO = jax.nn.log_softmax(jnp.where(real_QO, sums_QO, -1e30), axis=1)
    # s log s is 0 at s = 0; the bound keeps the branch that is not used finite.
    human_QO = jnp.log(jnp.maximum(shares_QO, 1e-12))
    divergence = jnp.sum(jnp.where(shares_QO > 0, shares_QO * (human_QO - model_QO), 0.0))
    return jnp.stack([divergence, jnp.sum(real_QO[:, 0]).astype(jnp.float32)])


_loss_sums = jax.jit(_sums, static_argnames=("model", "loss"))


@lru_cache(maxsize=8)
def _program(
    model: ModelConfig, config: OptimizerConfig, steps: int, loss: str, scale: float | None
) -> Callable[..., Any]:
    """The jitted step (frozen, trained, optimizer state, batch) -> (trained, state, loss, whether it was applied)."""
    tx = optimizer.build(config, steps)

    def step(frozen: Params, trained: Params, state: Any, batch: dict[str, Array]) -> tuple[Params, Any, Array, Array]:
        def mean(trained: Params) -> Array:
            params = trained if scale is None else merge_adapters(frozen, trained, scale)
            total, weight = _sums(params, model, batch, loss)
            return total / jnp.maximum(weight, 1.0)

        value, gradient = jax.value_and_grad(mean)(trained)
        trained, state, measured = optimizer.finite_update(tx, trained, state, gradient, value)
        return trained, state, value, measured["applied"]

    return jax.jit(step)


def new_adapters(params: Params, rank: int, seed: int) -> Params:
    """{"blocks": {layer: {matrix: {"a": [..., in, rank], "b": [..., rank, out]}}}} for every matrix of the blocks."""
    key = jax.random.key(seed)
    adapters = {}
    for number, (path, leaf) in enumerate(sorted(flatten_dict(params).items())):
        if not is_stacked(path) or matrix_axes(path, leaf) is None:
            continue
        *stacking, inputs, outputs = leaf.shape
        narrow = min(rank, inputs, outputs)
        normal = jax.random.normal(jax.random.fold_in(key, number), (*stacking, inputs, narrow))
        adapters[(*path, "a")] = normal * inputs**-0.5
        adapters[(*path, "b")] = jnp.zeros((*stacking, narrow, outputs))
    return unflatten_dict(adapters)


def merge_adapters(params: Params, adapters: Params, scale: float) -> Params:
    """Merge adapters into the parameters: W + scale · A·B, with `scale` = alpha / rank."""
    flat, parts = flatten_dict(params), flatten_dict(adapters)
    for *path, name in parts:
        if name == "a":
            place = tuple(path)
            flat[place] = flat[place] + scale * (parts[(*place, "a")] @ parts[(*place, "b")])
    return unflatten_dict(flat)


def searched_config(
    config: TuneConfig, work: Path, shots: int, loss_at: Callable[[TuneConfig, str], float]
) -> TuneConfig:
    """`config` with the one of its `learning_rates` that has the lowest validation loss; without any as it is.

    `loss_at(config, rate)` tunes with a rate. Losses are stored in `work`, so a resumed run measures none twice.
    """
    path = work / f"rates-{shots}.json"
    losses: dict[str, float] = read_json(path) or {}
    by_rate = {
        rate: config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"learning_rate": rate})})
        for rate in config.learning_rates
    }
    for rate, candidate in by_rate.items():
        name = f"{rate:g}"
        if name not in losses:
            losses[name] = loss_at(candidate, name)
            write_json(path, losses)
    return by_rate[min(by_rate, key=lambda rate: losses[f"{rate:g}"])] if by_rate else config


def kept_losses(config: TuneConfig, work: Path) -> dict[str, dict[str, float]]:
    """The stored validation losses: number of shots -> learning rate -> loss."""
    losses = {str(shots): read_json(work / f"rates-{shots}.json") for shots in config.shots}
    return {shots: by_rate for shots, by_rate in losses.items() if by_rate}
