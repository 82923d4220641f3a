"""Memory of a reinforcement stage: its rollouts and its update, compiled for chips that need not be present.

All bytes are those of one chip. Resident through a step: parameters, both moments, with a KL term the start of what
trains, and with `sync_every` the sampler's copy of it. To that a rollout adds weights in the compute type, the cache
and the programs' temporaries; an update adds the sums of gradients it keeps apart (paper §4.3) and the temporaries of
one micro-batch.
"""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from common.errors import ConfigError
from configs.model import ModelConfig
from configs.training import PolicyConfig, RolloutConfig
from model.decoding.generate import Generator
from model.decoding.sampling import Sampling
from model.nautile import shapes
from model.sharding import OnMesh, own_mesh, parameter_shardings, replicated, row_sharding
from rl.objectives import Balance
from rl.policy_gradient import LearnerProgram
from rl.training_rows import TrainingRow, completion_batches, prompts_of


def estimate_memory(
    model: ModelConfig, rollout: RolloutConfig, policy: PolicyConfig | None, balance: Balance | None, mesh: Mesh
) -> dict[str, Any]:
    """Estimate the bytes of a step by part, `rollout` and `update` as peaks. `policy` None: rollouts alone.

    Raises `ConfigError` where completions or rows do not divide among the chips.
    """
    rows = rollout.prompts * rollout.group
    for name, count in (("completions at once", rows), ("policy.micro_rows", policy.micro_rows if policy else rows)):
        if count % mesh.size:
            raise ConfigError(f"{count} {name} do not divide among {mesh.size} chips")
    program = LearnerProgram(model, policy, rollout, balance is not None, mesh) if policy else None
    kinds = shapes(model)
    whole = _placed(kinds, parameter_shardings(kinds, mesh))
    resident = _bytes(whole)
    if policy and program:
        trained = _bytes(_placed(program.kinds, program.shardings))
        moments = _bytes(_placed(jax.eval_shape(program.tx.init, program.kinds), program.moments))
        resident += moments + trained * ((policy.kl > 0) + (policy.sync_every > 1))
    first, hosts = mesh.devices.flat[0].process_index, {device.process_index for device in mesh.devices.flat}
    # Several hosts sample each for itself, from a copy of the parameters on its own chips.
    copy = _bytes(_placed(kinds, parameter_shardings(kinds, own_mesh(mesh, first)))) if len(hosts) > 1 else 0
    sampling = Sampling(max_tokens=rollout.max_tokens, temperature=rollout.temperature)
    generator = Generator(model, sampling, rows, rollout.prompt_length, mesh)
    analyses = {}
    for name, jitted, arguments in generator.programs(rollout.prompts):
        # Prompts are few, and every chip has them all; their completions are split.
        split = rows if name == "decode" else None
        placed = tuple(_by_rows(argument, whole, split, mesh) for argument in arguments)
        analyses[name] = OnMesh(mesh, jitted).lower(*placed).compile().memory_analysis()
    weights, prompts = (analyses[name].output_size_in_bytes for name in ("weights for decoding", "prefill"))
    cache = generator.lanes * analyses["decode"].alias_size_in_bytes
    working = max(analyses["prefill"].temp_size_in_bytes, generator.lanes * analyses["decode"].temp_size_in_bytes)
    sampling_bytes = copy + weights + prompts + cache + working
    needs = {"rows": rows, "resident": resident, "cache": cache, "rollout": resident + sampling_bytes}
    if policy is None or program is None:
        return needs
    sums = 1
    if balance is not None:
        sums += 1 + (policy.kl > 0) + (balance.over == "group")
    backward, begun = _analyse_gradients(program)
    # The gradients of a micro-batch are output while the sums so far are held, by parameters and by what completions
    # continue from, which is there itself, for the reference too.
    gradients = sums * (trained + begun)
    held = begun * (1 + (policy.kl > 0))
    update = resident + held + gradients + backward.output_size_in_bytes + backward.temp_size_in_bytes
    return {**needs, "micro_rows": policy.micro_rows, "gradients": gradients, "update": update}


def _analyse_gradients(program: LearnerProgram) -> tuple[Any, int]:
    """The compiler's memory analysis of the learner's program for one micro-batch of the longest completions, and the
    bytes of what the prompts of a step leave to them."""
    policy, rollout = program.config, program.rollout
    split, whole = row_sharding(program.mesh), replicated(program.mesh)
    trained = _placed(program.kinds, program.shardings)
    frozen = _placed(program.frozen_kinds, program.frozen_shardings)
    prompts = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=whole)
        for name, array in prompts_of((), rollout.prompt_length, rollout.prompts, program.prompts_at_once)[0].items()
    }
    begun = jax.tree.map(
        lambda kind: jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=program.by_prompts),
        program.begin.lower(trained, frozen, prompts).out_info,
    )
    reference = (trained, begun) if policy.kl else (None, None)
    longest = TrainingRow((), np.zeros(rollout.max_tokens), np.zeros(rollout.max_tokens), 0.0, 0.0)
    (rows,) = completion_batches([(longest, 0)], rollout.max_tokens, lambda _: policy.micro_rows)
    batch = {name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=split) for name, array in rows.items()}
    lowered = program.pull[False].lower(trained, frozen, begun, *reference, prompts["lengths"], batch)
    return lowered.compile().memory_analysis(), _bytes(begun)


def _by_rows(argument: Any, whole: Any, rows: int | None, mesh: Mesh) -> Any:
    """Shapes of one argument of the generator with their shardings: arrays of `rows` rows are split, parameters are
    placed as in `whole`, the rest is replicated."""
    if jax.tree.structure(argument) == jax.tree.structure(whole):
        return whole

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        split = leaf.ndim > 0 and leaf.shape[0] == rows
        return leaf.update(sharding=row_sharding(mesh) if split else replicated(mesh))

    return jax.tree.map(place, argument)


def _placed(kinds: Any, shardings: Any) -> Any:
    """Shapes with their shardings."""
    return jax.tree.map(lambda leaf, sharding: leaf.update(sharding=sharding), kinds, shardings)


def _bytes(tree: Any) -> int:
    """Bytes of a tree on one chip."""
    return sum(leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(tree))
