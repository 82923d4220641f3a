"""The compiled gradients of an update: g+, g- and the KL term's, over prompts and the completions that continue them.

A prompt is the same for all completions of a group, so it is computed once a step. `begin` runs the prompts and keeps
what completions continue from. `pull` gives the gradients of a micro-batch of completions, by the parameters and by
what they continue from. `finish` takes the sum of the latter back through the prompts. By the chain rule the result is
the gradient of whole rows, of prompt and completion together.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from configs.model import ModelConfig
from configs.training import PolicyConfig, RolloutConfig
from model.layers.common import Params
from model.loss import token_logprobs
from model.nautile import PrefixStates, continue_from, run_prefixes, shapes
from model.program_thread import program_threads
from model.sharding import ROWS, OnMesh, optimizer_shardings, parameter_shardings, replicated, row_sharding
from model.training import optimizer
from rl.objectives import kl_to_reference, surrogate
from rl.parameter_subset import ParameterSubset
from rl.training_rows import RowBatch

BATCH_ARRAYS = ("tokens", "targets", "segments", "weights", "sampled", "advantage", "source")
PROMPTS_AT_ONCE = 16  # at most, for those of a step are rarely a multiple of more
CPU_TOKENS = 768  # of a micro-batch on CPU, where more at once is no faster, and more of it is padding

# Gradients by the trained parameters and by what the completions continue from.
Pair = tuple[Params, PrefixStates]


class LearnerProgram:
    """The compiled gradients of a run and the shardings of its arrays; `rl.capacity` compiles it without any data.

    `apart`: the KL term's gradient is kept apart from the others'.
    """

    def __init__(
        self, model: ModelConfig, config: PolicyConfig, rollout: RolloutConfig, apart: bool, mesh: Mesh
    ) -> None:
        self.model, self.config, self.rollout, self.mesh = model, config, rollout, mesh
        self.subset = ParameterSubset(model, config.train)
        self.tx = optimizer.build(config.optimizer, config.steps * config.inner_epochs)
        kinds, frozen_kinds = jax.eval_shape(self.subset.split, shapes(model))
        self.kinds, self.frozen_kinds = kinds, frozen_kinds
        self.shardings = parameter_shardings(kinds, mesh)
        self.frozen_shardings = parameter_shardings(frozen_kinds, mesh)
        self.moments = optimizer_shardings(self.tx, kinds, self.shardings, mesh)
        self.moments_of = jax.jit(self.tx.init, out_shardings=self.moments)
        whole = replicated(mesh)
        self.by_prompts = prompts = NamedSharding(mesh, PartitionSpec(None, *ROWS))
        parameters = (self.shardings, self.frozen_shardings)
        self.prompts_at_once = -(-min(PROMPTS_AT_ONCE, config.micro_rows, rollout.prompts) // mesh.size) * mesh.size
        pair = (self.shardings, prompts)

        def on_mesh(function: Any, inputs: Any, outputs: Any, **options: Any) -> OnMesh:
            return OnMesh(mesh, jax.jit(function, in_shardings=inputs, out_shardings=outputs, **options))

        self.begin = on_mesh(self._begin, (*parameters, whole), prompts)
        batch = dict.fromkeys(BATCH_ARRAYS, row_sharding(mesh))
        references = (self.shardings, prompts) if config.kl else (None, None)
        inputs = (*parameters, prompts, *references, whole, batch)
        outputs = (pair, pair if apart and config.kl else None, whole)
        # With and without the ratio to the sampler's recorded log-probabilities.
        gradients = partial(pull, model, config, apart, self.subset, rollout.temperature)
        self.pull = {ratio: on_mesh(partial(gradients, ratio), inputs, outputs) for ratio in (True, False)}
        self.finish = on_mesh(self._finish, (*parameters, whole, pair), self.shardings)
        self._threads = program_threads(mesh, mesh.devices.flat[0].platform)
        self._started = 0
        self.add = jax.jit(partial(jax.tree.map, jnp.add), donate_argnums=0, out_shardings=self.shardings)
        self.add_pairs = jax.jit(partial(jax.tree.map, jnp.add), donate_argnums=0, out_shardings=pair)
        self.add_counts = jax.jit(partial(jax.tree.map, jnp.add), donate_argnums=0, out_shardings=whole)

    def placed(self, params: Params) -> tuple[Params, Params]:
        """(trained, frozen) of parameters on the mesh; without a copy where they are there already."""
        trained, frozen = self.subset.split(params)
        return jax.device_put(trained, self.shardings), jax.device_put(frozen, self.frozen_shardings)

    def gradients(self, ratio: bool, *arguments: Any) -> tuple[Pair, Pair | None, dict[str, Array]]:
        """`pull`, on CPU by one thread and the other in turn, for micro-batches do not wait for each other."""
        if not self._threads:
            return self.pull[ratio](*arguments)
        self._started += 1
        return self._threads[self._started % len(self._threads)].start(self.pull[ratio], *arguments)

    def at_once(self, width: int, limit: int | None = None) -> int:
        """Completions of a micro-batch of `width` columns: `policy.micro_rows` or `limit`, on CPU fewer if wide."""
        rows, devices = min(self.config.micro_rows, limit or self.config.micro_rows), self.mesh.size
        if self.mesh.devices.flat[0].platform == "cpu":
            rows = min(rows, CPU_TOKENS // width)
        return max(1, rows // devices) * devices

    def _begin(self, trained: Params, frozen: Params, prompts: Mapping[str, Array]) -> PrefixStates:
        """What completions continue from, of all prompts, a few at a time."""
        params = self.subset.join(trained, frozen)

        def some(start: Array | int) -> PrefixStates:
            return run_prefixes(params, self.model, *self._cut(prompts, start))

        def body(number: Array, done: PrefixStates) -> PrefixStates:
            start = number * self._step(prompts)
            part_of = partial(lax.dynamic_update_slice_in_dim, start_index=start, axis=1)
            return jax.tree.map(part_of, done, some(start))

        kinds, count = jax.eval_shape(some, 0), prompts["tokens"].shape[0]
        empty = jax.tree.map(lambda kind: jnp.zeros((kind.shape[0], count, *kind.shape[2:]), kind.dtype), kinds)
        return lax.fori_loop(0, self._loops(prompts), body, empty)

    def _finish(self, trained: Params, frozen: Params, prompts: Mapping[str, Array], pair: Pair) -> Params:
        """The gradient by the parameters of completions with their prompts, from the sums of `pull`."""
        gradient, slopes = pair

        def body(number: Array, total: Params) -> Params:
            start = number * self._step(prompts)

            def some(trained: Params) -> PrefixStates:
                return run_prefixes(self.subset.join(trained, frozen), self.model, *self._cut(prompts, start))

            slope = jax.tree.map(lambda all_U: lax.dynamic_slice_in_dim(all_U, start, self._step(prompts), 1), slopes)
            return jax.tree.map(jnp.add, total, jax.vjp(some, trained)[1](slope)[0])

        return lax.fori_loop(0, self._loops(prompts), body, gradient)

    def _step(self, prompts: Mapping[str, Array]) -> int:
        """How many prompts are computed at a time; it divides their number."""
        return self.prompts_at_once if prompts["tokens"].shape[0] % self.prompts_at_once == 0 else self.mesh.size

    def _loops(self, prompts: Mapping[str, Array]) -> Array:
        step = self._step(prompts)
        return (prompts["count"] + step - 1) // step

    def _cut(self, prompts: Mapping[str, Array], start: Array | int) -> list[Array]:
        """Tokens and lengths of the prompts computed at a time, from number `start` on."""
        step = self._step(prompts)
        return [lax.dynamic_slice_in_dim(prompts[name], start, step) for name in ("tokens", "lengths")]


def pull(
    model: ModelConfig,
    config: PolicyConfig,
    apart: bool,
    subset: ParameterSubset,
    temperature: float,
    ratio: bool,
    trained: Params,
    frozen: Params,
    begun: PrefixStates,
    reference: Params | None,
    reference_begun: PrefixStates | None,
    lengths_U: Array,
    batch: RowBatch | Mapping[str, Array],
) -> tuple[Pair, Pair | None, dict[str, Array]]:
    """Gradients of the weighted sums of one micro-batch: (policy, KL, counts). KL is None unless kept `apart`.

    They are with respect to `trained` and `begun`, what completions continue from; the prompts have `lengths_U` tokens.
    `reference` is the start of `trained` (None: no KL term), and shares `frozen`. `ratio` false: the policy is taken to
    be the one that was sampled (on-policy), else it is weighed by the recorded log-probabilities. The counts are sums
    over tokens, `*_positive` and `*_negative` over those of completions above and below the mean of their group.
    """
    weights_BL = batch["weights"]

    def logprobs(trained: Params, begun: PrefixStates) -> tuple[Array, Array]:
        params = subset.join(trained, frozen)
        hidden_BLD = continue_from(params, model, begun, lengths_U, batch["source"], batch["tokens"], batch["segments"])
        return token_logprobs(params, model, hidden_BLD, batch["targets"], temperature=temperature)

    reference_BL = None
    if reference is not None and reference_begun is not None:
        reference_BL = lax.stop_gradient(logprobs(reference, reference_begun)[0])

    def losses(trained: Params, begun: PrefixStates) -> tuple[tuple[Array, Array], dict[str, Array]]:
        logprobs_BL, entropy_BL = logprobs(trained, begun)
        sampled_BL = batch["sampled"] if ratio else lax.stop_gradient(logprobs_BL)
        policy_BL, clipped_BL = surrogate(logprobs_BL, sampled_BL, batch["advantage"], config.clip_ratio)
        kl_BL = jnp.zeros_like(policy_BL)
        if reference_BL is not None:
            kl_BL = kl_to_reference(logprobs_BL, reference_BL)
        mask_BL = (weights_BL > 0).astype(jnp.float32)
        counts = {
            "tokens": jnp.sum(mask_BL),
            "entropy": jnp.sum(entropy_BL * mask_BL),
            "sampler_gap": jnp.sum(jnp.abs(logprobs_BL - batch["sampled"]) * mask_BL),
            "clip_share": jnp.sum(clipped_BL * mask_BL),
        }
        signs_B1 = jnp.sign(batch["advantage"])[:, None]
        for name, sign in (("positive", 1.0), ("negative", -1.0)):
            side_BL = mask_BL * (signs_B1 == sign)
            counts |= {f"tokens_{name}": jnp.sum(side_BL), f"logprob_{name}": jnp.sum(logprobs_BL * side_BL)}
        if reference_BL is not None:
            counts["kl"] = jnp.sum(kl_BL * mask_BL)
        return (jnp.sum(policy_BL * weights_BL), jnp.sum(kl_BL * weights_BL)), counts

    values, backward, counts = jax.vjp(losses, trained, begun, has_aux=True)
    unit, zero = jnp.ones_like(values[0]), jnp.zeros_like(values[0])
    if reference is None:
        return backward((unit, zero)), None, counts
    if not apart:
        return backward((unit, unit * config.kl)), None, counts
    return backward((unit, zero)), backward((zero, unit)), counts
