"""Will a reinforcement stage fit on one device: its rollouts and its update, compiled for a chip that need not be here.

What stays in memory through a step: parameters, both moments, and the frozen start where there is a KL term. To that a
rollout adds weights in the compute type, the cache and the programs' temporaries; an update adds the sums of gradients
it keeps apart (paper §4.3) and the temporaries of one micro-batch.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from configs.model import ModelConfig
from configs.schema import PolicyConfig, RolloutConfig
from model import optimizer
from model.generate import Generator, Sampling
from model.layers import Params
from model.nautile import shapes
from rl.balance import Mode
from rl.learner import pull


def plan(
    model: ModelConfig, rollout: RolloutConfig, policy: PolicyConfig | None, mode: Mode | None, device: Any
) -> dict[str, Any]:
    """Bytes of a step by part, `rollout` and `update` as peaks. `policy` None: rollouts alone (self-distillation)."""
    kinds = shapes(model)
    size = _bytes(kinds)
    tx = optimizer.build(policy.optimizer, policy.steps) if policy else None
    moments = _bytes(jax.eval_shape(tx.init, kinds)) if tx else 0
    resident = size + moments + (size if policy and policy.kl else 0)
    sampling = Sampling(max_tokens=rollout.max_tokens, temperature=rollout.temperature)
    rows = rollout.prompts * rollout.group
    generator = Generator(model, sampling, rows, rollout.prompt_length)
    found = {name: _memory(program, arguments, device) for name, program, arguments in generator.programs()}
    weights, loop = found["weights for decoding"].output_size_in_bytes, found["decode"].alias_size_in_bytes
    prefill = found["prefill"].output_size_in_bytes + found["prefill"].temp_size_in_bytes
    decode = loop + found["decode"].temp_size_in_bytes
    told = {"rows": rows, "resident": resident, "cache": loop, "rollout": resident + weights + max(prefill, decode)}
    if policy is None:
        return told
    length = rollout.prompt_length + rollout.max_tokens
    sums = 1 + (mode is not None) + (mode is not None and policy.kl > 0)
    pulled = _memory(*_pull(model, policy, mode, kinds, length), device)
    # The gradients of a micro-batch come out while the sums so far are held.
    update = resident + sums * size + pulled.output_size_in_bytes + pulled.temp_size_in_bytes
    return {**told, "micro_rows": policy.micro_rows, "gradients": sums * size, "update": update}


def _pull(model: ModelConfig, policy: PolicyConfig, mode: Mode | None, kinds: Params, length: int) -> tuple[Any, tuple]:
    """The learner's program for one micro-batch, and its arguments as shapes."""
    rows = (policy.micro_rows, length)
    whole = dict.fromkeys(("tokens", "targets", "segments", "positions"), jax.ShapeDtypeStruct(rows, jnp.int32))
    kept = dict.fromkeys(("weights", "sampled"), jax.ShapeDtypeStruct(rows, jnp.float32))
    batch = {**whole, **kept, "advantage": jax.ShapeDtypeStruct(rows[:1], jnp.float32)}
    program = jax.jit(partial(pull, model, policy, mode is not None), static_argnames="first")
    return program, (kinds, kinds if policy.kl else None, batch, False)


def _memory(program: Any, arguments: tuple[Any, ...], device: Any) -> Any:
    """What the compiler says of a program's memory on a device."""
    place = jax.sharding.SingleDeviceSharding(device)

    def placed(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    return program.lower(*jax.tree.map(placed, arguments)).compile().memory_analysis()


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
