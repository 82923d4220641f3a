"""Stage 3, scored self-distillation (paper §4.4): sample, score, keep A > 0, cross-entropy scaled by the advantage.

Advantages are not normalised, so the few right traces of a hard problem weigh most: a solve rate p gives them 1 - p.
That is the built-in curriculum, and the traces record it.
"""

import json
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh

from common.errors import ConfigError
from common.events import Emit, flush, silent
from common.files import atomic_path
from configs.model import ModelConfig, TokenizerConfig
from configs.training import SelfDistillConfig
from data.sources.reasoning_gym import Problem
from data.tokenizer import tokenizer_for
from model.layers.common import Params
from model.loss import token_logprobs
from model.nautile import forward, shapes
from model.sharding import OnMesh, make_mesh, optimizer_shardings, parameter_shardings, put_rows, replicated
from model.training import optimizer
from model.training.checkpoint import TrainCheckpoints
from rl.advantages import advantages
from rl.reinforce import keep_steps
from rl.rewards import verifiable
from rl.rollouts import Group, RolloutEngine
from rl.training_rows import RowBatch, TrainingRow, batches

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SelfDistillation:
    """Inputs of one self-distillation; the fields are those of `rl.reinforce.Reinforcement`."""

    model: ModelConfig
    tokenizer: TokenizerConfig
    config: SelfDistillConfig
    problems: Sequence[Problem]
    identity: dict[str, Any]
    work: Path
    traces: Path
    seed: int
    emit: Emit = silent


def self_distil(student: SelfDistillation, params: Params) -> tuple[Params, dict[str, Any]]:
    """`config.rounds` times: sample every problem, keep the traces with A > 0 in `traces`, train on them.

    Returns the new parameters and facts. Resumes after the last draw of sampling and the last finished round.
    """
    mesh = make_mesh(student.config.fsdp, part="self_distill")
    if student.config.batch_rows % mesh.size:
        raise ConfigError(
            f"self_distill.batch_rows {student.config.batch_rows} does not divide among the {mesh.size} devices"
        )
    work = student.work
    params = jax.device_put(params, parameter_shardings(shapes(student.model), mesh))
    checkpoints = TrainCheckpoints(work / "checkpoints", keep=2, identity=student.identity)
    state: Params = params
    done = checkpoints.latest()
    facts: dict[str, Any] = {"rounds": []}
    if done is not None:
        state, facts = checkpoints.restore(done, params)
    for number in range(done or 0, student.config.rounds):
        sampled = _sample(student, state, number, mesh)
        kept = [row for row in sampled if row["advantage"] is not None and row["advantage"] > 0]
        state, losses = _train(student, state, kept, number, mesh)
        facts["rounds"].append(_facts(sampled, kept, losses))
        flush(student.emit)
        checkpoints.save(number + 1, state, facts)
        checkpoints.wait()
    checkpoints.close()
    _publish(student.config.rounds, work, student.traces)
    return state, facts


def _sample(student: SelfDistillation, params: Params, number: int, mesh: Mesh) -> list[dict[str, Any]]:
    """Groups for every problem, a batch at a time, each appended to the round's log with rewards and advantages."""
    log, problems, emit = student.work / f"samples-{number}.jsonl", student.problems, student.emit
    engine = RolloutEngine(student.model, tokenizer_for(student.tokenizer), student.config.rollout, student.seed, mesh)
    engine.check(problems)
    size = student.config.rollout.prompts
    draws = -(-len(problems) // size)
    keep_steps(log, draws)
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    begun = json.loads(lines[-1])["step"] if lines else 0
    keep_steps(log, begun)  # the last draw may be torn: it is drawn again, to the same samples
    for draw in range(begun, draws):
        asked = list(enumerate(problems))[draw * size : (draw + 1) * size]
        groups = engine.sample(params, asked, number * draws + draw)
        rows = [{"step": draw, **row} for group in groups for row in _scored(group)]
        with log.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        rate = np.mean([row["reward"] for row in rows])
        emit("metric", name="solve_rate", step=number * draws + draw, value=float(rate))
        emit(
            "metric", name="rollout_tokens_per_second", step=number * draws + draw, value=engine.tokens / engine.seconds
        )
        emit("progress", done=draw + 1, total=draws, unit="draws", note=f"solved {rate:.2f}")
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


def _scored(group: Group) -> list[dict[str, Any]]:
    for rollout in group.rollouts:
        rollout.reward = verifiable(group.problem, rollout.reply)
    for rollout, advantage in zip(group.rollouts, advantages([r.reward for r in group.rollouts]), strict=True):
        rollout.advantage = advantage
    rate = sum(rollout.reward or 0.0 for rollout in group.rollouts) / len(group.rollouts)
    return [{**group.row(i), "position": group.position, "solve_rate": rate} for i in range(len(group.rollouts))]


def _train(
    student: SelfDistillation, params: Params, kept: list[dict[str, Any]], number: int, mesh: Mesh
) -> tuple[Params, list[float]]:
    """Epochs over the kept traces in a seeded order. A round without any trace leaves the parameters as they are."""
    config, rollout, emit = student.config, student.config.rollout, student.emit
    if not kept:
        logger.warning("round %d: no completion has a positive advantage; nothing is learnt from it", number)
        return params, []
    rows = [
        TrainingRow(r["prompt_ids"], np.array(r["ids"]), np.array(r["logprobs"]), r["advantage"], 1.0, r["forced"])
        for r in kept
    ]
    per_epoch = -(-len(rows) // config.batch_rows)
    tx = optimizer.build(config.optimizer, per_epoch * config.epochs)
    kinds = shapes(student.model)
    places = parameter_shardings(kinds, mesh)
    moments = optimizer_shardings(tx, kinds, places, mesh)
    state = jax.jit(tx.init, out_shardings=moments)(params)
    outs = (places, moments, replicated(mesh))
    step = OnMesh(mesh, jax.jit(partial(update, student.model, tx), donate_argnums=1, out_shardings=outs))
    losses: list[float] = []
    for epoch in range(config.epochs):
        random.Random(f"{student.seed}:{number}:{epoch}").shuffle(rows)
        for batch in batches(rows, config.batch_rows, rollout.prompt_length + rollout.max_tokens):
            params, state, loss = step(params, state, put_rows(batch, mesh))
            losses.append(float(loss))
            place = number * per_epoch * config.epochs + len(losses)
            emit("metric", name="loss", step=place, value=losses[-1])
            emit("progress", done=len(losses), total=per_epoch * config.epochs, unit="steps", note=f"loss {loss:.3f}")
    return params, losses


def update(
    model: ModelConfig, tx: optax.GradientTransformation, params: Params, state: Any, batch: RowBatch
) -> tuple[Params, Any, Array]:
    """One step on the mean over the batch's tokens of A_i times their cross-entropy, i being the token's trace.

    Every token counts alike, as in the paper's update rule of stage 1. With the mean over each trace's own tokens the
    first token of a short trace weighs most, and a model that may answer at once learns not to think (docs/log.md).
    """

    def loss(params: Params) -> Array:
        hidden_BLD = forward(params, model, batch["tokens"], batch["segments"], batch["positions"])
        logprobs_BL, _ = token_logprobs(params, model, hidden_BLD, batch["targets"])
        scaled_B = batch["advantage"] * jnp.sum(-logprobs_BL * batch["weights"], axis=1)
        return jnp.sum(scaled_B) / jnp.maximum(jnp.sum(batch["weights"]), 1)

    value, gradients = jax.value_and_grad(loss)(params)
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, value


def _facts(sampled: list[dict[str, Any]], kept: list[dict[str, Any]], losses: list[float]) -> dict[str, Any]:
    rates = {row["position"]: row["solve_rate"] for row in sampled}
    facts: dict[str, Any] = {
        "problems": len(rates),
        "completions": len(sampled),
        "solve_rate": float(np.mean(list(rates.values()))),
        "never_solved": sum(rate == 0 for rate in rates.values()),
        "always_solved": sum(rate == 1 for rate in rates.values()),
        "traces": len(kept),
    }
    if losses:
        facts |= {"first_loss": losses[0], "last_loss": losses[-1]}
    facts["curriculum"] = curriculum(sampled)
    return facts


def curriculum(sampled: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """By solve rate: problems, traces kept, the weight of one (its advantage) and of all of them together."""
    found = []
    for rate in sorted({row["solve_rate"] for row in sampled}):
        rows = [row for row in sampled if row["solve_rate"] == rate]
        weights = [row["advantage"] for row in rows if row["advantage"] is not None and row["advantage"] > 0]
        found.append(
            {
                "solve_rate": rate,
                "problems": len({row["position"] for row in rows}),
                "traces": len(weights),
                "weight": float(np.mean(weights)) if weights else 0.0,
                "total": float(np.sum(weights)),
            }
        )
    return found


def _publish(rounds: int, work: Path, traces: Path) -> None:
    """The kept traces of every round as one JSON-lines file."""
    with atomic_path(traces) as temporary, temporary.open("w", encoding="utf-8") as file:
        for number in range(rounds):
            for line in (work / f"samples-{number}.jsonl").read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                if row["advantage"] is not None and row["advantage"] > 0:
                    file.write(json.dumps({"round": number, **row}, ensure_ascii=False) + "\n")
