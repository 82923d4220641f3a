"""The pretraining loop (paper §3.1), which can be stopped and resumed at any moment.

The state is parameters, optimizer state and step, and `Loader.batch` is a pure function of (seed, step): on CPU a run
that is killed and restarted ends with the same bits as one that never stopped. The loop never waits for the step it has
just started: it prepares the next batch, then reads the metrics of the step before. Sums that must survive a resume,
and the state of the detection of divergence, are saved in the checkpoint as JSON, which restores floats exactly.
"""

import hashlib
import logging
import math
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil

from nautile.common.errors import ConfigError, Retryable
from nautile.common.events import Emit, flush, silent
from nautile.common.files import RemoteFiles, sha256_of
from nautile.configs.base import TrainOn
from nautile.configs.keys import key_fields
from nautile.configs.model import ModelConfig, TokenizerConfig, refuse_other_shape
from nautile.configs.training import PretrainConfig
from nautile.data.tokenizer import Tokenizer, tokenizer_for
from nautile.data.tokens.loader import Batch, Loader
from nautile.data.tokens.source_reading import READING, reading_line
from nautile.model.capacity.flops import parameter_counts, training_flops
from nautile.model.capacity.topology import chip_of
from nautile.model.decoding.generate import Generator
from nautile.model.decoding.sampling import Sampling
from nautile.model.layers.common import Params
from nautile.model.processes import StopRequested, termination
from nautile.model.sharding import make_mesh, put_rows, whole_on_hosts
from nautile.model.training.checkpoint import open_checkpoints
from nautile.model.training.step import BATCH, Program, StepMetrics, TrainState
from nautile.model.weights.files import WEIGHTS, load_weights, save_weights

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


class Rollback(Exception):
    """Raised when the run diverged at step `last`: restore a checkpoint and continue after that step."""

    def __init__(self, last: int, why: str) -> None:
        super().__init__(why)
        self.last, self.why = last, why


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
        _check(config, model, tokenizer, self.loader)
        if self.start:
            refuse_other_shape(self.start.folder, "checkpoint", model, tokenizer)
        length, names = self.loader.row_length, self.loader.names
        self.program = Program(config, model, self.mesh, self.steps, len(names), length, pretraining.weights_seed)
        run_identity = identity(replace(pretraining, sources=sources))
        self.checkpoints = open_checkpoints(
            work / "checkpoints", config.keep, run_identity, self.mesh, shared_disk=shared_disk
        )
        self.tokens = config.batch_rows * length
        chip = chip_of(jax.devices()[0].device_kind)
        self.flops = training_flops(model, length)
        peak_tokens = chip.peak * self.mesh.size / self.flops if chip and chip.peak else None
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
        "tokenizer": {**tokenizer.fields, "fingerprint": tokenizer_for(tokenizer).fingerprint},
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
) -> None:
    """Raise `ConfigError` for settings that would fail only after compilation, or train on other data than intended."""
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


SAMPLES_PER_SOURCE = 4
OPENING = 16  # tokens of a plain document that the model continues
PROMPT_LIMIT = 64  # tokens of an opening
MAX_TOKENS = 96  # of a continuation


def validate(program: Program, params: Params, loader: Loader, rows: int) -> dict[str, dict[str, float]]:
    """Mean validation loss of each source over its first `rows` rows: nats per target and bits per byte."""
    results: dict[str, dict[str, float]] = {}
    for source in loader.names:
        batch = loader.validation(source, rows)
        sums = [
            program.evaluate(params, put_rows(part, program.mesh)) for part in _micro_batches(batch, program.micro_rows)
        ]
        nats, targets = (sum(float(pair[i]) for pair in sums) for i in range(2))
        size = int(batch["bytes"].sum())
        if targets and size:
            results[source] = {"loss": nats / targets, "bits_per_byte": nats / math.log(2) / size}
    return results


def _micro_batches(batch: Batch, rows: int) -> Iterator[Batch]:
    """Cut a batch into batches of `rows` rows, the last padded with rows of weight 0; yield this process's share."""
    # Every process evaluates its own rows of each part, and the sums are over all of them.
    share = rows // jax.process_count()
    first = share * jax.process_index()
    for start in range(0, len(batch["source"]), rows):
        part = {name: batch[name][start : start + rows] for name in BATCH}
        missing = rows - len(part["source"])
        padded = {name: np.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1)) for name, array in part.items()}
        yield {name: array[first : first + share] for name, array in padded.items()}


@dataclass(frozen=True)
class Opening:
    """The beginning of a validation document, and its true continuation."""

    source: str
    prompt: tuple[int, ...]
    reference: tuple[int, ...]


class MidtrainSampler:
    """Emits `sample` events with greedy continuations of validation documents. Compiles at the first `show`."""

    def __init__(self, model: ModelConfig, tokenizer: TokenizerConfig, loader: Loader, emit: Emit) -> None:
        self._model, self._loader, self._emit = model.with_tokenizer(tokenizer), loader, emit
        self._tokenizer = tokenizer_for(tokenizer)
        self._generator: Generator | None = None
        self._openings: list[Opening] = []

    def show(self, params: Params, step: int) -> None:
        """Emit one sample per opening, in the set "pretrain-<step>"."""
        if self._generator is None:
            limit = min(PROMPT_LIMIT, self._model.context // 2)
            for source in self._loader.names:
                self._openings += openings(self._loader, source, self._tokenizer, limit)
            if not self._openings:
                return
            longest = max(len(opening.prompt) for opening in self._openings)
            max_tokens = min(MAX_TOKENS, self._model.context - longest)
            stops = (self._tokenizer.im_end, self._tokenizer.end_of_text)
            sampling = Sampling(max_tokens=max_tokens, temperature=0.0, stop_ids=stops)
            self._generator = Generator(self._model, sampling, rows=len(self._openings), prompt_length=longest)
        prompts = [opening.prompt for opening in self._openings]
        seeds = [(step, index) for index in range(len(prompts))]
        for index, completion in enumerate(self._generator(params, prompts, seeds)):
            opening = self._openings[index]
            self._emit(
                "sample",
                set=f"pretrain-{step}",
                index=index,
                step=step,
                source=opening.source,
                prompt=self._tokenizer.decode(opening.prompt),
                text=self._tokenizer.decode(completion.ids.tolist()),
                reference=self._tokenizer.decode(opening.reference),
                truncated=completion.truncated,
            )


def openings(loader: Loader, source: str, tokenizer: Tokenizer, limit: int) -> list[Opening]:
    """Openings from a source's validation rows: at most four, each from the first document of a row.

    A chat document is cut where the assistant's reasoning starts, any other after 16 tokens. Openings of more than
    `limit` tokens, or with nothing after them, are skipped.
    """
    selected = []
    batch = loader.validation(source, 4 * SAMPLES_PER_SOURCE)
    for tokens_L, segments_L in zip(batch["tokens"], batch["segments"], strict=True):
        document = tokens_L[segments_L == 1].tolist()
        is_chat = tokenizer.think_start in document
        cut = document.index(tokenizer.think_start) + 1 if is_chat else OPENING
        if cut <= limit and cut < len(document):
            reference = np.asarray(document[cut : cut + MAX_TOKENS]).tolist()
            selected.append(Opening(source, tuple(document[:cut]), tuple(reference)))
    return selected[:SAMPLES_PER_SOURCE]


@dataclass
class MetricTotals:
    """Sums over steps, saved in checkpoints as JSON under these field names.

    `window` and `latest` map a source to [nats, targets, bytes]: since the last log line, and as reported in it.
    """

    seconds: float = 0.0
    learnt: int = 0  # sum of the targets' weights
    skipped: int = 0  # updates that were not applied
    window: dict[str, list[float]] = field(default_factory=dict)
    latest: dict[str, list[float]] = field(default_factory=dict)
    validation: dict[str, dict[str, float]] = field(default_factory=dict)


class TrainMetrics:
    """Accumulates the metrics of each step and emits them every `log_every` steps.

    Times include only steps, not compilation, validation, saving or sampling.
    """

    def __init__(
        self,
        emit: Emit,
        names: tuple[str, ...],
        tokens: int,
        steps: int,
        log_every: int,
        peak_tokens: float | None,
        closing: str = "",
    ) -> None:
        """`tokens`: per step, padding and prompts included. `closing`: added to the progress note of the last step.

        `peak_tokens`: tokens/s at the peak FLOP/s of the devices; None if unknown.
        """
        self._emit, self._names, self._tokens, self._steps, self._log_every = emit, names, tokens, steps, log_every
        self._peak_tokens, self._closing = peak_tokens, closing
        self.totals = MetricTotals()
        self.durations: list[float] = []
        self._window_from = 0
        self._last = self._window_began = time.perf_counter()

    def start_clock(self) -> None:
        """Start timing steps. Call it before the first step and after every pause."""
        self._last = time.perf_counter()

    def record(self, step: int, metrics: StepMetrics) -> float | None:
        """Wait for the metrics of `step`, add them to the totals, and report.

        Returns the mean loss, or None if the update was skipped.
        """
        loss_S, weight_S, bytes_S = map(np.asarray, metrics[:3])
        # `np.asarray` above waited for the device, so the step ends here.
        now = time.perf_counter()
        self.durations.append(now - self._last)
        self.totals.seconds += now - self._last
        self._last = now
        finite = bool(metrics.finite)
        if finite:
            self.totals.learnt += int(weight_S.sum())
            for name, *values in zip(self._names, loss_S, weight_S, bytes_S, strict=True):
                if values[1]:
                    sums = self.totals.window.setdefault(name, [0.0, 0.0, 0.0])
                    self.totals.window[name] = [old + float(new) for old, new in zip(sums, values, strict=True)]
        else:
            self.totals.skipped += 1
        if (step + 1) % self._log_every == 0 or step + 1 == self._steps:
            self._report(step + 1, metrics, finite)
        mean = _means(self.totals.window or self.totals.latest)[0]
        # A median, which a single slow step does not move.
        rate = self._tokens / statistics.median(self.durations[-20:])
        note = f"{rate:,.0f} tokens/s" if mean is None else f"loss {mean:.2f}, {rate:,.0f} tokens/s"
        if step + 1 == self._steps and self._closing:
            note += f"; {self._closing}"
        self._emit("progress", done=step + 1, total=self._steps, unit="steps", note=note)
        return float(loss_S.sum() / max(weight_S.sum(), 1.0)) if finite else None

    def facts(self) -> dict[str, Any]:
        """Totals of the run, and step times of this process (None if it ran no step), for the manifest."""
        totals, times = self.totals, self.durations
        loss, bits = _means(totals.latest)
        return {
            "train_loss": loss,
            "train_bits_per_byte": bits,
            "train_loss_by_source": {name: _means({name: sums})[0] for name, sums in totals.latest.items()},
            "targets": totals.learnt,
            "skipped_updates": totals.skipped,
            "seconds_in_steps": totals.seconds,
            "step_seconds_p50": statistics.median(times) if times else None,
            "step_seconds_p95": float(np.percentile(times, 95)) if times else None,
            "tokens_per_second": self._tokens / statistics.median(times) if times else None,
        }

    def _report(self, done: int, metrics: StepMetrics, finite: bool) -> None:
        """Emit the window's means and the last step's norms; `done` is the number of steps taken."""
        totals = self.totals
        times = self.durations[self._window_from :]
        self._window_from = len(self.durations)
        if totals.window:
            self._metric("loss", done, _means(totals.window)[0])
            self._metric("bits_per_byte", done, _means(totals.window)[1])
            if len(self._names) > 1:
                for name, sums in totals.window.items():
                    self._metric("loss", done, _means({name: sums})[0], source=name)
            totals.latest, totals.window = totals.window, {}
        if finite:
            self._metric("gradient_norm", done, float(metrics.gradient_norm))
            self._metric("update_norm", done, float(metrics.update_norm))
        self._metric("learning_rate", done, float(metrics.learning_rate))
        self._metric("skipped_updates", done, totals.skipped)
        if times:
            rate = self._tokens / statistics.median(times)
            self._metric("step_seconds", done, statistics.median(times))
            self._metric("step_seconds_p95", done, float(np.percentile(times, 95)))
            self._metric("tokens_per_second", done, rate)
            self._metric("mfu", done, rate / self._peak_tokens if self._peak_tokens else None)
            self._metric("share_in_steps", done, sum(times) / (self._last - self._window_began))
        self._window_began = self._last
        self._metric("memory_bytes", done, memory_in_use())

    def _metric(self, name: str, done: int, value: float | None, **fields: Any) -> None:
        if value is not None:
            self._emit("metric", name=name, step=done, value=value, **fields)


def memory_in_use() -> int:
    """Memory in use, in bytes: of the first device if it reports it, else of this process."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_in_use") or psutil.Process().memory_info().rss


def _means(window: dict[str, list[float]]) -> tuple[float | None, float | None]:
    """Nats per target and bits per byte over all sources of a window; None if a denominator is 0."""
    nats, targets, count = (sum(sums[i] for sums in window.values()) for i in range(3))
    return (nats / targets if targets else None), (nats / math.log(2) / count if count else None)


WINDOW = 128  # losses that a new loss is compared with
MIN_LOSSES = 32  # with fewer, the spread cannot be estimated
NORMAL = 1.4826  # standard deviation of a normal distribution / its median absolute deviation
MIN_SPREAD = 0.02  # as a share of the median: where the loss hardly varies, small changes are no spikes


@dataclass
class DivergenceState:
    """The state of `DivergenceMonitor`, saved in checkpoints as JSON under these field names."""

    losses: list[float] = field(default_factory=list)  # of the last steps, without spikes
    bad: list[int] = field(default_factory=list)  # the latest consecutive steps that were not finite
    high: list[int] = field(default_factory=list)  # the latest consecutive steps above the threshold
    went_back: list[dict[str, Any]] = field(default_factory=list)  # one entry for each rollback


class DivergenceMonitor:
    """Observes the loss of every step and decides when to roll back to a checkpoint.

    A spike is a loss far above the median of the last steps, measured in their median absolute deviation, which a few
    outliers do not change.
    Up to `skip_limit` consecutive steps that are not finite and up to `spike_steps` consecutive spikes are tolerated.
    After more than `rollbacks` rollbacks the run fails.
    """

    def __init__(self, skip_limit: int, spike_factor: float, spike_steps: int, rollbacks: int) -> None:
        self._skip_limit, self._factor = skip_limit, spike_factor
        self._spike_steps, self._rollbacks = spike_steps, rollbacks
        self.state = DivergenceState()

    def new_phase(self) -> None:
        """Forget the losses, because those of another phase's data are not comparable."""
        self.state.losses, self.state.high = [], []

    def observe(self, step: int, loss: float | None) -> bool:
        """Record a step's loss (None: the update was skipped, because loss or gradient was not finite).

        Returns whether the step was normal. Call `decide` afterwards.
        """
        state = self.state
        if loss is None:
            state.bad.append(step)
            logger.warning("step %d: the loss or its gradient is not finite; its update was not applied", step)
            return False
        state.bad = []
        # The threshold comes from the losses before this one, and a spike is not added to them: a second one is as
        # visible.
        limit = self.threshold()
        if limit is None or loss <= limit:
            state.high = []
            state.losses = [*state.losses, loss][-WINDOW:]
            return True
        state.high.append(step)
        logger.warning("step %d: its loss %.3f is above the threshold of %.3f set by the last steps", step, loss, limit)
        return False

    def decide(self, step: int) -> None:
        """Raise `Rollback` after more consecutive abnormal steps than are tolerated."""
        bad, high = self.state.bad, self.state.high
        if len(bad) > self._skip_limit:
            raise Rollback(step, f"the loss or its gradient was not finite in {_run(bad)}")
        if len(high) > self._spike_steps:
            raise Rollback(step, f"the loss was above {self.threshold():.3f} in {_run(high)}")

    def threshold(self) -> float | None:
        """The loss above which a step is a spike; None while there are too few losses, or if `spike_factor` is 0."""
        losses = self.state.losses
        if not self._factor or len(losses) < MIN_LOSSES:
            return None
        middle = statistics.median(losses)
        spread = NORMAL * statistics.median(abs(loss - middle) for loss in losses)
        return middle + self._factor * max(spread, MIN_SPREAD * abs(middle))

    def rolled_back(self, rollback: Rollback, checkpoint: int) -> None:
        """Record that the run restored the checkpoint of step `checkpoint` and continues after `rollback.last`.

        Raises `ConfigError`, listing the reasons, after more rollbacks than allowed.
        """
        state = self.state
        state.bad, state.high = [], []
        state.went_back.append({"step": rollback.last, "checkpoint": checkpoint, "why": rollback.why})
        if len(state.went_back) > self._rollbacks:
            reasons = "; ".join(entry["why"] for entry in state.went_back)
            raise ConfigError(
                f"pretrain: this run does not learn: {reasons}. It went back {self._rollbacks} times "
                "(pretrain.rollbacks); lower pretrain.optimizer.learning_rate or .clip, or raise .warmup_steps"
            )
        logger.warning(
            "%s: restored the checkpoint of step %d; continuing after step %d", rollback.why, checkpoint, rollback.last
        )


def _run(steps: list[int]) -> str:
    return f"{len(steps)} updates in a row (steps {steps[0]} to {steps[-1]})"
