"""Metrics of a training run: means between two log lines, totals since the start, and step times.

The sums that must survive a resume are saved in the checkpoint as JSON, which restores floats exactly. Times include
only steps, not compilation, validation, saving or sampling.
"""

import math
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import psutil

from nautile.common.events import Emit
from nautile.model.training.step import StepMetrics


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
    """Accumulates the metrics of each step and emits them every `log_every` steps."""

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
        # The progress line: mean loss since the last log line, and the median speed of the last 20 steps.
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
