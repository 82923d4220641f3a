"""Pretraining (paper §3.1): the loop around the step, and everything that lets it be stopped at any moment.

The state is parameters, optimizer state and step, and `Loader.batch` is a pure function of (seed, step): a run that is
killed and started again is bit-equal, on CPU, to one that never stopped. The loop never waits for the step it has just
started: it prepares the next batch, then reads the metrics of the step before.
"""

import hashlib
import logging
import resource
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np

from common.errors import ConfigError, Retryable
from common.events import Emit, flush, silent
from configs.model import ModelConfig, TokenizerConfig
from configs.training import PretrainConfig
from data.tokenizer import tokenizer_for
from data.tokens.loader import Batch, Loader
from data.tokens.shards import read_index
from model.capacity.flops import peak_of, training_flops
from model.nautile import parameter_counts
from model.sharding import make_mesh, put_rows, whole_on_hosts
from model.training.checkpoint import TrainCheckpoints
from model.training.divergence import DivergenceMonitor, DivergenceState, Rollback
from model.training.metrics import TrainMetrics
from model.training.midtrain_eval import Sampler, validate
from model.training.preemption import Asked, termination
from model.training.step import BATCH, Program, StepMetrics, TrainState
from model.weights.files import save_weights

logger = logging.getLogger(__name__)

SHOWN = 64  # tokens of a row that are set down as text when its step went wrong


def train(
    config: PretrainConfig,
    model: ModelConfig,
    tokenizer: TokenizerConfig,
    sources: dict[str, Path],
    work: Path,
    out: Path,
    seed: int,
    emit: Emit,
) -> dict[str, Any]:
    """Train on the phases of `config` and write the weights to `out`; returns what is worth stating of the run.

    sources: `tokens` artifacts by the names that mixtures use. `work` keeps the checkpoints: if it has any, training
    goes on from the last intact one. Of several processes (`jax.distributed`) all call this with the same arguments,
    each reads its own rows, and the first one reports and writes. Raises `ConfigError` for settings and data that do
    not fit, checkpoints of another run, and a run that diverges; `Retryable` after SIGTERM (the step reached is saved)
    or if a save cannot be written.
    """
    run = _Run(config, model, tokenizer, sources, work, seed, emit if jax.process_index() == 0 else silent)
    try:
        state = run.to_the_end()
    finally:
        run.checkpoints.close()
    params = whole_on_hosts(state.params, run.mesh)
    if jax.process_index() == 0:
        save_weights(out, params, model, tokenizer)
    return run.facts()


class _Run:
    """One run's parts, made in the order in which they can be refused: data, mesh, checkpoints, then compilation."""

    def __init__(
        self,
        config: PretrainConfig,
        model: ModelConfig,
        tokenizer: TokenizerConfig,
        sources: dict[str, Path],
        work: Path,
        seed: int,
        emit: Emit,
    ) -> None:
        self.config, self.model, self.tokenizer, self.emit = config, model, tokenizer, emit
        chosen = _chosen(config, sources)
        hosts = jax.process_count()
        self.loader = Loader(
            chosen, config.phases, config.batch_rows, seed, tokenizer, host=jax.process_index(), hosts=hosts
        )
        self.steps = self.loader.steps
        self.mesh = make_mesh(config.fsdp)
        _check(config, model, tokenizer, self.loader, chosen, self.mesh.size)
        self.program = Program(
            config, model, self.mesh, self.steps, len(self.loader.names), self.loader.row_length, seed
        )
        self.checkpoints = TrainCheckpoints(
            work / "checkpoints", config.keep, identity(config, model, tokenizer, chosen, seed)
        )
        self.tokens = config.batch_rows * self.loader.row_length
        peak = peak_of(jax.devices()[0].device_kind)
        self.flops = training_flops(model, self.loader.row_length)
        peak_tokens = peak * self.mesh.size / self.flops if peak else None
        self.meter = TrainMetrics(emit, self.loader.names, self.tokens, self.steps, config.log_every, peak_tokens)
        self.health = DivergenceMonitor(config.skip_limit, config.spike_factor, config.spike_steps, config.rollbacks)
        self.sampler = Sampler(model, tokenizer, self.loader, emit)
        self.compile_seconds: float | None = None

    def to_the_end(self) -> TrainState:
        """Restore or begin, take the steps that are left, and give the final state; it is saved."""
        state, first = self._start()
        if first < self.steps:
            state = self._loop(state, first)
        if not self.meter.account.validation:
            self._validate(state, self.steps)
        return state

    def facts(self) -> dict[str, Any]:
        """Facts for the manifest. What this process did not measure is None."""
        loader, length = self.loader, self.loader.row_length
        counts = parameter_counts(self.model)
        return {
            "steps": self.steps,
            "tokens": self.steps * self.tokens,
            "tokens_by_source": {name: rows * length for name, rows in loader.rows_drawn.items()},
            "epochs_by_source": {name: round(loader.epochs(name), 3) for name in loader.names},
            "parameters": sum(counts.values()),
            "validation": self.meter.account.validation,
            **self.meter.facts(),
            "flops_per_token": self.flops,
            "went_back": self.health.vitals.went_back,
            "compile_seconds": self.compile_seconds,
            "peak_memory_bytes": _peak_memory(),
            "devices": f"{self.mesh.size} x {jax.devices()[0].device_kind}",
        }

    def _start(self) -> tuple[TrainState, int]:
        """The newest intact checkpoint's state, account and vitals, or fresh ones; and the step it stands at."""
        last = self.checkpoints.latest()
        if last is None:
            self.meter.resume({})
            self.health.vitals = DivergenceState()
            return self.program.fresh(), 0
        state, saved = self.checkpoints.restore(last, self.program.state_shapes())
        self.meter.resume(saved["account"])
        self.health.vitals = DivergenceState(**saved["vitals"])
        logger.info("resumed from the checkpoint of step %d of %d", last, self.steps)
        return state, last

    def _loop(self, state: TrainState, first: int) -> TrainState:
        began = time.perf_counter()
        step_program = self.program.step.lower(state, self.program.batch_shapes()).compile()
        self.compile_seconds = time.perf_counter() - began
        with termination() as asked:
            while True:
                try:
                    return self._steps(step_program, state, first, asked)
                except Rollback as trouble:
                    del state
                    ended = Rollback(trouble.last, trouble.why)  # without its frames, which hold the state in memory
                state, first = self._go_back(ended)

    def _go_back(self, trouble: Rollback) -> tuple[TrainState, int]:
        """The last checkpoint's state, to go on from after the step of the trouble: its batches are passed over.

        A run killed before its next checkpoint meets the same trouble and does the same again, so nothing is saved.
        """
        known = self.health.vitals.went_back
        state, checkpoint = self._start()
        self.health.vitals.went_back = known
        self.health.turned(trouble, checkpoint)
        step = jax.device_put(np.int32(trouble.last + 1), self.program.shardings.step)
        return state._replace(step=step), trouble.last + 1

    def _steps(self, step_program: Any, state: TrainState, first: int, asked: Asked) -> TrainState:
        """The steps from `first` on. Raises `Rollback`, and `Retryable` when it was asked to stop."""
        waiting: tuple[int, StepMetrics, Batch] | None = None
        batch = self.loader.batch(first) if first < self.steps else None
        self.meter.start_clock()
        for step in range(first, self.steps):
            state, metrics = step_program(state, put_rows({name: batch[name] for name in BATCH}, self.mesh))
            started = step, metrics, batch
            if step + 1 < self.steps:
                batch = self.loader.batch(step + 1)
            self._record(waiting)
            waiting = started
            done = step + 1
            stopping = asked(done)
            if stopping or self._is_stop(done):
                self._record(waiting)
                waiting = None
                self._pause(state, done, stopping)
                self.meter.start_clock()
        return state

    def _is_stop(self, done: int) -> bool:
        """Whether something other than a step happens after `done` steps."""
        config = self.config
        return done == self.steps or any(
            done % every == 0 for every in (config.save_every, config.validate_every, config.sample_every)
        )

    def _pause(self, state: TrainState, done: int, stopping: bool) -> None:
        """What is due after `done` steps. The save comes last, so that the account in it is complete."""
        config, last = self.config, done == self.steps
        if not stopping:
            if last or done % config.validate_every == 0:
                self._validate(state, done)
            if done % config.sample_every == 0:
                params = whole_on_hosts(state.params, self.mesh)
                if jax.process_index() == 0:
                    self.sampler.show(params, done)
        if stopping or last or done % config.save_every == 0:
            extra = {"account": self.meter.saved(), "vitals": asdict(self.health.vitals)}
            flush(self.emit)
            self.checkpoints.save(done, state, extra)
        if stopping or last:
            self.checkpoints.wait()
        if stopping and not last:
            raise Retryable(
                f"pretraining was asked to stop; it is saved at step {done} of {self.steps} and goes on from there"
            )

    def _record(self, waiting: tuple[int, StepMetrics, Batch] | None) -> None:
        if waiting is None:
            return
        step, metrics, batch = waiting
        bytes_S = np.bincount(batch["source"], weights=batch["bytes"], minlength=len(self.loader.names))
        loss = self.meter.record(step, metrics, bytes_S)
        if step and self.loader.phase(step) != self.loader.phase(step - 1):
            self.health.new_phase()
        if not self.health.observe(step, loss):
            self._set_down(step, batch, loss)
        self.health.decide(step)

    def _set_down(self, step: int, batch: Batch, loss: float | None) -> None:
        """The batch of a step that went wrong: its digest, what it was drawn from, and the beginning of each source."""
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
            text={name: tokenizer_for(self.tokenizer).decode(ids[:SHOWN]) for name, ids in firsts.items()},
        )

    def _validate(self, state: TrainState, done: int) -> None:
        found = validate(self.program, state.params, self.loader, self.config.validation_rows)
        self.meter.account.validation = found
        for source, values in found.items():
            for name, value in values.items():
                self.emit("metric", name=f"validation_{name}", step=done, value=value, source=source)


def identity(
    config: PretrainConfig, model: ModelConfig, tokenizer: TokenizerConfig, sources: dict[str, Path], seed: int
) -> dict[str, Any]:
    """What makes two runs the same one, so that one may go on from the other's checkpoints.

    Left out is what only changes how the same sums are computed (micro_rows, fsdp, loss_chunk, the form of the mixing
    operator, what is rematerialised) or what is reported.
    """
    dump = config.model_dump(mode="json")
    return {
        "model": model.model_dump(mode="json", exclude={"mixing", "chunk", "remat"}),
        "tokenizer": {**tokenizer.model_dump(mode="json"), "fingerprint": tokenizer_for(tokenizer).fingerprint},
        "data": {
            name: hashlib.sha256((path / "index.json").read_bytes()).hexdigest()
            for name, path in sorted(sources.items())
        },
        "pretrain": {name: dump[name] for name in ("phases", "batch_rows", "optimizer", "z_loss")},
        "seed": seed,
    }


def _chosen(config: PretrainConfig, sources: dict[str, Path]) -> dict[str, Path]:
    """The sources that some mixture names; any other input is left alone. `ConfigError` if one is missing."""
    if not config.phases:
        raise ConfigError("pretrain.phases: there are none; name at least one phase with `tokens` and `mixture`")
    for phase in config.phases:
        if not phase.mixture:
            raise ConfigError(f"pretrain.phases {phase.name!r}: its mixture is empty; name at least one token source")
        if missing := sorted(set(phase.mixture) - set(sources)):
            raise ConfigError(
                f"pretrain.phases {phase.name!r}: its mixture names {missing}, and the inputs are {sorted(sources)}"
            )
    named = {name for phase in config.phases for name in phase.mixture}
    return {name: sources[name] for name in sorted(named)}


def _check(
    config: PretrainConfig,
    model: ModelConfig,
    tokenizer: TokenizerConfig,
    loader: Loader,
    sources: dict[str, Path],
    devices: int,
) -> None:
    """Refuse what would fail only after compilation, or would train on something else than was meant."""
    micro = config.micro_rows or config.batch_rows
    if config.batch_rows % micro:
        raise ConfigError(f"pretrain.batch_rows {config.batch_rows} is not a multiple of pretrain.micro_rows {micro}")
    if micro % devices:
        field = "micro_rows" if config.micro_rows else "batch_rows"
        raise ConfigError(f"pretrain.{field} {micro} does not divide among the {devices} devices of this run")
    if tokenizer.vocabulary > model.vocabulary:
        raise ConfigError(f"model.vocabulary {model.vocabulary} is smaller than the tokenizer's {tokenizer.vocabulary}")
    if loader.row_length > model.context:
        raise ConfigError(f"model.context {model.context} is shorter than the rows of {loader.row_length} tokens")
    rows = {name: read_index(path).rows("train") for name, path in sources.items()}
    for phase in config.phases:
        held = sum(rows[name] for name in phase.mixture)
        if held < config.batch_rows:
            raise ConfigError(
                f"pretrain.phases {phase.name!r}: {', '.join(sorted(phase.mixture))} hold {held} training rows, "
                f"fewer than one batch of pretrain.batch_rows {config.batch_rows}; ingest more or lower it"
            )
    for name in loader.names:
        if loader.epochs(name) > 4:
            logger.warning("pretraining goes over the rows of %s %.1f times", name, loader.epochs(name))


def _peak_memory() -> int:
    """The most memory this run held: of the first device if it says so, else of this process."""
    stats = jax.local_devices()[0].memory_stats() or {}
    # ru_maxrss is in kilobytes, except on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return stats.get("peak_bytes_in_use") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
