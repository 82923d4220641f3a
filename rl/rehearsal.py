"""Rehearsals: a training stage's programs, run once on made-up parameters and rewards.

So that what JAX compiles is in its cache when the stage begins with a real checkpoint. The programs depend on shapes
and settings alone, and these are the real ones; a shape that only real completions have is compiled by the stage.
"""

from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np

from configs.model import ModelConfig, TokenizerConfig
from configs.training import PolicyConfig, ProblemsConfig, RolloutConfig, SelfDistillConfig
from data.tokenizer import tokenizer_for
from model.decoding.buckets import length_buckets
from model.layers.common import Params
from model.nautile import initialise, shapes
from model.sharding import make_mesh, parameter_shardings, put_shared_rows
from model.training import optimizer
from rl.learner import Learner
from rl.objectives import Balance
from rl.problems.load import load
from rl.rollouts import Group, RolloutEngine
from rl.self_distillation import programs
from rl.stage_inputs import on_device
from rl.training_rows import NARROWEST, TrainingRow, batches


def rehearse_reinforcement(
    model: ModelConfig,
    tokenizer: TokenizerConfig,
    problems: ProblemsConfig,
    rollout: RolloutConfig,
    policy: PolicyConfig,
    balance: Balance | None,
    seed: int,
) -> None:
    """Draw the groups of a step, and update by advantages that are made up, on completions of every width."""
    mesh = make_mesh(policy.fsdp, part="policy")
    engine = RolloutEngine(model, tokenizer_for(tokenizer), rollout, seed, mesh)
    learner = Learner(model, policy, rollout, _made_up(model, seed), balance, mesh)
    groups = _sampled(engine, learner.sampling_params, problems, rollout, seed)
    widths = [inputs + 1 for inputs in length_buckets(max(1, rollout.max_tokens - 1), NARROWEST)]
    for group in groups:
        for member, completion in enumerate(group.rollouts):
            width = widths[member // 2 % len(widths)]  # either sign with each width
            group.rollouts[member] = replace(
                completion,
                ids=completion.ids[:width],
                logprobs=completion.logprobs[:width],
                advantage=(-1.0) ** member,
                forced=None,
            )
    learner.update(groups)


def rehearse_self_distillation(
    model: ModelConfig, tokenizer: TokenizerConfig, config: SelfDistillConfig, seed: int
) -> None:
    """Draw the groups of a draw, and train for a step on the first halves of their completions.

    Right completions, which are trained on, are shorter than those of a policy that never stops.
    """
    rollout = config.rollout
    mesh = make_mesh(config.fsdp, part="self_distill")
    params = jax.device_put(_made_up(model, seed), parameter_shardings(shapes(model), mesh))
    engine = RolloutEngine(model, tokenizer_for(tokenizer), rollout, seed, mesh)
    half = -(-rollout.max_tokens // 2)
    rows = [
        TrainingRow(completion.prompt_ids, completion.ids[:half], completion.logprobs[:half], 1.0, 1.0)
        for group in _sampled(engine, params, config.problems, rollout, seed)
        for completion in group.rollouts
    ]
    begin, step = programs(model, config.optimizer, mesh)
    state = begin(params)
    rate = jax.jit(optimizer.schedule(config.optimizer, 1))(optimizer.applied(state))
    batch = next(batches(rows[: config.batch_rows], config.batch_rows, rollout.prompt_length + rollout.max_tokens))
    jax.block_until_ready(step(params, state, put_shared_rows(batch, mesh), rate))


def _made_up(model: ModelConfig, seed: int) -> Params:
    """Fresh parameters, on the device as a stage puts those of a checkpoint there."""
    return on_device(jax.tree.map(np.asarray, initialise(model, seed)))


def _sampled(
    engine: RolloutEngine, params: Params, problems: ProblemsConfig, rollout: RolloutConfig, seed: int
) -> Sequence[Group]:
    """The groups of one draw of the stage's problems; those of a single problem are drawn too, in a lane as small as
    that which is left when most samples of a draw have ended."""
    numbered = list(enumerate(load(problems.model_copy(update={"count": rollout.prompts}), seed, unanswered="keep")))
    engine.sample(params, numbered[:1], 1)
    return engine.sample(params, numbered, 0)
