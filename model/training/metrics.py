"""The account of a training run: sums between two log lines, totals since the start, and the clock of the steps.

What must be the same after a resume (the window's sums, the totals) travels in the checkpoint as JSON, where floats
come back exactly. The clock counts only steps: compilation, validation, saving and sampling stop it.
"""

import math
import statistics
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import numpy as np
import psutil

from common.events import Emit
from model.training.step import StepMetrics


@dataclass
class MetricTotals:
    """Sums over steps. `window` and `latest`: source -> [nats, targets, bytes], since the last log and before it."""

    seconds: float = 0.0
    learnt: int = 0
    skipped: int = 0
    window: dict[str, list[float]] = field(default_factory=dict)
    latest: dict[str, list[float]] = field(default_factory=dict)
    validation: dict[str, dict[str, float]] = field(default_factory=dict)


class TrainMetrics:
    """Reads the metrics of one step after another and reports them every `log_every` steps."""

    def __init__(
        self, emit: Emit, names: tuple[str, ...], tokens: int, steps: int, log_every: int, peak_tokens: float | None
    ) -> None:
        """`peak_tokens`: tokens/s at which the devices would be fully used by the model's own operations, if known."""
        self._emit, self._names, self._tokens, self._steps, self._log_every = emit, names, tokens, steps, log_every
        self._peak_tokens = peak_tokens
        self.account = MetricTotals()
        self.durations: list[float] = []
        self._window_from = 0
        self._last = self._window_began = time.perf_counter()

    def start_clock(self) -> None:
        """Count from now on: called before the first step and after every pause."""
        self._last = time.perf_counter()

    def record(self, step: int, metrics: StepMetrics, bytes_S: np.ndarray) -> float | None:
        """Wait for the metrics of `step`, add them, report; `bytes_S` are those of its targets by source.

        Gives the mean loss; None if the update was not applied.
        """
        loss_S, weight_S = np.asarray(metrics.source_loss_S), np.asarray(metrics.source_weight_S)
        now = time.perf_counter()
        self.durations.append(now - self._last)
        self.account.seconds += now - self._last
        self._last = now
        finite = bool(metrics.finite)
        if finite:
            self.account.learnt += int(weight_S.sum())
            for name, *values in zip(self._names, loss_S, weight_S, bytes_S, strict=True):
                if values[1]:
                    kept = self.account.window.setdefault(name, [0.0, 0.0, 0.0])
                    self.account.window[name] = [old + float(new) for old, new in zip(kept, values, strict=True)]
        else:
            self.account.skipped += 1
        if (step + 1) % self._log_every == 0 or step + 1 == self._steps:
            self._report(step + 1, metrics, finite)
        self._progress(step + 1)
        return float(loss_S.sum() / max(weight_S.sum(), 1.0)) if finite else None

    def facts(self) -> dict[str, Any]:
        """Totals of the run, and the step times of this process (None where nothing was measured here)."""
        account, times = self.account, self.durations
        loss, bits = _means(account.latest)
        return {
            "train_loss": loss,
            "train_bits_per_byte": bits,
            "train_loss_by_source": {name: _means({name: sums})[0] for name, sums in account.latest.items()},
            "targets": account.learnt,
            "skipped_updates": account.skipped,
            "seconds_in_steps": account.seconds,
            "step_seconds_p50": statistics.median(times) if times else None,
            "step_seconds_p95": float(np.percentile(times, 95)) if times else None,
            "tokens_per_second": self._tokens / statistics.median(times) if times else None,
        }

    def saved(self) -> dict[str, Any]:
        """The account as JSON data, for a checkpoint."""
        return asdict(self.account)

    def resume(self, saved: dict[str, Any]) -> None:
        """Go on from what `saved` gave."""
        self.account = MetricTotals(**saved)

    def _report(self, done: int, metrics: StepMetrics, finite: bool) -> None:
        """Emit the window's means and the last step's norms; `done` is the number of steps taken."""
        account = self.account
        times = self.durations[self._window_from :]
        self._window_from = len(self.durations)
        if account.window:
            self._metric("loss", done, _means(account.window)[0])
            self._metric("bits_per_byte", done, _means(account.window)[1])
            if len(self._names) > 1:
                for name, sums in account.window.items():
                    self._metric("loss", done, _means({name: sums})[0], source=name)
            account.latest, account.window = account.window, {}
        if finite:
            self._metric("gradient_norm", done, float(metrics.gradient_norm))
            self._metric("update_norm", done, float(metrics.update_norm))
        self._metric("learning_rate", done, float(metrics.learning_rate))
        self._metric("skipped_updates", done, account.skipped)
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

    def _progress(self, done: int) -> None:
        loss = _means(self.account.window or self.account.latest)[0]
        rate = self._tokens / statistics.median(self.durations[-20:])
        note = f"{rate:,.0f} tokens/s" if loss is None else f"loss {loss:.2f}, {rate:,.0f} tokens/s"
        self._emit("progress", done=done, total=self._steps, unit="steps", note=note)


def memory_in_use() -> int:
    """Bytes held now: on the first device if it says so, else by this process."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_in_use") or psutil.Process().memory_info().rss


def _means(window: dict[str, list[float]]) -> tuple[float | None, float | None]:
    """Nats per target and bits per byte over all sources of a window; None where there is nothing to divide by."""
    nats, targets, count = (sum(sums[i] for sums in window.values()) for i in range(3))
    return (nats / targets if targets else None), (nats / math.log(2) / count if count else None)
