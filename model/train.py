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
from pathlib import Path
from typing import Any

import jax
import numpy as np

from configs.emit import Emit
from configs.model import ModelConfig, TokenizerConfig
from configs.schema import PretrainConfig
from configs.section import ConfigError, Retryable
from data.loader import Batch, Loader
from data.shards import read_index
from data.tokenizer import tokenizer_for
from model.checkpoint import TrainCheckpoints, save_weights
from model.flops import training_flops
from model.health import Health
from model.meter import Meter
from model.nautile import parameter_counts
from model.preemption import termination
from model.samples import Sampler
from model.sharding import make_mesh, put_rows
from model.step import BATCH, Program, StepMetrics, TrainState
from model.validation import validate

logger = logging.getLogger(__name__)


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
    goes on from the last intact one. Raises `ConfigError` for settings and data that do not fit, checkpoints of another
    run, and a run that diverges; `Retryable` after SIGTERM (the step reached is saved) or if a save cannot be written.
    """
    run = _Run(config, model, tokenizer, sources, work, seed, emit)
    try:
        state = run.to_the_end()
    finally:
        run.checkpoints.close()
    save_weights(out, state.params, model, tokenizer)
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
        self.meter = Meter(emit, self.loader.names, self.tokens, self.steps, config.log_every)
        self.health = Health(config.skip_limit)
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
            "flops_per_token": training_flops(self.model, length),
            "compile_seconds": self.compile_seconds,
            "peak_memory_bytes": _peak_memory(),
            "devices": f"{self.mesh.size} x {jax.devices()[0].device_kind}",
        }

    def _start(self) -> tuple[TrainState, int]:
        last = self.checkpoints.latest()
        if last is None:
            return self.program.fresh(), 0
        state, account = self.checkpoints.restore(last, self.program.state_shapes())
        self.meter.resume(account)
        logger.info("resumed from the checkpoint of step %d of %d", last, self.steps)
        return state, last

    def _loop(self, state: TrainState, first: int) -> TrainState:
        began = time.perf_counter()
        step_program = self.program.step.lower(state, self.program.batch_shapes()).compile()
        self.compile_seconds = time.perf_counter() - began
        batch = self.loader.batch(first)
        waiting: tuple[int, StepMetrics, Batch] | None = None
        with termination() as asked:
            self.meter.start_clock()
            for step in range(first, self.steps):
                state, metrics = step_program(state, put_rows({name: batch[name] for name in BATCH}, self.mesh))
                started = step, metrics, batch
                if step + 1 < self.steps:
                    batch = self.loader.batch(step + 1)
                self._record(waiting)
                waiting = started
                done = step + 1
                if asked.is_set() or self._is_stop(done):
                    self._record(waiting)
                    waiting = None
                    self._pause(state, done, asked.is_set())
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
                self.sampler.show(state.params, done)
        if stopping or last or done % config.save_every == 0:
            self.checkpoints.save(done, state, self.meter.saved())
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
        self.health.observe(step, self.meter.record(step, metrics, bytes_S))

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

    Left out is what only changes how the same sums are computed (micro_rows, fsdp, loss_chunk) or what is reported.
    """
    dump = config.model_dump(mode="json")
    return {
        "model": model.model_dump(mode="json"),
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
    stats = jax.devices()[0].memory_stats() or {}
    # ru_maxrss is in kilobytes, except on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return stats.get("peak_bytes_in_use") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
