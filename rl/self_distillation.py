"""Stage 3, scored self-distillation (paper §4.4): sample, score, keep A > 0, cross-entropy scaled by the advantage.

Advantages are not normalised, so the few right traces of a hard problem weigh most: a solve rate p gives them 1 - p.
That is the built-in curriculum, and the traces record it.
"""

import itertools
import json
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh

from common.errors import ConfigError, Retryable
from common.events import Emit, flush, silent
from common.files import atomic_path
from configs.base import OptimizerConfig
from configs.model import ModelConfig
from configs.training import SelfDistillConfig
from data.tokenizer import tokenizer_for
from model.layers.common import Params
from model.loss import token_logprobs
from model.nautile import forward, shapes
from model.processes import on_first
from model.sharding import (
    OnMesh,
    make_mesh,
    optimizer_shardings,
    parameter_shardings,
    put_shared_rows,
    replicated,
    whole_on_hosts,
)
from model.training import optimizer
from model.training.gathered_checkpoint import open_checkpoints
from model.training.preemption import joint_termination
from rl.finite_updates import SkippedUpdates
from rl.rewards import advantages, verifiable
from rl.rollouts import Group, RolloutEngine, keep_steps
from rl.stage_inputs import StageInputs, on_device
from rl.training_rows import RowBatch, TrainingRow, batches

logger = logging.getLogger(__name__)
SAMPLES = "samples-{}.jsonl"  # the sampled rows of a round, by its number


@dataclass(frozen=True)
class SelfDistillation:
    """Inputs of one self-distillation run.

    `identity`: checkpoints of another identity are not resumed. `work`: folder of checkpoints and samples. `traces`:
    the JSON-lines file of every trace that was trained on. `shared_disk`: all of several processes see `work`.
    """

    inputs: StageInputs
    config: SelfDistillConfig
    identity: dict[str, Any]
    work: Path
    traces: Path
    seed: int
    emit: Emit = silent
    shared_disk: bool = True


def self_distil(run: SelfDistillation, params: Params) -> tuple[Params, dict[str, Any]]:
    """`config.rounds` times: sample every problem, keep the traces with A > 0, train on them.

    Returns the new parameters and facts. Resumes after the last sampling draw and the last finished round.

    All processes of a pod (`jax.distributed`) call this with the same arguments. Each samples its share; the first one
    scores, reports and writes, and gives the traces to all, which train together.
    """
    config, work, is_first = run.config, run.work, jax.process_index() == 0
    run = run if is_first else replace(run, emit=silent)
    mesh = make_mesh(config.fsdp, part="self_distill")
    if config.batch_rows % mesh.size:
        raise ConfigError(f"self_distill.batch_rows {config.batch_rows} does not divide among the {mesh.size} devices")
    params = jax.device_put(on_device(params), parameter_shardings(shapes(run.inputs.model), mesh))
    checkpoints = open_checkpoints(work / "checkpoints", 2, run.identity, mesh, shared_disk=run.shared_disk)
    done = checkpoints.latest()
    facts: dict[str, Any] = {"rounds": []}
    if done is not None:
        params, facts = checkpoints.restore(done, params)
    pauses = itertools.count()
    with joint_termination() as stop_requested:

        def check_stop() -> None:
            if stop_requested(next(pauses)):
                raise Retryable("self-distillation was asked to stop; its samples are kept, and a rerun resumes there")

        for number in range(done or 0, config.rounds):
            _sample(run, params, number, mesh, check_stop)
            sampled = _read_rows(work / SAMPLES.format(number)) if is_first else []
            kept = on_first(partial(_kept, sampled))
            params, losses, skipped = _train(run, params, kept, number, mesh, check_stop)
            facts["rounds"].append(on_first(partial(_facts, sampled, kept, losses, skipped)))
            flush(run.emit)
            checkpoints.save(number + 1, params, facts)
            checkpoints.wait()
    checkpoints.close()
    whole = whole_on_hosts(params, mesh)
    if not is_first:
        return whole, facts
    with atomic_path(run.traces) as temporary, temporary.open("w", encoding="utf-8") as file:
        for number in range(config.rounds):
            for row in _kept(_read_rows(work / SAMPLES.format(number))):
                file.write(json.dumps({"round": number, **row}, ensure_ascii=False) + "\n")
    return whole, facts


def _sample(run: SelfDistillation, params: Params, number: int, mesh: Mesh, check_stop: Callable[[], None]) -> None:
    """Sample groups for every problem, a batch a draw; each draw is appended to the round's log with its rewards."""
    inputs, rollout, log = run.inputs, run.config.rollout, run.work / SAMPLES.format(number)
    engine = RolloutEngine(inputs.model, tokenizer_for(inputs.tokenizer), rollout, run.seed, mesh)
    engine.check(inputs.problems)
    size = rollout.prompts
    draws = -(-len(inputs.problems) // size)

    def first_draw() -> int:
        keep_steps(log, draws)
        rows = _read_rows(log)
        first = rows[-1]["step"] if rows else 0
        keep_steps(log, first)  # the last draw may be incomplete: it is drawn again, to the same samples
        return first

    for draw in range(on_first(first_draw), draws):
        problems = list(enumerate(inputs.problems))[draw * size : (draw + 1) * size]
        step = number * draws + draw  # numbers the draw within the whole run
        check_stop()
        groups = engine.sample(params, problems, step)
        if jax.process_index():
            continue
        rows = [{"step": draw, **row} for group in groups for row in _scored(group)]
        with log.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        solve_rate = float(np.mean([row["reward"] for row in rows]))
        # Steps of metrics count from 1, as in every stage.
        run.emit("metric", name="solve_rate", step=step + 1, value=solve_rate)
        run.emit("metric", name="rollout_tokens_per_second", step=step + 1, value=engine.tokens / engine.seconds)
        run.emit("progress", done=draw + 1, total=draws, unit="draws", note=f"solved {solve_rate:.2f}")


def _read_rows(log: Path) -> list[dict[str, Any]]:
    if not log.exists():
        return []
    with log.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _kept(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["advantage"] > 0]


def _scored(group: Group) -> list[dict[str, Any]]:
    """The group's rows with verifiable rewards, advantages and its solve rate."""
    for rollout in group.rollouts:
        rollout.reward = verifiable(group.problem, rollout.reply)
    for rollout, advantage in zip(group.rollouts, advantages([r.reward for r in group.rollouts]), strict=True):
        rollout.advantage = advantage
    rate = sum(rollout.reward or 0.0 for rollout in group.rollouts) / len(group.rollouts)
    return [{**group.row(i), "position": group.position, "solve_rate": rate} for i in range(len(group.rollouts))]


def _train(
    run: SelfDistillation,
    params: Params,
    kept: list[dict[str, Any]],
    number: int,
    mesh: Mesh,
    check_stop: Callable[[], None],
) -> tuple[Params, list[float], int]:
    """Epochs over the kept traces in a seeded order. A round without any trace leaves the parameters as they are.

    Returns the losses of the updates that were applied, and the number of those that were not finite.
    """
    config, model, emit = run.config, run.inputs.model, run.emit
    if not kept:
        logger.warning("round %d: no completion has a positive advantage, so nothing is trained on", number)
        return params, [], 0
    rows = [
        TrainingRow(r["prompt_ids"], np.array(r["ids"]), np.array(r["logprobs"]), r["advantage"], 1.0, r["forced"])
        for r in kept
    ]
    steps = -(-len(rows) // config.batch_rows) * config.epochs
    begin, step = programs(model, config.optimizer, mesh)
    state = begin(params)
    rate = jax.jit(optimizer.schedule(config.optimizer, steps))
    length = config.rollout.prompt_length + config.rollout.max_tokens
    losses: list[float] = []
    skipped = SkippedUpdates(config.skip_limit, "self_distill")
    done = 0
    for epoch in range(config.epochs):
        random.Random(f"{run.seed}:{number}:{epoch}").shuffle(rows)
        for batch in batches(rows, config.batch_rows, length):
            check_stop()
            learning_rate = rate(optimizer.applied(state))
            params, state, loss, measured = step(params, state, put_shared_rows(batch, mesh), learning_rate)
            loss, measured = jax.device_get((loss, measured))
            done += 1
            at = number * steps + done
            if skipped.record(at, measured, params):
                losses.append(float(loss))
                emit("metric", name="loss", step=at, value=losses[-1])
            emit("metric", name="skipped_updates", step=at, value=skipped.total)
            emit("progress", done=done, total=steps, unit="steps", note=f"loss {loss:.3f}")
    return params, losses, skipped.total


@cache
def programs(model: ModelConfig, config: OptimizerConfig, mesh: Mesh) -> tuple[Callable[[Params], Any], OnMesh]:
    """What makes the optimizer's fresh state, and the step of `update`: (params, state, batch, learning rate).

    The same for all rounds, however many updates each has: compiling the step takes longer than a round's updates.
    """
    tx_of = partial(optimizer.build_with_rate, config)
    tx = tx_of(lambda count: jnp.zeros((), jnp.float32))  # the state does not depend on the rate
    kinds = shapes(model)
    shardings = parameter_shardings(kinds, mesh)
    moments = optimizer_shardings(tx, kinds, shardings, mesh)
    outs = (shardings, moments, replicated(mesh), replicated(mesh))
    step = jax.jit(partial(update, model, tx_of), donate_argnums=1, out_shardings=outs)
    return jax.jit(tx.init, out_shardings=moments), OnMesh(mesh, step)


def update(
    model: ModelConfig,
    tx_of: Callable[[Callable[[Any], Array]], optax.GradientTransformation],
    params: Params,
    state: Any,
    batch: RowBatch,
    rate: Array,
) -> tuple[Params, Any, Array, dict[str, Array]]:
    """One step on the mean over the batch's tokens of A_i times their cross-entropy, i being the token's trace.

    `tx_of` makes the optimizer of a learning rate, which is here always `rate`. Returns parameters, state, the loss,
    and what `finite_update` measured. The cross-entropy is at temperature 1, whatever the traces were sampled at: this
    is supervised learning (paper §4.4), so the model is fitted as it will be used, and a trace drawn at a lower
    temperature counts as text of the model at 1, which is what sharpens it.

    Every token counts alike, as in the paper's update rule of stage 1. With the mean over each trace's own tokens the
    first token of a short trace would weigh most, and a model that may answer at once learns not to think
    (docs/log.md).
    """

    def loss(params: Params) -> Array:
        hidden_BLD = forward(params, model, batch["tokens"], batch["segments"], batch["positions"])
        logprobs_BL, _ = token_logprobs(params, model, hidden_BLD, batch["targets"])
        scaled_B = batch["advantage"] * jnp.sum(-logprobs_BL * batch["weights"], axis=1)
        return jnp.sum(scaled_B) / jnp.maximum(jnp.sum(batch["weights"]), 1)

    value, gradients = jax.value_and_grad(loss)(params)
    params, state, measured = optimizer.finite_update(tx_of(lambda _: rate), params, state, gradients)
    return params, state, value, measured


def _facts(
    sampled: list[dict[str, Any]], kept: list[dict[str, Any]], losses: list[float], skipped: int
) -> dict[str, Any]:
    rates = {row["position"]: row["solve_rate"] for row in sampled}
    facts: dict[str, Any] = {
        "problems": len(rates),
        "completions": len(sampled),
        "solve_rate": float(np.mean(list(rates.values()))),
        "never_solved": sum(rate == 0 for rate in rates.values()),
        "always_solved": sum(rate == 1 for rate in rates.values()),
        "traces": len(kept),
        "skipped_updates": skipped,
    }
    if losses:
        facts |= {"first_loss": losses[0], "last_loss": losses[-1]}
    facts["curriculum"] = curriculum(sampled)
    return facts


def curriculum(sampled: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """By solve rate: problems, traces kept, the mean weight of a trace (its advantage) and the total of all of them."""
    levels = []
    for rate in sorted({row["solve_rate"] for row in sampled}):
        rows = [row for row in sampled if row["solve_rate"] == rate]
        weights = [row["advantage"] for row in rows if row["advantage"] > 0]
        levels.append(
            {
                "solve_rate": rate,
                "problems": len({row["position"] for row in rows}),
                "traces": len(weights),
                "weight": float(np.mean(weights)) if weights else 0.0,
                "total": float(np.sum(weights)),
            }
        )
    return levels
