"""Compiled policy gradients (paper §4.2 and §4.3) that compute each prompt once for all completions of its group.

Three programs, which the learner calls in this order:

1. `encode_prompts`: the forward pass over the prompts; returns the model's state at the end of each (`PrefixStates`).
2. `completion_gradients`: for a micro-batch of completions, the gradients with respect to the parameters and to the
   prompt states that the completions continue from.
3. `backward_through_prompts`: the vector-Jacobian product of 1. with the summed gradients of the prompt states.

By the chain rule the sum is the gradient of whole rows, prompt and completion together.

`policy.train` names the parameters that train, by a path in the parameter tree or a prefix of one: `embedding`,
`blocks.attention` (that layer of every block), `blocks.7` (the whole last block of eight), `blocks.7.attention.q_proj`.
Parameters of blocks are stacked along the first axis, so a leaf that trains in some blocks only becomes two arrays, one
in each tree. The policy and its reference share the frozen arrays.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nautile.common.errors import ConfigError
from nautile.configs.model import ModelConfig
from nautile.configs.training import PolicyConfig, RolloutConfig
from nautile.model.layers.common import Params
from nautile.model.loss import token_logprobs
from nautile.model.nautile import PrefixStates, continue_from, run_prefixes, shapes
from nautile.model.program_thread import program_threads
from nautile.model.sharding import ROWS, OnMesh, on_mesh, parameter_shardings, replicated, row_sharding
from nautile.model.training import optimizer
from nautile.rl.objectives import importance_weights, kl_to_reference, surrogate, tapered_weights

BLOCKS = "blocks"
BATCH_ARRAYS = ("tokens", "targets", "segments", "weights", "sampled", "advantage", "source")
PROMPTS_AT_ONCE = 16  # upper limit: the number of prompts of a step is rarely a multiple of more
CLIP_RATIO = 0.2  # of the probability ratio, as in PPO
USUAL_CAP = 2.0  # of importance weights: what `importance_above_cap` counts where `policy.importance_cap` is None
CPU_TOKENS = 768  # tokens of a micro-batch on CPU, where larger ones are no faster and have more padding

# Gradients with respect to (trained parameters, prompt states).
Pair = tuple[Params, PrefixStates]


class ParameterSubset:
    """Splits parameters into (trained, frozen) trees and joins them. Raises `ConfigError` for an unknown name."""

    def __init__(self, model: ModelConfig, names: Sequence[str]) -> None:
        self._model = model
        leaves = flatten_dict(shapes(model), sep=".")
        # Path of a trained leaf -> the blocks of it that train; None: the whole leaf.
        self._trained_blocks: dict[str, tuple[int, ...] | None] = {}
        for name in names or sorted({path.partition(".")[0] for path in leaves}):
            matches = _matches(name, leaves, model.blocks)
            if not matches:
                parts = sorted({path.rpartition(".")[0] or path for path in leaves})
                raise ConfigError(
                    f"policy.train: no parameter {name!r}; there are {', '.join(parts)}, the parameters in them, and "
                    f"{BLOCKS}.0 to {BLOCKS}.{model.blocks - 1} with the same names inside"
                )
            for path, blocks in matches.items():
                # Two names may select blocks of one leaf: it trains in all of them.
                earlier_blocks = self._trained_blocks.get(path, ())
                merged = None if blocks is None or earlier_blocks is None else tuple(sorted({*earlier_blocks, *blocks}))
                self._trained_blocks[path] = merged
        for path, blocks in self._trained_blocks.items():
            # All blocks by number are the whole leaf, which is then passed on without a copy.
            if blocks == tuple(range(model.blocks)):
                self._trained_blocks[path] = None

    def split(self, params: Params) -> tuple[Params, Params]:
        """Split a parameter tree into (trained, frozen); arrays are copied only where some blocks of a leaf train."""
        trained, frozen = {}, {}
        for path, leaf in flatten_dict(params, sep=".").items():
            blocks = self._trained_blocks.get(path, ())
            if blocks is None:
                trained[path] = leaf
            elif not blocks:
                frozen[path] = leaf
            else:
                trained[path], frozen[path] = leaf[np.array(blocks)], leaf[self._frozen_blocks(blocks)]
        return unflatten_dict(trained, sep="."), unflatten_dict(frozen, sep=".")

    def join(self, trained: Params, frozen: Params) -> Params:
        """Join the two trees of `split` into the whole parameter tree."""
        trained_leaves, frozen_leaves = (flatten_dict(tree, sep=".") for tree in (trained, frozen))
        whole = {}
        for path in sorted({*trained_leaves, *frozen_leaves}):
            blocks = self._trained_blocks.get(path, ())
            if blocks and path in frozen_leaves:
                order = np.argsort(np.concatenate([np.array(blocks), self._frozen_blocks(blocks)]))
                whole[path] = jnp.concatenate([trained_leaves[path], frozen_leaves[path]])[order]
            else:
                whole[path] = trained_leaves.get(path, frozen_leaves.get(path))
        return unflatten_dict(whole, sep=".")

    def _frozen_blocks(self, trained: tuple[int, ...]) -> np.ndarray:
        return np.array([block for block in range(self._model.blocks) if block not in trained])


def _matches(name: str, leaves: Mapping[str, Any], block_count: int) -> dict[str, tuple[int, ...] | None]:
    """The leaves that `name` selects, with the blocks of each (None: all of them); {} for an unknown name."""
    first, _, remainder = name.partition(".")
    index, _, inner_path = remainder.partition(".")
    blocks: tuple[int, ...] | None = None
    if first == BLOCKS and index.isdigit():
        if int(index) >= block_count:
            return {}
        blocks, name = (int(index),), ".".join(filter(None, (BLOCKS, inner_path)))
    return {path: blocks for path in leaves if path == name or path.startswith(f"{name}.")}


class LearnerProgram:
    """The compiled programs of a run's updates and the shardings of their arrays.

    `separate_kl`: return the KL term's gradient separately, not as part of the policy's. `tapered`: weigh off-policy
    completions by `rl.objectives.tapered_weights` in place of the clipped ratio. `rl.ahead_of_time` compiles the
    programs from shapes alone, to estimate their memory.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: PolicyConfig,
        rollout: RolloutConfig,
        separate_kl: bool,
        mesh: Mesh,
        tapered: bool = False,
    ) -> None:
        self.model, self.config, self.rollout, self.mesh = model, config, rollout, mesh
        self.subset = ParameterSubset(model, config.train)
        self.tx = optimizer.build(config.optimizer, config.steps * config.inner_epochs)
        # Only trained parameters have gradients and moments, so training a part of the model takes less memory.
        kinds, frozen_kinds = jax.eval_shape(self.subset.split, shapes(model))
        self.kinds, self.frozen_kinds = kinds, frozen_kinds
        self.shardings = parameter_shardings(kinds, mesh)
        self.frozen_shardings = parameter_shardings(frozen_kinds, mesh)
        self.state_shardings = optimizer.state_shardings(self.tx, kinds, self.shardings, mesh)
        self.initial_state = jax.jit(self.tx.init, out_shardings=self.state_shardings)
        whole = replicated(mesh)
        # Prompt states are [blocks, prompts, ...]: the second axis is split over the devices.
        self.prompt_sharding = prompts = NamedSharding(mesh, PartitionSpec(None, *ROWS))
        parameters = (self.shardings, self.frozen_shardings)
        self.prompts_at_once = -(-min(PROMPTS_AT_ONCE, config.micro_rows, rollout.prompts) // mesh.size) * mesh.size
        # A gradient has two parts: of the parameters, and of the prompt states that `backward_through_prompts` takes
        # on.
        pair = (self.shardings, prompts)

        def on_mesh(function: Any, inputs: Any, outputs: Any, **options: Any) -> OnMesh:
            return OnMesh(mesh, jax.jit(function, in_shardings=inputs, out_shardings=outputs, **options))

        self.encode_prompts = on_mesh(self._encode_prompts, (*parameters, whole), prompts)
        batch = dict.fromkeys(BATCH_ARRAYS, row_sharding(mesh))
        references = (self.shardings, prompts) if config.kl else (None, None)
        inputs = (*parameters, prompts, *references, whole, batch)
        outputs = (pair, pair if separate_kl and config.kl else None, whole)
        # Two versions: with and without the ratio to the log-probabilities that the sampler recorded.
        # Where the two temperatures differ, `sampler_gap` and the ratio measure that difference too.
        temperature = config.temperature or rollout.temperature
        gradients = partial(completion_gradients, model, config, separate_kl, tapered, self.subset, temperature)
        self.completion_gradients = {
            ratio: on_mesh(partial(gradients, ratio), inputs, outputs) for ratio in (True, False)
        }
        self.backward_through_prompts = on_mesh(
            self._backward_through_prompts, (*parameters, whole, pair), self.shardings
        )
        self._threads = program_threads(mesh, mesh.devices.flat[0].platform)
        self._batches_started = 0
        self.add = jax.jit(partial(jax.tree.map, jnp.add), donate_argnums=0, out_shardings=self.shardings)
        self.add_pairs = jax.jit(partial(jax.tree.map, jnp.add), donate_argnums=0, out_shardings=pair)
        self.add_counts = jax.jit(partial(jax.tree.map, jnp.add), donate_argnums=0, out_shardings=whole)

    def place(self, params: Params) -> tuple[Params, Params]:
        """Put parameters on the mesh as (trained, frozen); on one host those that are there already are not copied."""
        trained, frozen = self.subset.split(params)
        return on_mesh(trained, self.shardings), jax.device_put(frozen, self.frozen_shardings)  # no checkpoint has it

    def gradients(self, ratio: bool, *arguments: Any) -> tuple[Pair, Pair | None, dict[str, Array]]:
        """Start `completion_gradients` for a micro-batch; on CPU on alternating threads, so that two run at a time."""
        program = self.completion_gradients[ratio]
        if not self._threads:
            return program(*arguments)
        self._batches_started += 1
        return self._threads[self._batches_started % len(self._threads)](program, *arguments)

    def rows_at(self, width: int, limit: int | None = None) -> int:
        """Rows of a micro-batch of `width` columns, a multiple of the number of devices; on CPU fewer if it is wide."""
        rows, devices = min(self.config.micro_rows, limit or self.config.micro_rows), self.mesh.size
        if self.mesh.devices.flat[0].platform == "cpu":
            rows = min(rows, CPU_TOKENS // width)
        return max(1, rows // devices) * devices

    def _encode_prompts(self, trained: Params, frozen: Params, prompts: Mapping[str, Array]) -> PrefixStates:
        """The states of all prompts, computed in a loop over a few at a time."""
        params = self.subset.join(trained, frozen)

        def encode(start: Array | int) -> PrefixStates:
            return run_prefixes(params, self.model, *self._prompt_slice(prompts, start))

        # A loop with a number of iterations known at run time: padding prompts cost nothing.
        def body(iteration: Array, states: PrefixStates) -> PrefixStates:
            start = iteration * self._prompts_per_iteration(prompts)
            write = partial(lax.dynamic_update_slice_in_dim, start_index=start, axis=1)
            return jax.tree.map(write, states, encode(start))

        kinds, count = jax.eval_shape(encode, 0), prompts["tokens"].shape[0]
        empty = jax.tree.map(lambda kind: jnp.zeros((kind.shape[0], count, *kind.shape[2:]), kind.dtype), kinds)
        return lax.fori_loop(0, self._iterations(prompts), body, empty)

    def _backward_through_prompts(
        self, trained: Params, frozen: Params, prompts: Mapping[str, Array], pair: Pair
    ) -> Params:
        """The gradient with respect to the parameters of whole rows, from the sums of `completion_gradients`.

        The forward pass over the prompts is computed again, a few at a time, instead of keeping its activations.
        """
        gradient, state_gradients = pair

        def body(iteration: Array, total: Params) -> Params:
            start = iteration * self._prompts_per_iteration(prompts)

            def encode(trained: Params) -> PrefixStates:
                return run_prefixes(self.subset.join(trained, frozen), self.model, *self._prompt_slice(prompts, start))

            cotangents = jax.tree.map(
                lambda all_U: lax.dynamic_slice_in_dim(all_U, start, self._prompts_per_iteration(prompts), 1),
                state_gradients,
            )
            return jax.tree.map(jnp.add, total, jax.vjp(encode, trained)[1](cotangents)[0])

        return lax.fori_loop(0, self._iterations(prompts), body, gradient)

    def _prompts_per_iteration(self, prompts: Mapping[str, Array]) -> int:
        """How many prompts an iteration computes; it divides their padded number."""
        return self.prompts_at_once if prompts["tokens"].shape[0] % self.prompts_at_once == 0 else self.mesh.size

    def _iterations(self, prompts: Mapping[str, Array]) -> Array:
        """Iterations over the real prompts, without those that only pad."""
        size = self._prompts_per_iteration(prompts)
        return (prompts["count"] + size - 1) // size

    def _prompt_slice(self, prompts: Mapping[str, Array], start: Array | int) -> list[Array]:
        """Tokens and lengths of the prompts of one iteration, from index `start` on."""
        size = self._prompts_per_iteration(prompts)
        return [lax.dynamic_slice_in_dim(prompts[name], start, size) for name in ("tokens", "lengths")]


def completion_gradients(
    model: ModelConfig,
    config: PolicyConfig,
    separate_kl: bool,
    tapered: bool,
    subset: ParameterSubset,
    temperature: float,
    ratio: bool,
    trained: Params,
    frozen: Params,
    prompt_states: PrefixStates,
    reference: Params | None,
    reference_states: PrefixStates | None,
    lengths_U: Array,
    batch: Mapping[str, Array],
) -> tuple[Pair, Pair | None, dict[str, Array]]:
    """Gradients of the weighted token losses of one micro-batch: (policy, KL, counts).

    Both gradients are with respect to `trained` and `prompt_states`. The KL gradient is None unless `separate_kl`; else
    it is part of the policy's, times `policy.kl`. `reference`: the policy at the start (None: no KL term), which shares
    the `frozen` parameters. `lengths_U`: tokens of each prompt. `batch`: see `rl.training_rows.completion_batches`.

    `ratio` false: the update is taken to be on-policy, and weighed by `policy.importance_cap` if that is set; true: it
    is weighed by the clipped ratio to the log-probabilities recorded at sampling, or by `tapered_weights`. The counts
    are sums over tokens.
    """
    weights_BL = batch["weights"]

    def logprobs(trained: Params, prompt_states: PrefixStates) -> tuple[Array, Array]:
        params = subset.join(trained, frozen)
        hidden_BLD = continue_from(
            params, model, prompt_states, lengths_U, batch["source"], batch["tokens"], batch["segments"]
        )
        return token_logprobs(params, model, hidden_BLD, batch["targets"], temperature=temperature)

    # Outside the differentiated function: the reference's forward pass saves no activations.
    reference_BL = None
    if reference is not None and reference_states is not None:
        reference_BL = lax.stop_gradient(logprobs(reference, reference_states)[0])

    def losses(trained: Params, prompt_states: PrefixStates) -> tuple[tuple[Array, Array], dict[str, Array]]:
        """The weighted sums of the policy loss and of the KL term over all tokens, and the counts."""
        logprobs_BL, entropy_BL = logprobs(trained, prompt_states)
        # On-policy the ratio is 1 by definition. The recorded log-probabilities come from another program, and differ
        # by rounding: that is what the importance weights are for.
        sampled_BL = batch["sampled"] if ratio and not tapered else lax.stop_gradient(logprobs_BL)
        policy_BL, clipped_BL = surrogate(logprobs_BL, sampled_BL, batch["advantage"], CLIP_RATIO)
        if not ratio and config.importance_cap is not None:
            policy_BL *= importance_weights(logprobs_BL, batch["sampled"], config.importance_cap)
        mask_BL = (weights_BL > 0).astype(jnp.float32)
        if ratio and tapered:
            policy_BL *= tapered_weights(logprobs_BL, batch["sampled"], mask_BL, batch["advantage"])
        ratio_BL = importance_weights(logprobs_BL, batch["sampled"], None)
        above_BL = (ratio_BL > (config.importance_cap or USUAL_CAP)).astype(jnp.float32)
        kl_BL = jnp.zeros_like(policy_BL)
        if reference_BL is not None:
            kl_BL = kl_to_reference(logprobs_BL, reference_BL)
        counts = {
            "tokens": jnp.sum(mask_BL),
            "entropy": jnp.sum(entropy_BL * mask_BL),
            "sampler_gap": jnp.sum(jnp.abs(logprobs_BL - batch["sampled"]) * mask_BL),
            "importance_weight": jnp.sum(ratio_BL * mask_BL),
            "importance_above_cap": jnp.sum(above_BL * mask_BL),
            "clip_share": jnp.sum(clipped_BL * mask_BL),
        }
        signs_B1 = jnp.sign(batch["advantage"])[:, None]
        for name, sign in (("positive", 1.0), ("negative", -1.0)):
            side_BL = mask_BL * (signs_B1 == sign)
            counts |= {f"tokens_{name}": jnp.sum(side_BL), f"logprob_{name}": jnp.sum(logprobs_BL * side_BL)}
        if reference_BL is not None:
            counts["kl"] = jnp.sum(kl_BL * mask_BL)
        return (jnp.sum(policy_BL * weights_BL), jnp.sum(kl_BL * weights_BL)), counts

    # One forward pass; a backward pass for each gradient, with the weights of the two losses as cotangents.
    values, backward, counts = jax.vjp(losses, trained, prompt_states, has_aux=True)
    unit, zero = jnp.ones_like(values[0]), jnp.zeros_like(values[0])
    if reference is None:
        return backward((unit, zero)), None, counts
    if not separate_kl:
        return backward((unit, unit * config.kl)), None, counts
    return backward((unit, zero)), backward((zero, unit)), counts
