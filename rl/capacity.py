"""Will a reinforcement stage fit: its rollouts and its update, compiled for chips that need not be here.

All bytes are those of one chip. What stays in memory through a step: parameters, both moments, and the start of what
trains where there is a KL term. To that a rollout adds weights in the compute type, the cache and the programs'
temporaries; an update adds the sums of gradients it keeps apart (paper §4.3) and the temporaries of one micro-batch.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from common.errors import ConfigError
from configs.model import ModelConfig
from configs.training import PolicyConfig, RolloutConfig
from model.decoding.generate import Generator
from model.decoding.sampling import Sampling
from model.nautile import shapes
from model.sharding import OnMesh, parameter_shardings, replicated, row_sharding
from rl.balance import BalanceMode
from rl.learner import ROWS, LearnerProgram


def estimate_memory(
    model: ModelConfig, rollout: RolloutConfig, policy: PolicyConfig | None, mode: BalanceMode | None, mesh: Mesh
) -> dict[str, Any]:
    """Bytes of a step by part, `rollout` and `update` as peaks. `policy` None: rollouts alone (self-distillation).

    Raises `ConfigError` where completions or rows do not divide among the chips.
    """
    rows = rollout.prompts * rollout.group
    for what, count in (("completions at once", rows), ("policy.micro_rows", policy.micro_rows if policy else rows)):
        if count % mesh.size:
            raise ConfigError(f"{count} {what} do not divide among {mesh.size} chips")
    program = LearnerProgram(model, policy, mode is not None, mesh) if policy else None
    kinds = shapes(model)
    whole = _placed(kinds, parameter_shardings(kinds, mesh))
    resident = _bytes(whole)
    if policy and program:
        trained = _bytes(_placed(program.kinds, program.shardings))
        moments = _bytes(_placed(jax.eval_shape(program.tx.init, program.kinds), program.moments))
        resident += moments + (trained if policy.kl else 0)
    sampling = Sampling(max_tokens=rollout.max_tokens, temperature=rollout.temperature)
    generator = Generator(model, sampling, rows, rollout.prompt_length, mesh)
    found = {}
    for name, jitted, arguments in generator.programs():
        # Prompts are few, and every chip has them all; their completions are split.
        split = rows if name == "decode" else None
        placed = tuple(_by_rows(argument, whole, split, mesh) for argument in arguments)
        found[name] = OnMesh(mesh, jitted).lower(*placed).compile().memory_analysis()
    weights, loop = found["weights for decoding"].output_size_in_bytes, found["decode"].alias_size_in_bytes
    prefill = found["prefill"].output_size_in_bytes + found["prefill"].temp_size_in_bytes
    decode = loop + found["decode"].temp_size_in_bytes
    told = {"rows": rows, "resident": resident, "cache": loop, "rollout": resident + weights + max(prefill, decode)}
    if policy is None or program is None:
        return told
    sums = 1 + (mode is not None) + (mode is not None and policy.kl > 0)
    pulled = _pulled(program, policy, rollout.prompt_length + rollout.max_tokens)
    # The gradients of a micro-batch come out while the sums so far are held.
    update = resident + sums * trained + pulled.output_size_in_bytes + pulled.temp_size_in_bytes
    return {**told, "micro_rows": policy.micro_rows, "gradients": sums * trained, "update": update}


def _pulled(program: LearnerProgram, policy: PolicyConfig, length: int) -> Any:
    """The compiler's account of the learner's program for one micro-batch."""
    rows = (policy.micro_rows, length)
    floats = {"weights", "sampled", "advantage"}
    batch = {
        name: jax.ShapeDtypeStruct(
            rows[:1] if name == "advantage" else rows,
            jnp.float32 if name in floats else jnp.int32,
            sharding=row_sharding(program.mesh),
        )
        for name in ROWS
    }
    trained = _placed(program.kinds, program.shardings)
    frozen = _placed(program.still, program.frozen_shardings)
    lowered = program.pull[False].lower(trained, frozen, trained if policy.kl else None, batch)
    return lowered.compile().memory_analysis()


def _by_rows(argument: Any, whole: Any, rows: int | None, mesh: Mesh) -> Any:
    """Shapes of one argument of the generator with their places; what has `rows` rows is split, parameters are as
    `whole` has them."""
    if jax.tree.structure(argument) == jax.tree.structure(whole):
        return whole

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        split = leaf.ndim > 0 and leaf.shape[0] == rows
        sharding = row_sharding(mesh) if split else replicated(mesh)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, argument)


def _placed(kinds: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), kinds, shardings
    )


def _bytes(tree: Any) -> int:
    """On one chip."""
    return sum(leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(tree))
