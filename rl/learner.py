"""The learner: one optimizer step from a set of scored groups, by accumulating the gradients of micro-batches.

For gradient-balanced GRPO (paper §4.3) the completions are split by the sign of their advantage, so that one forward
and backward pass over each yields g+ and g- separately, summed over the step or over each group. A KL term is not
balanced and then gets a backward pass of its own. Without a KL term, or without balance, one backward pass is enough.

The rows of a micro-batch are split over all devices of a mesh, parameters and optimizer moments over `fsdp` of them.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh

from nautile.common.errors import ConfigError
from nautile.configs.model import ModelConfig
from nautile.configs.training import PolicyConfig, RolloutConfig
from nautile.model.layers.common import Params
from nautile.model.program_thread import working_seconds
from nautile.model.sharding import put_shared_rows, replicated
from nautile.model.training import optimizer
from nautile.rl.objective_registry import Balance
from nautile.rl.objectives import Aggregate, balance, token_weights
from nautile.rl.policy_gradient import LearnerProgram
from nautile.rl.rewards import carries_signal
from nautile.rl.rollouts import Group
from nautile.rl.training_rows import TrainingRow, completion_batches, prompts_of

logger = logging.getLogger(__name__)

NAMES_SHOWN = 3  # names of parameters in a message


@dataclass
class SkippedUpdates:
    """Counts the skipped updates: `total`, and the steps of the current run of consecutive ones, `in_row`.

    `limit`: how many may follow each other. `section`: the section of the configuration that messages name.
    """

    limit: int
    section: str
    total: int = 0
    in_row: list[int] = field(default_factory=list)

    def record(self, step: int, measured: Mapping[str, Any], params: Params) -> bool:
        """Record the update of `step`, with what `finite_update` measured; returns whether it was applied.

        `params`: the tree of the gradient, for names. Raises `ConfigError` if more than `limit` updates in a row were
        skipped.
        """
        if measured["applied"]:
            self.in_row = []
            return True
        # The parameters and moments are as before. Name what went wrong while the evidence is at hand.
        self.total += 1
        self.in_row.append(step)
        leaves = jax.tree_util.tree_leaves_with_path(params)
        paths = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
        names = [path for path, flag in zip(paths, np.asarray(measured["not_finite"]), strict=True) if flag]
        others = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        evidence = (
            f"the gradients of {', '.join(names[:NAMES_SHOWN])}{others}, of {len(paths)} parameters, are not finite"
            if names
            else f"the norms are {measured['grad_norm']} of the gradient and {measured['update_norm']} of the update"
        )
        logger.warning("step %d: the update is not finite and was not applied: %s", step, evidence)
        if len(self.in_row) > self.limit:
            raise ConfigError(
                f"{self.section}: {len(self.in_row)} updates in a row were not finite (steps {self.in_row[0]} to "
                f"{step}), more than {self.section}.skip_limit {self.limit} allows; none was applied. In the last "
                f"{evidence}. Lower {self.section}.optimizer.learning_rate or .clip, or raise .warmup_steps"
            )
        return False


class Learner:
    """The policy, its optimizer state, and the copy of the policy that completions are sampled from.

    `balance` None: the plain sum of all gradients. `tokens` and `seconds`: of all updates, without compilation.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: PolicyConfig,
        rollout: RolloutConfig,
        params: Params,
        balance: Balance | None,
        mesh: Mesh,
    ) -> None:
        self.config, self.rollout, self.balance, self.mesh = config, rollout, balance, mesh
        self.program = LearnerProgram(
            model, config, rollout, balance is not None, mesh, balance is not None and balance.objective.tapered
        )
        # The two trees are joined in the programs; between steps only the trained one changes.
        self.trained, self.frozen = self.program.place(params)
        # The reference of the KL term is the start itself: the same arrays, kept alive only where a KL term needs them.
        # Frozen parameters are shared with the policy.
        self.reference = self.trained if config.kl else None
        self._schedule = optimizer.schedule(config.optimizer, config.steps * config.inner_epochs)
        self.state = self.program.initial_state(self.trained)
        self.steps = self.updates = 0  # calls of `update`, and optimizer steps that were applied
        # The parameters that the sampler uses, and the value of `steps` when they were copied from the policy.
        self._sampling, self._synced_at = self.trained, 0
        self.skipped = SkippedUpdates(config.skip_limit, "policy")
        self.tokens, self.seconds = 0, 0.0
        self.factors: list[float] = []  # on g-, of the last pass: one for each group, or one for the step
        shardings, whole = self.program.shardings, replicated(mesh)
        self._add_balanced_group = jax.jit(self._add_balanced, donate_argnums=0, out_shardings=(shardings, whole))
        outs = (shardings, self.program.state_shardings, whole)
        self._apply = jax.jit(self._update, donate_argnums=1, out_shardings=outs)
        if not config.ratio and (config.inner_epochs > 1 or config.sync_every > 1):
            logger.warning(
                "policy.ratio is false with policy.inner_epochs %d and policy.sync_every %d: updates on completions of "
                "an earlier policy are neither weighed by the probability ratio nor clipped, as if they were on-policy",
                config.inner_epochs, config.sync_every,
            )  # fmt: skip

    @property
    def params(self) -> Params:
        """All parameters of the policy, trained and frozen."""
        return self.program.subset.join(self.trained, self.frozen)

    @property
    def sampling_params(self) -> Params:
        """All parameters of the policy that completions are sampled from; it is up to `sync_every` - 1 steps old."""
        return self.program.subset.join(self._sampling, self.frozen)

    def set(self, params: Params) -> None:
        """Replace the policy by `params` with fresh moments; the learning-rate schedule keeps its position."""
        # The moments belong to the policy that is given up; the schedule belongs to the stage.
        update_count = optimizer.applied(self.state)
        self.trained = self.program.place(params)[0]
        self.state = _with_update_count(self.program.initial_state(self.trained), update_count)
        self._sampling, self._synced_at = self.trained, self.steps

    def state_to_save(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state for a checkpoint, as `restore` takes it: (arrays, JSON data)."""
        arrays = {"params": self.trained, "state": self.state}
        if self.config.sync_every > 1:
            arrays["sampling"] = self._sampling
        skipped = {"total": self.skipped.total, "in_row": self.skipped.in_row}
        return arrays, {"steps": self.steps, "updates": self.updates, "copied": self._synced_at, "skipped": skipped}

    def restore(self, arrays: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        """Restore what `state_to_save` returned."""
        self.trained, self.state = arrays["params"], arrays["state"]
        self._sampling = arrays.get("sampling", self.trained)
        self.steps, self.updates, self._synced_at = extra["steps"], extra["updates"], extra["copied"]
        self.skipped.total, self.skipped.in_row = extra["skipped"]["total"], list(extra["skipped"]["in_row"])

    def update(self, groups: Sequence[Group], drawn: int | None = None) -> dict[str, float]:
        """Update the policy on the groups that carry a signal (`inner_epochs` passes); returns the last pass's metrics.

        `drawn`: groups that the step drew, by which `policy.group_weights` "drawn" divides (None: those in `groups`). A
        metric that is not finite is left out. Raises `ConfigError` after more than `skip_limit` updates in a row that
        were not finite.
        """
        start_time = working_seconds()
        metrics: dict[str, float] = {}
        count = (drawn or len(groups)) if self.config.group_weights == "drawn" else None
        rows = rows_of(groups, self.config.aggregate, count, self.config.mask_truncated)
        for epoch in range(self.config.inner_epochs if rows else 0):
            # On-policy only in the first pass, and only if the sampler has the current parameters.
            off_policy = epoch > 0 or self._synced_at < self.steps
            metrics = self._pass(rows, self.config.ratio and off_policy)
        self.steps += 1
        if self.steps - self._synced_at >= self.config.sync_every:
            self._sampling, self._synced_at = self.trained, self.steps
        self.seconds += working_seconds() - start_time
        return metrics

    def _pass(self, groups: list[list[TrainingRow]], ratio: bool) -> dict[str, float]:
        """One optimizer step on all groups; returns its metrics. `ratio`: weigh by the ratio to the sampled policy."""
        shared: dict[str, Any] = {}  # sums over all rows: "counts", and "kl" where its gradient is separate
        group_norms: list[dict[str, Array]] = []  # with balance over groups: one entry per group
        if self.balance is None or not self.balance.by_group:
            rows = [row for group in groups for row in group]
            plus, minus = self._signed_gradients(rows, ratio, shared)
        else:
            # A group has few rows of either sign: micro-batches of half a group keep the padding small.
            half = -(-max(map(len, groups)) // 2)
            row_limit = -(-half // self.mesh.size) * self.mesh.size
            plus, minus = None, None  # `plus` becomes the sum of the balanced gradients of all groups
            for group in groups:
                plus, norms = self._add_balanced_group(plus, *self._signed_gradients(group, ratio, shared, row_limit))
                group_norms.append(norms)
        self.trained, self.state, measured = self._apply(self.trained, self.state, plus, minus, shared.get("kl"))
        # The only place that waits for the device: until here all micro-batches are dispatched asynchronously.
        counts, host_norms, measured = jax.device_get((shared["counts"], group_norms, measured))
        self.updates += self.skipped.record(self.steps + 1, measured, self.trained)
        values = means_of(counts)
        values |= {name: value for name, value in measured.items() if name not in ("applied", "not_finite")}
        for name in host_norms[0] if host_norms else ():
            finite_norms = [norms[name] for norms in host_norms if np.isfinite(norms[name])]
            values[name] = float(np.mean(finite_norms or [np.nan]))
        factors = [norms["balance_factor"] for norms in host_norms or [values] if "balance_factor" in norms]
        self.factors = [float(factor) for factor in factors if np.isfinite(factor)]
        finite = {name: float(value) for name, value in values.items() if np.isfinite(value)}
        return finite | {"skipped_updates": float(self.skipped.total)}

    def _signed_gradients(
        self, rows: list[TrainingRow], ratio: bool, shared: dict[str, Any], row_limit: int | None = None
    ) -> tuple[Any, Any]:
        """(g+, g-) of the rows (paper §4.3), or (their sum, None) without balance.

        Adds the counts to `shared["counts"]` and a separate KL gradient to `shared["kl"]`. `row_limit`: the most rows
        of a micro-batch; it is given where all rows belong to one group.
        """
        program, rollout, devices = self.program, self.rollout, self.mesh.size
        # Pad the prompts to few different counts, for each is compiled apart.
        least, multiple = (rollout.prompts, program.prompts_at_once) if row_limit is None else (1, devices)
        prompts, numbered_rows = prompts_of(rows, rollout.prompt_length, least, multiple)
        prompt_states = program.encode_prompts(self.trained, self.frozen, prompts)
        reference_states = None
        if self.reference is not None:
            reference_states = program.encode_prompts(self.reference, self.frozen, prompts)
        # Split the rows by sign. Rows of zero advantage only matter to the KL term.
        positive = [(row, source) for row, source in numbered_rows if row.advantage > 0]
        negative = [(row, source) for row, source in numbered_rows if row.advantage < 0]
        neutral = [(row, source) for row, source in numbered_rows if row.advantage == 0 and self.reference is not None]
        if self.balance is None:
            rows_by_sign = {"plus": positive + negative + neutral}
        else:
            rows_by_sign = {"plus": positive, "minus": negative + neutral}
        pairs: dict[str, Any] = {}
        for sign, signed_rows in rows_by_sign.items():
            for batch in completion_batches(signed_rows, rollout.max_tokens, partial(program.rows_at, limit=row_limit)):
                # Dispatched, not waited for: the host prepares the next batch while the device computes.
                gradients, kl_gradients, counts = program.gradients(
                    ratio, self.trained, self.frozen, prompt_states, self.reference, reference_states,
                    prompts["lengths"], put_shared_rows(batch, self.mesh),
                )  # fmt: skip
                self._accumulate(program.add_pairs, pairs, sign, gradients)
                self._accumulate(program.add_pairs, pairs, "kl", kl_gradients)
                self._accumulate(program.add_counts, shared, "counts", counts)
                self.tokens += int((batch["weights"] > 0).sum())
        # Back-propagate each sum through the prompts; a sign without rows has a zero gradient.
        sums = {
            sign: program.backward_through_prompts(self.trained, self.frozen, prompts, pair)
            for sign, pair in pairs.items()
        }
        self._accumulate(program.add, shared, "kl", sums.get("kl"))
        for sign in rows_by_sign.keys() - sums.keys():
            sums[sign] = jax.tree.map(jnp.zeros_like, next(iter(sums.values())))
        return sums["plus"], sums.get("minus")

    def _accumulate(self, add: Any, sums: dict[str, Any], name: str, values: Any) -> None:
        """Add `values` to `sums[name]` in place on the device; None is skipped."""
        if values is not None:
            sums[name] = add(sums[name], values) if name in sums else values

    def _add_balanced(self, total: Any, plus: Any, minus: Any) -> tuple[Any, dict[str, Array]]:
        """Add the balanced gradient of one group to `total` (None: no group yet); also returns the group's norms."""
        assert self.balance is not None
        gradient, norms = balance(plus, minus, self.balance)
        return (gradient if total is None else jax.tree.map(jnp.add, total, gradient)), norms

    def _update(
        self, params: Params, state: Any, plus: Any, minus: Any, kl: Any
    ) -> tuple[Params, Any, dict[str, Array]]:
        """The optimizer step on g+, g- (None: `plus` is the whole) and the KL gradient (None: no term, or in `plus`).

        Also returns the learning rate, the norms, and what `finite_update` measured.
        """
        norms: dict[str, Array] = {"learning_rate": self._schedule(optimizer.applied(state))}
        total = plus
        if minus is not None and self.balance is not None:
            total, balance_norms = balance(plus, minus, self.balance)
            norms |= balance_norms
        if kl is not None:
            # The KL term is added after the balance, which is between the two signs of the policy gradient alone.
            total = jax.tree.map(lambda a, b: a + self.config.kl * b, total, kl)
        params, state, measured = optimizer.finite_update(self.program.tx, params, state, total)
        return params, state, norms | measured


def rows_of(
    groups: Sequence[Group],
    aggregate: Aggregate = "group_tokens",
    group_count: int | None = None,
    mask_truncated: bool = False,
) -> list[list[TrainingRow]]:
    """Training rows of the scored completions of all groups with a signal, group by group, with their token weights.

    `group_count`: see `token_weights`. `mask_truncated`: without the completions that were cut off. A token that the
    sampler inserted (the end of a thinking budget) was not chosen by the policy: its weight is zero.
    """
    trained = [group.trained(mask_truncated) for group in groups]
    live = [rollouts for rollouts in trained if carries_signal([r.advantage for r in rollouts])]
    lengths = [[len(r.ids) - (r.forced is not None) for r in rollouts] for rollouts in live]
    weights = token_weights(lengths, aggregate, group_count)
    return [
        [
            TrainingRow(r.prompt_ids, r.ids, r.logprobs, r.advantage or 0.0, weight, r.forced)
            for r, weight in zip(group, group_weights, strict=True)
        ]
        for group, group_weights in zip(live, weights, strict=True)
    ]


def means_of(counts: Mapping[str, float]) -> dict[str, float]:
    """Divide each sum in `counts` by its number of tokens (each sign has its own); without tokens it is left out."""
    means = {}
    for name, total in counts.items():
        tokens = counts[name.replace("logprob", "tokens") if name.startswith("logprob") else "tokens"]
        if tokens and not name.startswith("tokens"):
            means[name] = total / tokens
    return means


def _with_update_count(state: Any, count: Array) -> Any:
    """An optimizer state whose learning-rate schedule stands at `count` updates."""

    def set_count(leaf: Any) -> Any:
        return leaf._replace(count=count) if isinstance(leaf, optax.ScaleByScheduleState) else leaf

    return jax.tree.map(set_count, state, is_leaf=lambda leaf: isinstance(leaf, optax.ScaleByScheduleState))
