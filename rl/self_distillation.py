"""Stage 3, on-policy self-distillation (paper §4.4): train on own traces with A > 0, weighted by the advantage A.

Each round samples completions of every problem, scores them, keeps those with a positive advantage (traces), and
minimises their cross-entropy times the advantage. The reward is that of the strict grader, or the one that
`self_distill.reward` names. Advantages are not divided by the standard deviation, so a right
trace of a problem with solve rate p has the weight 1 - p: hard problems weigh most, the paper's built-in curriculum.
"""

import itertools
import json
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh

from nautile.common.errors import ConfigError, Retryable
from nautile.common.events import Emit, flush, silent
from nautile.common.files import atomic_path
from nautile.configs.base import OptimizerConfig
from nautile.configs.model import ModelConfig
from nautile.configs.training import SelfDistillConfig, SuperviseConfig
from nautile.data.tokenizer import tokenizer_for
from nautile.model.layers.common import Params
from nautile.model.loss import token_logprobs
from nautile.model.nautile import forward, shapes
from nautile.model.processes import joint_termination, on_first
from nautile.model.sharding import (
    OnMesh,
    make_mesh,
    on_mesh,
    parameter_shardings,
    put_shared_rows,
    replicated,
    whole_on_hosts,
)
from nautile.model.training import optimizer
from nautile.model.training.checkpoint import open_checkpoints
from nautile.rl.learner import SkippedUpdates
from nautile.rl.rewards import MEASURED, Score, SuccessRate, advantages
from nautile.rl.rollouts import (
    Group,
    RolloutEngine,
    StageInputs,
    append_rows,
    on_device,
    score_groups,
    truncate_log,
)
from nautile.rl.training_rows import TrainingRow, batches

logger = logging.getLogger(__name__)
Aggregate = Literal["example", "batch_tokens"]
SAMPLES = "samples-{}.jsonl"  # the sampled completions of a round, by its number


@dataclass(frozen=True)
class SelfDistillation:
    """Inputs of one self-distillation run.

    `identity`: checkpoints with another identity are not resumed. `work`: folder of checkpoints and samples. `traces`:
    JSON-lines file of all traces that were trained on. `shared_disk`: every process sees `work`. `score`: the reward,
    needed by the first process only; None: the strict grader's verdict.
    """

    inputs: StageInputs
    config: SelfDistillConfig
    identity: dict[str, Any]
    work: Path
    traces: Path
    sampling_seed: int  # of the completions and the order of the traces
    emit: Emit = silent
    shared_disk: bool = True
    score: Score | None = None


def self_distil(run: SelfDistillation, params: Params) -> tuple[Params, dict[str, Any]]:
    """Run `config.rounds` rounds of self-distillation; returns the new parameters and facts.

    A rerun resumes after the last finished round and the last complete sampling draw. All processes of a pod
    (`jax.distributed`) call this with the same arguments. Each one samples its share; the first one scores, reports,
    writes, and sends the traces to all, which train together. On SIGTERM they raise `Retryable` together; a single
    process ends.
    """
    config, work, is_first = run.config, run.work, jax.process_index() == 0
    run = run if is_first else replace(run, emit=silent)
    mesh = make_mesh(config.fsdp, part="self_distill")
    if config.batch_rows % mesh.size:
        raise ConfigError(f"self_distill.batch_rows {config.batch_rows} does not divide among the {mesh.size} devices")
    params = on_mesh(on_device(params), parameter_shardings(shapes(run.inputs.model), mesh))
    checkpoints = open_checkpoints(work / "checkpoints", 2, run.identity, mesh, shared_disk=run.shared_disk)
    rounds_done = checkpoints.latest()
    facts: dict[str, Any] = {"rounds": []}
    # A checkpoint holds the parameters after a whole round. The optimizer starts anew in each, so it is not saved.
    if rounds_done is not None:
        params, facts = checkpoints.restore(rounds_done, params)
    stop_checks = itertools.count()  # numbers the calls, so that all processes stop at the same one
    with joint_termination() as stop_requested:

        def check_stop() -> None:
            if stop_requested(next(stop_checks)):
                raise Retryable("self-distillation was asked to stop; its samples are kept, and a rerun resumes there")

        for number in range(rounds_done or 0, config.rounds):
            _sample(run, params, number, mesh, check_stop)
            # Read from the log, which has fewer digits, so that a run that was never interrupted trains on the same
            # numbers as one that resumes.
            samples = _read_rows(work / SAMPLES.format(number)) if is_first else []
            traces = on_first(partial(_traces_of, samples))
            steps_before = sum(_update_count(row["traces"], config) for row in facts["rounds"])
            params, losses, skipped = _train(run, params, traces, number, steps_before, mesh, check_stop)
            facts["rounds"].append(on_first(partial(_facts, samples, traces, losses, skipped)))
            flush(run.emit)
            checkpoints.save(number + 1, params, facts)
            checkpoints.wait()
    checkpoints.close()
    facts["updates"] = sum(row["updates"] for row in facts["rounds"])
    if not facts["updates"]:
        facts["no_update"] = facts["rounds"][-1]["no_update"]
        run.emit("progress", done=0, total=0, unit="steps", note=f"no update: {facts['no_update']}")
    # A collective operation: every process takes part, although one writes.
    whole = whole_on_hosts(params, mesh)
    if not is_first:
        return whole, facts
    with atomic_path(run.traces) as temporary, temporary.open("w", encoding="utf-8") as file:
        for number in range(config.rounds):
            for row in _traces_of(_read_rows(work / SAMPLES.format(number))):
                file.write(json.dumps({"round": number, **row}, ensure_ascii=False) + "\n")
    return whole, facts


def _sample(run: SelfDistillation, params: Params, number: int, mesh: Mesh, check_stop: Callable[[], None]) -> None:
    """Sample groups for all problems of a round; each draw is appended to the round's log, and never repeated."""
    inputs, rollout, log = run.inputs, run.config.rollout, run.work / SAMPLES.format(number)
    engine = RolloutEngine(inputs.model, tokenizer_for(inputs.tokenizer), rollout, run.sampling_seed, mesh)
    # Before the first draw: a prompt that is too long would fail hours later.
    engine.check(inputs.problems)
    size = rollout.prompts
    draws = -(-len(inputs.problems) // size)

    def first_draw() -> int:
        """The draw to resume at. The last one in the log may be incomplete: it is removed and sampled again."""
        truncate_log(log, draws)
        rows = _read_rows(log)
        first = rows[-1]["step"] if rows else 0
        truncate_log(log, first)
        return first

    for draw in range(on_first(first_draw), draws):
        # The position of a problem seeds its samples, so it is that in the whole list, not in the draw.
        problems = list(enumerate(inputs.problems))[draw * size : (draw + 1) * size]
        step = number * draws + draw  # number of the draw in the whole run
        check_stop()
        groups = engine.sample(params, problems, step)
        if not jax.process_index():  # only the first process scores and writes
            rows = [{"step": draw, **row} for row in _score_rows(groups, run.score)]
            append_rows(log, rows)
            rewards = [row["reward"] for row in rows if row["reward"] is not None]
            correct = [verdict for verdict in map(_verdict_of, rows) if verdict is not None]
            # Steps of metrics count from 1, as in every stage.
            if run.score is not None and rewards:
                run.emit("metric", name="reward", step=step + 1, value=float(np.mean(rewards)))
            if correct:
                run.emit("metric", name="solve_rate", step=step + 1, value=float(np.mean(correct)))
            run.emit("metric", name="rollout_tokens_per_second", step=step + 1, value=engine.tokens / engine.seconds)
            note = f"solved {np.mean(correct):.2f}" if correct else "no solve rate"
            note += f", {len(rows) - len(rewards)} not graded" if len(rewards) < len(rows) else ""
            run.emit("progress", done=draw + 1, total=draws, unit="draws", note=note)
        if number == 0 and draw + 1 == min(draws, -(-MEASURED // size)):
            on_first(partial(_check_success, log, run.config.least_success))


def _verdict_of(row: Mapping[str, Any]) -> float | None:
    """The strict grader's verdict on a completion: the reward itself, unless that is another one."""
    verdict: float | None = row["parts"].get("correct", row["reward"])
    return verdict


def _check_success(log: Path, least: float | None) -> None:
    rows = _read_rows(log)
    success = SuccessRate("self_distill", least)
    success.add(len({row["position"] for row in rows}), [_verdict_of(row) for row in rows], last=True)


def _read_rows(log: Path) -> list[dict[str, Any]]:
    if not log.exists():
        return []
    with log.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _traces_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows to train on: those with a positive advantage."""
    return [row for row in rows if row["advantage"] is not None and row["advantage"] > 0]


def _score_rows(groups: Sequence[Group], score: Score | None) -> list[dict[str, Any]]:
    """Set rewards and advantages; returns the groups' rows with the solve rate of each, None if none could be graded.

    `score` None: the strict grader's verdict.
    """
    rows = []
    for group, verdicts in zip(groups, score_groups(groups, score), strict=True):
        for rollout, advantage in zip(group.rollouts, advantages([r.reward for r in group.rollouts]), strict=True):
            rollout.advantage = advantage
        known = [correct for correct in verdicts if correct is not None]
        rate = sum(known) / len(known) if known else None
        more = {"position": group.position, "solve_rate": rate}
        for member, correct in enumerate(verdicts):
            if score is not None:
                group.rollouts[member].parts["correct"] = correct
            rows.append({**group.row(member), **more})
    return rows


def _train(
    run: SelfDistillation,
    params: Params,
    traces: Sequence[dict[str, Any]],
    number: int,
    steps_before: int,
    mesh: Mesh,
    check_stop: Callable[[], None],
) -> tuple[Params, list[float], int]:
    """Train for `config.epochs` epochs over the traces, in a seeded order, with a fresh optimizer state.

    `steps_before`: updates of the earlier rounds, after which those of this round are numbered. Returns the parameters,
    the losses of the applied updates, and the number of updates that were skipped because they were not finite.
    """
    config = run.config
    if not traces:
        logger.warning("round %d: no completion has a positive advantage, so nothing is trained on", number)
        return params, [], 0
    rows = [_training_row(trace, config.weights) for trace in traces]
    training = RowTraining(
        config, "self_distill", config.aggregate, run.inputs.model, mesh, f"{run.sampling_seed}:{number}",
        config.rollout.prompt_length + config.rollout.max_tokens, run.emit, steps_before,
    )  # fmt: skip
    params, _, done = train_rows(training, params, rows, check_stop=check_stop)
    return params, done.losses, done.skipped


def _training_row(trace: Mapping[str, Any], weights: Literal["ones"] | None) -> TrainingRow:
    weight = trace["advantage"] if weights is None else 1.0
    ids, logprobs = np.array(trace["ids"]), np.array(trace["logprobs"])
    return TrainingRow(trace["prompt_ids"], ids, logprobs, weight, 1.0, trace["forced"])


@dataclass(frozen=True)
class RowTraining:
    """Settings of a training on rows: those of section `section`, for rows of at most `length` tokens.

    `order`: seeds the order of the rows, together with the epoch. `steps_before`: updates that metrics count before
    the first.
    """

    config: SelfDistillConfig | SuperviseConfig
    section: str
    aggregate: Aggregate
    model: ModelConfig
    mesh: Mesh
    order: str
    length: int
    emit: Emit = silent
    steps_before: int = 0


@dataclass
class RowsDone:
    """How far a training on rows is: its updates, the losses of those that were applied, the number skipped."""

    steps: int = 0
    losses: list[float] = field(default_factory=list)
    skipped: int = 0


def train_rows(
    training: RowTraining,
    params: Params,
    rows: Sequence[TrainingRow],
    *,
    state: Any = None,
    done: RowsDone | None = None,
    check_stop: Callable[[], None] = lambda: None,
    after_step: Callable[[Params, Any, RowsDone], None] = lambda params, state, done: None,
) -> tuple[Params, Any, RowsDone]:
    """Train for `config.epochs` epochs over the rows, in a seeded order; returns parameters, optimizer state, counts.

    `state` and `done`: of an interrupted training, which goes on after its last update; None: a fresh one.
    """
    config, emit, rows, done = training.config, training.emit, list(rows), done or RowsDone()
    total = _update_count(len(rows), config)
    init_state, step = programs(training.model, config.optimizer, training.mesh, training.aggregate)
    state = init_state(params) if state is None else state
    rate = jax.jit(optimizer.schedule(config.optimizer, total))
    skipped = SkippedUpdates(config.skip_limit, training.section, done.skipped)
    number = 0
    for epoch in range(config.epochs):
        # Seeded by round and epoch: an interrupted round trains again in the same order.
        random.Random(f"{training.order}:{epoch}").shuffle(rows)
        for number_of_batch, batch in enumerate(batches(rows, config.batch_rows, training.length)):
            number += 1
            if number <= done.steps:
                continue
            check_stop()
            # The last batch of an epoch may have few traces: its step is that much smaller, or each of them would weigh
            # more than the others. The rate is scaled, since Adam undoes a scale of the gradient.
            share = min(1.0, len(rows) / config.batch_rows - number_of_batch)
            learning_rate = rate(optimizer.applied(state)) * share
            params, state, loss, measured = step(params, state, put_shared_rows(batch, training.mesh), learning_rate)
            loss, measured = jax.device_get((loss, measured))
            # Number of the step in the whole run. Rounds differ in their traces, so in their steps as well; metrics of
            # one name and step replace each other in the catalog.
            run_step = training.steps_before + number
            if skipped.record(run_step, measured, params):
                done.losses.append(float(loss))
                emit("metric", name="loss", step=run_step, value=done.losses[-1])
            emit("metric", name="skipped_updates", step=run_step, value=skipped.total)
            emit("progress", done=number, total=total, unit="steps", note=f"loss {loss:.3f}")
            done.steps, done.skipped = number, skipped.total
            after_step(params, state, done)
    return params, state, done


def _update_count(traces: int, config: SelfDistillConfig | SuperviseConfig) -> int:
    """Updates of a round with so many traces."""
    return -(-traces // config.batch_rows) * config.epochs


@cache
def programs(
    model: ModelConfig, config: OptimizerConfig, mesh: Mesh, aggregate: Aggregate
) -> tuple[Callable[[Params], Any], OnMesh]:
    """The compiled functions `init_state(params)` and `step(params, state, batch, learning_rate)`, see `update`.

    The learning rate is an argument, so that all rounds share one compiled step, however many updates each has.
    """
    tx_of = partial(optimizer.build_with_rate, config)
    tx = tx_of(lambda count: jnp.zeros((), jnp.float32))  # any rate: the state's shapes do not depend on it
    kinds = shapes(model)
    shardings = parameter_shardings(kinds, mesh)
    moments = optimizer.state_shardings(tx, kinds, shardings, mesh)
    outs = (shardings, moments, replicated(mesh), replicated(mesh))
    step = jax.jit(partial(update, model, tx_of, aggregate), donate_argnums=1, out_shardings=outs)
    return jax.jit(tx.init, out_shardings=moments), OnMesh(mesh, step)


def update(
    model: ModelConfig,
    tx_of: Callable[[Callable[[Any], Array]], optax.GradientTransformation],
    aggregate: Aggregate,
    params: Params,
    state: Any,
    batch: Mapping[str, Array],
    rate: Array,
) -> tuple[Params, Any, Array, dict[str, Array]]:
    """One optimizer step on the advantage-weighted cross-entropy (paper §4.4): the mean over traces of A_i * CE_i.

    A_i is the advantage of trace i, CE_i the mean cross-entropy of its completion's tokens. `aggregate` "batch_tokens"
    is the mean over all tokens of A_i * CE instead, in which every token has the same weight, as in the paper's update
    rule of stage 1. With "example" the tokens of short traces weigh most: a model that can also answer without thinking
    may learn to do so (docs/decisions.md). The temperature is 1, whatever that of sampling was: the model is fitted as
    it will be used.

    `tx_of` makes the optimizer for a learning-rate schedule, here the constant `rate`. Returns parameters, state, the
    loss, and what `finite_update` measured.
    """

    def loss(params: Params) -> Array:
        hidden_BLD = forward(params, model, batch["tokens"], batch["segments"], batch["positions"])
        logprobs_BL, _ = token_logprobs(params, model, hidden_BLD, batch["targets"])
        tokens_B = jnp.sum(batch["weights"], axis=1)  # 0 in the rows that pad a batch
        entropy_B = jnp.sum(-logprobs_BL * batch["weights"], axis=1)
        if aggregate == "batch_tokens":
            return jnp.sum(batch["advantage"] * entropy_B) / jnp.maximum(jnp.sum(tokens_B), 1)
        mean_B = entropy_B / jnp.maximum(tokens_B, 1)
        return jnp.sum(batch["advantage"] * mean_B) / jnp.maximum(jnp.sum(tokens_B > 0), 1)

    value, gradients = jax.value_and_grad(loss)(params)
    params, state, measured = optimizer.finite_update(tx_of(lambda _: rate), params, state, gradients)
    return params, state, value, measured


def _facts(
    samples: list[dict[str, Any]], traces: list[dict[str, Any]], losses: list[float], skipped: int
) -> dict[str, Any]:
    """The facts of a round for the manifest."""
    # All completions of a problem carry its solve rate.
    rates = {row["position"]: row["solve_rate"] for row in samples}
    known_rates = [rate for rate in rates.values() if rate is not None]
    facts: dict[str, Any] = {
        "problems": len(rates),
        "completions": len(samples),
        "unscored": sum(row["reward"] is None for row in samples),
        "solve_rate": float(np.mean(known_rates)) if known_rates else None,
        "never_solved": sum(rate == 0 for rate in known_rates),
        "always_solved": sum(rate == 1 for rate in known_rates),
        "traces": len(traces),
        "updates": len(losses),
        "skipped_updates": skipped,
    }
    if losses:
        facts |= {"first_loss": losses[0], "last_loss": losses[-1]}
    elif traces:
        facts["no_update"] = "no update was finite"
    else:
        facts["no_update"] = (
            f"no completion is better than its group: of {len(rates)} problems {facts['never_solved']} were never "
            f"solved, {facts['always_solved']} always"
        )
    facts["curriculum"] = curriculum(samples)
    return facts


def curriculum(samples: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """By solve rate: the numbers of problems and traces, and the mean and total weight (advantage) of the traces."""
    levels = []
    for rate in sorted({row["solve_rate"] for row in samples if row["solve_rate"] is not None}):
        rows = [row for row in samples if row["solve_rate"] == rate]
        weights = [row["advantage"] for row in _traces_of(rows)]
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
