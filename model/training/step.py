"""The training step: a pure function of (parameters, optimizer state, step) and a batch, jitted with donated state.

The gradient is that of Σ weighted losses / Σ weights over the whole batch, for any number of micro-batches: sums are
accumulated and divided once. If the loss or the gradient is not finite, the update is skipped: parameters, moments and
the schedule's count do not change, and `StepMetrics.finite` is false.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nautile.configs.base import OptimizerConfig
from nautile.configs.model import ModelConfig
from nautile.configs.training import PretrainConfig
from nautile.model.layers.common import Params
from nautile.model.loss import LossSums, weighted_loss
from nautile.model.nautile import initialise, shapes
from nautile.model.sharding import ROWS, OnMesh, parameter_shardings, replicated, row_sharding
from nautile.model.training.optimizer import applied, build, finite_update, schedule, state_shardings

BATCH = ("tokens", "targets", "segments", "positions", "weights", "source", "bytes")
OF_ROWS = ("source", "bytes")  # those with one number per row


class TrainState(NamedTuple):
    """The state of a training run. `step` (int32 scalar) counts batches, including those whose update was skipped."""

    params: Params
    opt_state: Any
    step: Array


def state_like(model: ModelConfig, optimizer: OptimizerConfig) -> TrainState:
    """The shapes of a state on the first device, for reading a checkpoint that was saved on any mesh."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = shapes(model)
    opt_state, step = jax.eval_shape(build(optimizer, 1).init, params), jax.ShapeDtypeStruct((), jnp.int32)
    state = TrainState._make((params, opt_state, step))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), state)


class StepMetrics(NamedTuple):
    """Metrics of one batch, of all processes' rows. Losses are sums in nats over weighted targets, by source [S].

    float32, except `finite` and the bytes of the targets (int32).
    """

    source_loss_S: Array
    source_weight_S: Array
    source_bytes_S: Array
    gradient_norm: Array
    update_norm: Array
    learning_rate: Array
    finite: Array


class Program:
    """The jitted functions of a run on a mesh: `fresh`, `step` and `evaluate`, and the shardings of the state.

    A global batch has `rows` rows of `length` tokens from `sources` numbered sources; `micro_rows` of them go through
    the model at once.
    """

    def __init__(
        self, config: PretrainConfig, model: ModelConfig, mesh: Mesh, steps: int, sources: int, length: int, seed: int
    ) -> None:
        self.mesh, self.rows, self.length = mesh, config.batch_rows, length
        self.micro_rows = config.rows_at_once(mesh.size)
        # `tx` is the usual optax name of an optimizer (gradient transformation).
        tx, rate = build(config.optimizer, steps), schedule(config.optimizer, steps)
        abstract = shapes(model)
        params = parameter_shardings(abstract, mesh)
        self.shardings = TrainState._make((params, state_shardings(tx, abstract, params, mesh), replicated(mesh)))
        whole, rows = replicated(mesh), row_sharding(mesh)

        # Compiled with the shardings of the state, so no device ever has all of it.
        def fresh() -> TrainState:
            masters = initialise(model, seed)
            return TrainState(masters, tx.init(masters), jnp.zeros((), jnp.int32))

        def losses(params: Params, batch: dict[str, Array]) -> LossSums:
            return weighted_loss(params, model, batch, z_loss=config.z_loss)

        def step(state: TrainState, batch: dict[str, Array]) -> tuple[TrainState, StepMetrics]:
            gradient, sums = _accumulate(losses, state.params, batch, self.micro_rows, sources, params, mesh)
            loss, source_loss_S, source_weight_S = sums
            # A batch without weighted targets has a gradient of zero, not of NaN.
            total = jnp.maximum(jnp.sum(source_weight_S), 1.0)
            gradient = jax.tree.map(lambda leaf: leaf / total, gradient)
            learning_rate = rate(applied(state.opt_state))
            masters, opt_state, measured = finite_update(tx, state.params, state.opt_state, gradient, loss)
            norms = measured["grad_norm"], measured["update_norm"]
            # Summed here and not on the host, which only has its own rows of the batch.
            source_bytes_S = jax.ops.segment_sum(batch["bytes"], batch["source"], sources)
            by_source = source_loss_S, source_weight_S, source_bytes_S
            metrics = StepMetrics(*by_source, *norms, learning_rate, measured["applied"])
            return TrainState(masters, opt_state, state.step + 1), metrics

        def evaluate(params: Params, batch: dict[str, Array]) -> tuple[Array, Array]:
            sums = losses(params, batch)
            return jnp.sum(sums.row_loss_B), sums.weight

        # Every array of a batch is split by rows. The state is donated: its buffers hold the next state.
        batch = dict.fromkeys(BATCH, rows)
        self.fresh: Callable[[], TrainState] = jax.jit(fresh, out_shardings=self.shardings)
        jitted_step = jax.jit(
            step, in_shardings=(self.shardings, batch), out_shardings=(self.shardings, whole), donate_argnums=0
        )
        jitted_evaluate = jax.jit(evaluate, in_shardings=(self.shardings.params, batch), out_shardings=(whole, whole))
        self.step, self.evaluate = OnMesh(mesh, jitted_step), OnMesh(mesh, jitted_evaluate)

    def state_shapes(self) -> TrainState:
        """The state as `ShapeDtypeStruct`s with shardings, for restoring a checkpoint."""
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            jax.eval_shape(self.fresh),
            self.shardings,
        )

    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of a global batch, for compiling `step` without data."""
        dtypes = {name: jnp.float32 if name == "weights" else jnp.int32 for name in BATCH}
        full = {name: (self.rows,) if name in OF_ROWS else (self.rows, self.length) for name in BATCH}
        sharding = row_sharding(self.mesh)
        return {name: jax.ShapeDtypeStruct(full[name], dtypes[name], sharding=sharding) for name in BATCH}


# The differentiated loss, the cross-entropy by source [S], the weight by source [S].
BatchSums = tuple[Array, Array, Array]


def _accumulate(
    losses: Callable[[Params, dict[str, Array]], LossSums],
    params: Params,
    batch: dict[str, Array],
    micro_rows: int,
    sources: int,
    shardings: Params,
    mesh: Mesh,
) -> tuple[Params, BatchSums]:
    """Sum the gradient, the loss and its parts by source over the micro-batches of a batch."""

    def part(micro: dict[str, Array]) -> tuple[Params, BatchSums]:
        def scalar(masters: Params) -> tuple[Array, LossSums]:
            sums = losses(masters, micro)
            return sums.loss, sums

        (loss, sums), gradient = jax.value_and_grad(scalar, has_aux=True)(params)
        rows = jnp.stack([sums.row_loss_B, sums.row_weight_B], axis=1)
        by_source = jax.ops.segment_sum(rows, micro["source"], sources)
        return jax.lax.with_sharding_constraint(gradient, shardings), (loss, by_source[:, 0], by_source[:, 1])

    count = batch["tokens"].shape[0] // micro_rows
    if count == 1:
        return part(batch)

    def split(array: Array) -> Array:
        # Every count-th row, so that each device's rows stay on it.
        micro = jnp.swapaxes(array.reshape(micro_rows, count, *array.shape[1:]), 0, 1)
        return jax.lax.with_sharding_constraint(micro, NamedSharding(mesh, PartitionSpec(None, *ROWS)))

    def body(carry: tuple[Params, BatchSums], micro: dict[str, Array]) -> tuple[tuple[Params, BatchSums], None]:
        return jax.tree.map(jnp.add, carry, part(micro)), None

    # The accumulated gradient is sharded as the parameters are.
    start = jax.lax.with_sharding_constraint(jax.tree.map(jnp.zeros_like, params), shardings)
    zero_sums = (jnp.zeros(()), jnp.zeros(sources), jnp.zeros(sources))
    total, _ = jax.lax.scan(body, (start, zero_sums), jax.tree.map(split, batch))
    return total
