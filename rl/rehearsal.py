"""Ahead-of-time compilation of the reinforcement stages, by running their programs once on random parameters.

JAX's compilation cache then has the programs when the stage starts with its checkpoint. They depend only on shapes and
settings, which are the real ones. A shape that only real completions have is compiled by the stage itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from nautile.configs.model import ModelConfig, TokenizerConfig
from nautile.configs.training import (
    AlignConfig,
    PolicyConfig,
    ProblemsConfig,
    ReasonConfig,
    RolloutConfig,
    SelfDistillConfig,
)
from nautile.data.tokenizer import tokenizer_for
from nautile.model.decoding.cache import length_buckets
from nautile.model.layers.common import Params
from nautile.model.nautile import initialise, shapes
from nautile.model.sharding import make_mesh, parameter_shardings, put_shared_rows
from nautile.model.training import optimizer
from nautile.rl.learner import Learner
from nautile.rl.objective_registry import Balance
from nautile.rl.problems.load import load
from nautile.rl.rollouts import Group, RolloutEngine
from nautile.rl.self_distillation import programs
from nautile.rl.stage_inputs import on_device
from nautile.rl.training_rows import NARROWEST, TrainingRow, batches

SEED = 0  # any: the programs are the same with all


def rehearse_align(model: ModelConfig, tokenizer: TokenizerConfig, part: Mapping[str, Any]) -> None:
    """Compile the programs of the stage `align`."""
    config = AlignConfig.model_validate(part)
    _rehearse_reinforcement(model, tokenizer, config.problems, config.rollout, config.policy, None)


def rehearse_reason(model: ModelConfig, tokenizer: TokenizerConfig, part: Mapping[str, Any]) -> None:
    """Compile the programs of the stage `reason`."""
    config = ReasonConfig.model_validate(part)
    _rehearse_reinforcement(model, tokenizer, config.problems, config.rollout, config.policy, Balance.of(config))


def _rehearse_reinforcement(
    model: ModelConfig,
    tokenizer: TokenizerConfig,
    problems: ProblemsConfig,
    rollout: RolloutConfig,
    policy: PolicyConfig,
    balance: Balance | None,
) -> None:
    """Compile the programs of one reinforcement step: sample its groups, and update with invented advantages."""
    mesh = make_mesh(policy.fsdp, part="policy")
    engine = RolloutEngine(model, tokenizer_for(tokenizer), rollout, SEED, mesh)
    learner = Learner(model, policy, rollout, _random_params(model), balance, mesh)
    groups = _sample_groups(engine, learner.sampling_params, problems, rollout)
    # Cut the completions so that there are batches of every width, each with positive and negative advantages.
    widths = [inputs + 1 for inputs in length_buckets(max(1, rollout.max_tokens - 1), NARROWEST)]
    for group in groups:
        for member, completion in enumerate(group.rollouts):
            width = widths[member // 2 % len(widths)]
            group.rollouts[member] = replace(
                completion,
                ids=completion.ids[:width],
                logprobs=completion.logprobs[:width],
                advantage=(-1.0) ** member,
                forced=None,
            )
    learner.update(groups)


def rehearse_self_distillation(model: ModelConfig, tokenizer: TokenizerConfig, part: Mapping[str, Any]) -> None:
    """Compile the programs of self-distillation: sample a draw, and train for a step on halves of its completions.

    Halves, because right completions are shorter than those of a random policy, which never stops.
    """
    config = SelfDistillConfig.model_validate(part)
    rollout = config.rollout
    mesh = make_mesh(config.fsdp, part="self_distill")
    params = jax.device_put(_random_params(model), parameter_shardings(shapes(model), mesh))
    engine = RolloutEngine(model, tokenizer_for(tokenizer), rollout, SEED, mesh)
    half = -(-rollout.max_tokens // 2)
    rows = [
        TrainingRow(completion.prompt_ids, completion.ids[:half], completion.logprobs[:half], 1.0, 1.0)
        for group in _sample_groups(engine, params, config.problems, rollout)
        for completion in group.rollouts
    ]
    init_state, step = programs(model, config.optimizer, mesh, config.aggregate)
    state = init_state(params)
    rate = jax.jit(optimizer.schedule(config.optimizer, 1))(optimizer.applied(state))
    batch = next(batches(rows[: config.batch_rows], config.batch_rows, rollout.prompt_length + rollout.max_tokens))
    jax.block_until_ready(step(params, state, put_shared_rows(batch, mesh), rate))


def _random_params(model: ModelConfig) -> Params:
    """Initial parameters, put on the device in the same way as those of a checkpoint."""
    return on_device(jax.tree.map(np.asarray, initialise(model, SEED)))


def _sample_groups(
    engine: RolloutEngine, params: Params, problems: ProblemsConfig, rollout: RolloutConfig
) -> Sequence[Group]:
    """Sample the groups of one draw of the stage's problems.

    A single problem is sampled first, to compile the small batch that remains when most samples of a draw have ended.
    """
    numbered = list(enumerate(load(problems.model_copy(update={"count": rollout.prompts}), SEED, unanswered="keep")))
    engine.sample(params, numbered[:1], 1)
    return engine.sample(params, numbered, 0)
