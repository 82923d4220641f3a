"""Ahead-of-time compilation of the reinforcement stages: their programs, run once, and an estimate of their memory.

JAX's compilation cache then has the programs when the stage starts with its checkpoint. They depend only on shapes and
settings, which are the real ones. A shape that only real completions have is compiled by the stage itself.

`estimate_memory` compiles for chips that need not be present, and runs nothing. Resident throughout a step are the
parameters, both optimizer moments, with a KL term the reference's trained parameters, and with `sync_every` the
sampler's copy of them. A rollout adds the weights in the compute type, the decoding cache and the temporaries of its
programs; an update the separate sums of gradients (paper §4.3) and the temporaries of one micro-batch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from nautile.common.errors import ConfigError
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
from nautile.model.decoding.generate import Generator
from nautile.model.decoding.sampling import Sampling
from nautile.model.layers.common import Params
from nautile.model.nautile import initialise, shapes
from nautile.model.sharding import (
    OnMesh,
    make_mesh,
    own_mesh,
    parameter_shardings,
    put_shared_rows,
    replicated,
    row_sharding,
)
from nautile.model.training import optimizer
from nautile.rl.learner import Learner
from nautile.rl.objective_registry import Balance
from nautile.rl.policy_gradient import LearnerProgram
from nautile.rl.problems import load
from nautile.rl.rollouts import Group, RolloutEngine, on_device
from nautile.rl.self_distillation import programs
from nautile.rl.training_rows import NARROWEST, TrainingRow, batches, completion_batches, prompts_of

SEED = 0  # any: the programs are the same with all


def compile_align(model: ModelConfig, tokenizer: TokenizerConfig, part: Mapping[str, Any]) -> None:
    """Compile the programs of the stage `align`."""
    _compile_reinforcement(model, tokenizer, AlignConfig.model_validate(part), None)


def compile_reason(model: ModelConfig, tokenizer: TokenizerConfig, part: Mapping[str, Any]) -> None:
    """Compile the programs of the stage `reason`."""
    config = ReasonConfig.model_validate(part)
    _compile_reinforcement(model, tokenizer, config, Balance.of(config))


def _compile_reinforcement(
    model: ModelConfig, tokenizer: TokenizerConfig, config: AlignConfig | ReasonConfig, balance: Balance | None
) -> None:
    """Compile the programs of one reinforcement step: sample its groups, and update with invented advantages."""
    rollout, mesh = config.rollout, make_mesh(config.policy.fsdp, part="policy")
    engine = RolloutEngine(model, tokenizer_for(tokenizer), rollout, SEED, mesh)
    learner = Learner(model, config.policy, rollout, _random_params(model), balance, mesh)
    groups = _sample_groups(engine, learner.sampling_params, config.problems, rollout)
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


def compile_self_distillation(model: ModelConfig, tokenizer: TokenizerConfig, part: Mapping[str, Any]) -> None:
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
    """Sample a draw; before it a single problem, for the small batch that remains when most samples have ended."""
    numbered = list(enumerate(load(problems.model_copy(update={"count": rollout.prompts}), SEED, unanswered="keep")))
    engine.sample(params, numbered[:1], 1)
    return engine.sample(params, numbered, 0)


def estimate_memory(
    model: ModelConfig, rollout: RolloutConfig, policy: PolicyConfig | None, balance: Balance | None, mesh: Mesh
) -> dict[str, Any]:
    """Estimate the bytes per chip of a reinforcement step, by part; `rollout` and `update` are peaks.

    `policy` None: the rollouts alone. Raises `ConfigError` where completions or rows do not divide among the chips.
    """
    # All completions of a step are decoded at once; an update takes them in micro-batches.
    rows = rollout.prompts * rollout.group
    micro_rows = policy.micro_rows if policy else rows
    for name, count in (("rollout.prompts x rollout.group", rows), ("policy.micro_rows", micro_rows)):
        if count % mesh.size:
            raise ConfigError(f"{name}: {count} is not a multiple of the {mesh.size} chips")
    program = LearnerProgram(model, policy, rollout, balance is not None, mesh) if policy else None
    kinds = shapes(model)
    parameters = _with_shardings(kinds, parameter_shardings(kinds, mesh))
    resident = _bytes(parameters)
    if policy and program:
        trained = _bytes(_with_shardings(program.kinds, program.shardings))
        state_kinds = jax.eval_shape(program.tx.init, program.kinds)
        moments = _bytes(_with_shardings(state_kinds, program.state_shardings))
        resident += moments + trained * ((policy.kl > 0) + (policy.sync_every > 1))
    first, hosts = mesh.devices.flat[0].process_index, {device.process_index for device in mesh.devices.flat}
    # Each of several hosts samples from a copy of the parameters on its own chips.
    copy = _bytes(_with_shardings(kinds, parameter_shardings(kinds, own_mesh(mesh, first)))) if len(hosts) > 1 else 0
    sampling = Sampling(max_tokens=rollout.max_tokens, temperature=rollout.temperature)
    generator = Generator(model, sampling, rows, rollout.prompt_length, mesh)
    analyses = {}
    for name, jitted, arguments in generator.programs(rollout.prompts):
        # The few prompts are replicated on every chip; the completions are split.
        split_rows = rows if name == "decode" else None
        placed = tuple(_argument_shapes(argument, parameters, split_rows, mesh) for argument in arguments)
        analyses[name] = OnMesh(mesh, jitted).lower(*placed).compile().memory_analysis()
    weights, prompts = (analyses[name].output_size_in_bytes for name in ("weights for decoding", "prefill"))
    # The lane's state is donated: the bytes that the output shares with the input are the cache itself.
    cache = generator.lanes * analyses["decode"].alias_size_in_bytes
    working = max(analyses["prefill"].temp_size_in_bytes, generator.lanes * analyses["decode"].temp_size_in_bytes)
    sampling_bytes = copy + weights + prompts + cache + working
    needs = {"rows": rows, "resident": resident, "cache": cache, "rollout": resident + sampling_bytes}
    if policy is None or program is None:
        return needs
    # Update: with balance there are sums for g+ and g-, for a separate KL gradient, and for the groups so far.
    sums = 1
    if balance is not None:
        sums += 1 + (policy.kl > 0) + balance.by_group
    # Of the programs of an update, the gradients of a micro-batch of completions need the most.
    backward, state_bytes = _analyse_gradients(program)
    # Each sum has gradients of the parameters and of the prompt states. A micro-batch outputs its gradients while the
    # sums and the prompt states, the reference's as well, are in memory.
    gradients = sums * (trained + state_bytes)
    prompt_states = state_bytes * (1 + (policy.kl > 0))
    update = resident + prompt_states + gradients + backward.output_size_in_bytes + backward.temp_size_in_bytes
    return {**needs, "micro_rows": policy.micro_rows, "gradients": gradients, "update": update}


def _analyse_gradients(program: LearnerProgram) -> tuple[Any, int]:
    """The compiler's memory analysis of a micro-batch of the longest completions; bytes of a step's prompt states."""
    policy, rollout = program.config, program.rollout
    split, whole = row_sharding(program.mesh), replicated(program.mesh)
    trained = _with_shardings(program.kinds, program.shardings)
    frozen = _with_shardings(program.frozen_kinds, program.frozen_shardings)
    prompts = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=whole)
        for name, array in prompts_of((), rollout.prompt_length, rollout.prompts, program.prompts_at_once)[0].items()
    }
    prompt_states = jax.tree.map(
        lambda kind: jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=program.prompt_sharding),
        program.encode_prompts.lower(trained, frozen, prompts).out_info,
    )
    reference = (trained, prompt_states) if policy.kl else (None, None)
    # The widest batch there can be: every completion as long as the limit allows.
    longest = TrainingRow((), np.zeros(rollout.max_tokens), np.zeros(rollout.max_tokens), 0.0, 0.0)
    (rows,) = completion_batches([(longest, 0)], rollout.max_tokens, lambda _: policy.micro_rows)
    batch = {name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=split) for name, array in rows.items()}
    lowered = program.completion_gradients[False].lower(
        trained, frozen, prompt_states, *reference, prompts["lengths"], batch
    )
    return lowered.compile().memory_analysis(), _bytes(prompt_states)


def _argument_shapes(argument: Any, parameters: Any, rows: int | None, mesh: Mesh) -> Any:
    """Shapes with shardings for one argument of a generator's program: `parameters`, or arrays, split if of `rows`
    rows.
    """
    structure = jax.tree.structure(parameters)
    if jax.tree.structure(argument) == structure:  # type: ignore[operator]  # mypy cannot resolve jax's alias
        return parameters

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        split = leaf.ndim > 0 and leaf.shape[0] == rows
        return leaf.update(sharding=row_sharding(mesh) if split else replicated(mesh))

    return jax.tree.map(place, argument)


def _with_shardings(kinds: Any, shardings: Any) -> Any:
    """A tree of shapes, each with its sharding."""
    return jax.tree.map(lambda leaf, sharding: leaf.update(sharding=sharding), kinds, shardings)


def _bytes(tree: Any) -> int:
    """Bytes of a tree on one chip."""
    return sum(leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(tree))
