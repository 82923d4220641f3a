"""The pretraining loop (paper §3.1), which can be stopped and resumed at any moment.

The state is parameters, optimizer state and step, and `Loader.batch` is a pure function of (seed, step): on CPU a run
that is killed and restarted ends with the same bits as one that never stopped. The loop never waits for the step it has
just started: it prepares the next batch, then reads the metrics of the step before.
"""

import hashlib
import logging
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from nautile.common.errors import ConfigError, Retryable
from nautile.common.events import Emit, flush, silent
from nautile.common.files import RemoteFiles, sha256_of
from nautile.configs.base import TrainOn
from nautile.configs.keys import key_fields
from nautile.configs.model import ModelConfig, TokenizerConfig
from nautile.configs.training import PretrainConfig
from nautile.data.tokenizer import tokenizer_for
from nautile.data.tokens.loader import Batch, Loader
from nautile.data.tokens.source_reading import READING, reading_line
from nautile.model.capacity.flops import training_flops
from nautile.model.capacity.topology import peak_of
from nautile.model.nautile import parameter_counts
from nautile.model.sharding import make_mesh, put_rows, whole_on_hosts
from nautile.model.training.divergence import DivergenceMonitor, DivergenceState, Rollback
from nautile.model.training.gathered_checkpoint import open_checkpoints
from nautile.model.training.metrics import MetricTotals, TrainMetrics
from nautile.model.training.micro_batches import check_rows
from nautile.model.training.midtrain_eval import MidtrainSampler, validate
from nautile.model.training.preemption import StopRequested, termination
from nautile.model.training.step import BATCH, Program, StepMetrics, TrainState
from nautile.model.weights.files import WEIGHTS, load_weights, save_weights
from nautile.model.weights.start import refuse_other_shape

logger = logging.getLogger(__name__)

SAMPLE_TOKENS = 64  # tokens of a row that are emitted as text after an abnormal step


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run starts from.

    `rows_before`: how many rows of each source it has been trained on; the run continues after them.
    """

    folder: Path
    rows_before: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Pretraining:
    """Everything that determines the weights of a run.

    `sources`: folders of `tokens` artifacts by the names used in mixtures. `start`: a checkpoint for the initial
    weights; optimizer moments, schedule and step start anew. `train_on`: "replies" for the sources whose prompts have
    no weight in the loss.
    """

    config: PretrainConfig
    model: ModelConfig
    tokenizer: TokenizerConfig
    sources: Mapping[str, Path]
    data_seed: int = 0  # of the order of rows
    weights_seed: int = 0  # of the initial parameters, if there is no `start`
    start: Start | None = None
    train_on: Mapping[str, TrainOn] = field(default_factory=dict)


def train(
    pretraining: Pretraining,
    work: Path,
    out: Path,
    emit: Emit,
    remote: RemoteFiles | None = None,
    *,
    shared_disk: bool = True,
) -> dict[str, Any]:
    """Train on the phases of the configuration, write the weights to `out`, and return facts for the manifest.

    work: folder for checkpoints; if it has any, training resumes from the newest intact one.
    remote: reads shards that are not in the folders of the sources.
    shared_disk: whether all processes see the same `work`; if not, the first one saves the checkpoints of all.

    All processes of a pod (`jax.distributed`) call this with the same arguments; each reads its own rows, and only the
    first emits events and writes the weights. Raises `ConfigError` for settings or data that do not fit, checkpoints of
    another run, and a run that diverges; `Retryable` after SIGTERM (the current step is saved) or if a checkpoint
    cannot be written.
    """
    run = _Run(pretraining, work, emit if jax.process_index() == 0 else silent, remote, shared_disk)
    try:
        state = run.train()
    finally:
        run.checkpoints.close()
    params = whole_on_hosts(state.params, run.mesh)
    if jax.process_index() == 0:
        save_weights(out, params, pretraining.model, pretraining.tokenizer)
    return run.facts()


class _Run:
    """One training run. Its parts are created in the order in which they can fail: data, mesh, checkpoints, program."""

    def __init__(
        self, pretraining: Pretraining, work: Path, emit: Emit, remote: RemoteFiles | None, shared_disk: bool
    ) -> None:
        config, model, tokenizer = pretraining.config, pretraining.model, pretraining.tokenizer
        self.start = pretraining.start
        self.config, self.model, self.tokenizer, self.emit = config, model, tokenizer, emit
        sources = _used_sources(config, pretraining.sources)
        before = self.start.rows_before if self.start else {}
        host, hosts = jax.process_index(), jax.process_count()
        self.loader = Loader(
            sources, config.phases, config.batch_rows, pretraining.data_seed, tokenizer, before, host, hosts, remote,
            pretraining.train_on,
        )  # fmt: skip
        self.steps = self.loader.steps
        self.mesh = make_mesh(config.fsdp)
        _check(config, model, tokenizer, self.loader, self.mesh.size)
        if self.start:
            refuse_other_shape(self.start.folder, "checkpoint", model, tokenizer)
        length, names = self.loader.row_length, self.loader.names
        self.program = Program(config, model, self.mesh, self.steps, len(names), length, pretraining.weights_seed)
        run_identity = identity(replace(pretraining, sources=sources))
        self.checkpoints = open_checkpoints(
            work / "checkpoints", config.keep, run_identity, self.mesh, shared_disk=shared_disk
        )
        self.tokens = config.batch_rows * length
        peak = peak_of(jax.devices()[0].device_kind)
        self.flops = training_flops(model, length)
        peak_tokens = peak * self.mesh.size / self.flops if peak else None
        closing = reading_line(self.loader.reading())
        self.metrics = TrainMetrics(emit, names, self.tokens, self.steps, config.log_every, peak_tokens, closing)
        self.divergence = DivergenceMonitor(
            config.skip_limit, config.spike_factor, config.spike_steps, config.rollbacks
        )
        self.sampler = MidtrainSampler(model, tokenizer, self.loader, emit)
        self.compile_seconds: float | None = None

    def train(self) -> TrainState:
        """Restore or initialise the state, run the remaining steps, and return the final state, already saved."""
        state, first = self._start()
        if first < self.steps:
            state = self._loop(state, first)
        if not self.metrics.totals.validation:
            self._validate(state, self.steps)
        return state

    def facts(self) -> dict[str, Any]:
        """Facts for the manifest; None where this process measured nothing."""
        loader, length = self.loader, self.loader.row_length
        counts = parameter_counts(self.model)
        # Peak memory in bytes: of the first device if it reports one, else of this process (ru_maxrss, which is in
        # kilobytes, but in bytes on macOS).
        device = jax.local_devices()[0].memory_stats() or {}
        process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return {
            "steps": self.steps,
            "tokens": self.steps * self.tokens,
            "tokens_by_source": {name: rows * length for name, rows in loader.rows_drawn.items()},
            "rows_drawn": loader.rows_drawn_by(self.steps),
            READING: {name: source.facts() for name, source in loader.reading().items()},
            "parameters": sum(counts.values()),
            "validation": self.metrics.totals.validation,
            **self.metrics.facts(),
            "flops_per_token": self.flops,
            "went_back": self.divergence.state.went_back,
            "compile_seconds": self.compile_seconds,
            "peak_memory_bytes": device.get("peak_bytes_in_use") or process,
            "devices": f"{self.mesh.size} x {jax.devices()[0].device_kind}",
        }

    def _start(self) -> tuple[TrainState, int]:
        """Restore state, totals and divergence monitor from the newest intact checkpoint, or start fresh.

        Returns the state and its step.
        """
        last = self.checkpoints.latest()
        if last is None:
            self.metrics.totals, self.divergence.state = MetricTotals(), DivergenceState()
            state = self.program.fresh()
            if self.start is None:
                return state, 0
            # The initial weights of another checkpoint, sharded as the fresh parameters are.
            # Only the weights: moments, schedule and step are those of a new run.
            params, _, _ = load_weights(self.start.folder)

            def shard(array: np.ndarray, like: jax.Array) -> jax.Array:
                full = np.asarray(array)
                return jax.make_array_from_callback(full.shape, like.sharding, lambda index: full[index])

            return state._replace(params=jax.tree.map(shard, params, state.params)), 0
        state, saved = self.checkpoints.restore(last, self.program.state_shapes())
        self.metrics.totals = MetricTotals(**saved["account"])
        self.divergence.state = DivergenceState(**saved["vitals"])
        logger.info("resumed from the checkpoint of step %d of %d", last, self.steps)
        return state, last

    def _loop(self, state: TrainState, first: int) -> TrainState:
        """Compile the step, and run it from `first` to the end, through any rollbacks."""
        # Compiled before the first step, so that its time is measured apart and is in no step's time.
        started = time.perf_counter()
        step_program = self.program.step.lower(state, self.program.batch_shapes()).compile()
        self.compile_seconds = time.perf_counter() - started
        with termination() as stop_requested:
            while True:
                try:
                    return self._steps(step_program, state, first, stop_requested)
                except Rollback as error:
                    del state
                    # A copy without the traceback, whose frames keep the state in memory.
                    rollback = Rollback(error.last, error.why)
                state, first = self._roll_back(rollback)

    def _roll_back(self, rollback: Rollback) -> tuple[TrainState, int]:
        """Restore the last checkpoint, and continue after the step that diverged: the batches between are skipped.

        Nothing is saved: a run killed before its next checkpoint diverges at the same step and rolls back again.
        """
        # The count of rollbacks is not rolled back.
        went_back = self.divergence.state.went_back
        state, checkpoint = self._start()
        self.divergence.state.went_back = went_back
        self.divergence.rolled_back(rollback, checkpoint)
        first = rollback.last + 1
        if first == self.steps:  # the restored state is the last one, and may be newer than the validation beside it
            self.metrics.totals.validation = {}
        step = jax.device_put(np.int32(first), self.program.shardings.step)
        return state._replace(step=step), first

    def _steps(self, step_program: Any, state: TrainState, first: int, stop_requested: StopRequested) -> TrainState:
        """Run the steps from `first` on. Raises `Rollback`, and `Retryable` after a request to stop.

        The device runs a step while this process prepares the next batch and records the previous step. `unrecorded` is
        the step whose metrics have not been read yet.
        """
        intervals = self.config.save_every, self.config.validate_every, self.config.sample_every
        unrecorded: tuple[int, StepMetrics, Batch] | None = None
        batch = self.loader.batch(first) if first < self.steps else None
        self.metrics.start_clock()
        for step in range(first, self.steps):
            assert batch is not None  # loaded before each of the steps
            state, metrics = step_program(state, put_rows({name: batch[name] for name in BATCH}, self.mesh))
            started = step, metrics, batch
            # While the device computes: load the next batch, and record the previous step.
            if step + 1 < self.steps:
                batch = self.loader.batch(step + 1)
            self._record(unrecorded)
            unrecorded = started
            done = step + 1
            # Asked after every step, as processes of a pod agree on a step that all of them have yet to reach.
            stopping = stop_requested(done)
            # A pause needs the metrics of this step too, so it waits for the device.
            if stopping or done == self.steps or any(done % interval == 0 for interval in intervals):
                self._record(unrecorded)
                unrecorded = None
                self._pause(state, done, stopping)
                self.metrics.start_clock()
        return state

    def _pause(self, state: TrainState, done: int, stopping: bool) -> None:
        """Validate, sample and save when due after `done` steps. Saving is last, so that its totals are complete."""
        config, last = self.config, done == self.steps
        if not stopping:
            if last or done % config.validate_every == 0:
                self._validate(state, done)
            if done % config.sample_every == 0:
                params = whole_on_hosts(state.params, self.mesh)
                if jax.process_index() == 0:
                    self.sampler.show(params, done)
        elif last:  # there may be no time to validate before the save: `train` does it, in this process or in a rerun
            self.metrics.totals.validation = {}
        if stopping or last or done % config.save_every == 0:
            extra = {"account": asdict(self.metrics.totals), "vitals": asdict(self.divergence.state)}
            extra["rows_drawn"] = self.loader.rows_drawn_by(done)
            flush(self.emit)  # a crash must not keep the checkpoint and lose the events before it
            self.checkpoints.save(done, state, extra)
        if stopping or last:
            self.checkpoints.wait()
        if stopping and not last:
            raise Retryable(
                f"pretraining was asked to stop; it is saved at step {done} of {self.steps}, and a rerun resumes there"
            )

    def _record(self, unrecorded: tuple[int, StepMetrics, Batch] | None) -> None:
        """Add a step's metrics, and check its loss. Raises `Rollback`."""
        if unrecorded is None:
            return
        step, metrics, batch = unrecorded
        loss = self.metrics.record(step, metrics)
        # A new phase has other data, so its losses are not comparable with the earlier ones.
        if step and self.loader.phase(step) != self.loader.phase(step - 1):
            self.divergence.new_phase()
        if not self.divergence.observe(step, loss):
            self._emit_batch(step, batch, loss)
        self.divergence.decide(step)

    def _emit_batch(self, step: int, batch: Batch, loss: float | None) -> None:
        """Emit the batch of an abnormal step: its digest, its rows by source, and the first text of each."""
        sources = [self.loader.names[index] for index in batch["source"]]
        firsts = {name: batch["tokens"][sources.index(name)].tolist() for name in sorted(set(sources))}
        self.emit(
            "sample",
            set="trouble",
            index=step,
            step=step,
            loss=loss,
            phase=self.loader.phase(step),
            rows={name: sources.count(name) for name in firsts},
            digest=hashlib.sha256(np.ascontiguousarray(batch["tokens"]).tobytes()).hexdigest(),
            text={name: tokenizer_for(self.tokenizer).decode(ids[:SAMPLE_TOKENS]) for name, ids in firsts.items()},
        )

    def _validate(self, state: TrainState, done: int) -> None:
        results = validate(self.program, state.params, self.loader, self.config.validation_rows)
        self.metrics.totals.validation = results
        for source, values in results.items():
            for name, value in values.items():
                self.emit("metric", name=f"validation_{name}", step=done, value=value, source=source)


def identity(pretraining: Pretraining) -> dict[str, Any]:
    """The settings that must be equal for a run to resume from another's checkpoints.

    Not included: settings that change only how the same sums are computed (micro_rows, fsdp, the form of
    the mixing operator, rematerialisation) or what is reported.
    """
    dump, tokenizer, start = pretraining.config.model_dump(mode="json"), pretraining.tokenizer, pretraining.start
    return {
        **key_fields({"model": pretraining.model.model_dump(mode="json")}),
        "tokenizer": {**tokenizer.model_dump(mode="json"), "fingerprint": tokenizer_for(tokenizer).fingerprint},
        "data": {name: sha256_of(path / "index.json") for name, path in sorted(pretraining.sources.items())},
        "pretrain": {name: dump[name] for name in ("phases", "batch_rows", "optimizer", "z_loss")},
        "seeds": {"data": pretraining.data_seed, "weights": pretraining.weights_seed},
        **({"train_on": dict(pretraining.train_on)} if pretraining.train_on else {}),
        **({"start": sha256_of(start.folder / WEIGHTS), "rows_before": dict(start.rows_before)} if start else {}),
    }


def _used_sources(config: PretrainConfig, sources: Mapping[str, Path]) -> dict[str, Path]:
    """The sources that some mixture names. Raises `ConfigError` if one is missing."""
    if not config.phases:
        raise ConfigError("pretrain.phases is empty; configure at least one phase with `tokens` and `mixture`")
    for phase in config.phases:
        if not phase.mixture:
            raise ConfigError(f"pretrain.phases {phase.name!r}: its mixture is empty; name at least one token source")
        if missing := sorted(set(phase.mixture) - set(sources)):
            raise ConfigError(
                f"pretrain.phases {phase.name!r}: its mixture names {missing}, and the inputs are {sorted(sources)}"
            )
    names = {name for phase in config.phases for name in phase.mixture}
    return {name: sources[name] for name in sorted(names)}


def _check(
    config: PretrainConfig,
    model: ModelConfig,
    tokenizer: TokenizerConfig,
    loader: Loader,
    devices: int,
) -> None:
    """Raise `ConfigError` for settings that would fail only after compilation, or train on other data than intended."""
    check_rows(config, devices)
    if tokenizer.vocabulary > model.vocabulary:
        raise ConfigError(f"model.vocabulary {model.vocabulary} is smaller than the tokenizer's {tokenizer.vocabulary}")
    if loader.row_length > model.context:
        raise ConfigError(f"model.context {model.context} is shorter than the rows of {loader.row_length} tokens")
    for phase in config.phases:
        count = sum(loader.rows[name] for name in phase.mixture)
        if count < config.batch_rows:
            raise ConfigError(
                f"pretrain.phases {phase.name!r}: {', '.join(sorted(phase.mixture))} hold {count} training rows, "
                f"fewer than one batch of pretrain.batch_rows {config.batch_rows}; ingest more or lower it"
            )
    for name in loader.names:
        if loader.epochs(name) > 4:
            logger.warning("pretraining repeats the rows of %s %.1f times", name, loader.epochs(name))
