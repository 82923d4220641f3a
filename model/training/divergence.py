"""Noticing a run that no longer learns, and going back: losses or gradients that are not finite, and spikes.

A spike is judged against the losses of the last steps by their median and their median deviation from it, which a few
wild steps do not move. What is judged by travels in the checkpoint, so a resumed run decides as the uninterrupted one.
"""

import logging
import statistics
from dataclasses import dataclass, field
from typing import Any

from common.errors import ConfigError

logger = logging.getLogger(__name__)

WINDOW = 128  # losses that a new one is held against
ENOUGH = 32  # fewer say nothing of their spread
NORMAL = 1.4826  # the median deviation of a normal distribution, times this, is its standard deviation
LEAST = 0.02  # of the median: a loss that hardly varies must not make a spike of every ripple


class Rollback(Exception):
    """The run has left the road at step `last`: to be resumed from a checkpoint, past that step."""

    def __init__(self, last: int, why: str) -> None:
        super().__init__(why)
        self.last, self.why = last, why


@dataclass
class DivergenceState:
    """What `DivergenceMonitor` remembers, as JSON data: recent losses, and the times that the run went back."""

    losses: list[float] = field(default_factory=list)
    bad: list[int] = field(default_factory=list)  # steps in a row, up to now, that were not finite
    high: list[int] = field(default_factory=list)  # or above the threshold
    went_back: list[dict[str, Any]] = field(default_factory=list)


class DivergenceMonitor:
    """Follows the steps in order. `skip_limit` and `spike_steps` in a row are borne; `rollbacks` times it goes back."""

    def __init__(self, skip_limit: int, spike_factor: float, spike_steps: int, rollbacks: int) -> None:
        self._skip_limit, self._factor = skip_limit, spike_factor
        self._spike_steps, self._rollbacks = spike_steps, rollbacks
        self.vitals = DivergenceState()

    def new_phase(self) -> None:
        """Other data, other losses: nothing to compare with."""
        self.vitals.losses, self.vitals.high = [], []

    def observe(self, step: int, loss: float | None) -> bool:
        """Take note of one step's loss (None: it or its gradient was not finite, and was not applied).

        Gives whether all is well; `decide` says what follows if it is not.
        """
        vitals = self.vitals
        if loss is None:
            vitals.bad.append(step)
            logger.warning("step %d: the loss or its gradient is not finite; its update was not applied", step)
            return False
        vitals.bad = []
        limit = self.threshold()
        if limit is None or loss <= limit:
            vitals.high = []
            vitals.losses = [*vitals.losses, loss][-WINDOW:]
            return True
        vitals.high.append(step)
        logger.warning("step %d: its loss %.3f is above %.3f, what the last steps let expect", step, loss, limit)
        return False

    def decide(self, step: int) -> None:
        """Raises `Rollback` where more has gone wrong in a row than is to be borne."""
        bad, high = self.vitals.bad, self.vitals.high
        if len(bad) > self._skip_limit:
            raise Rollback(step, f"the loss or its gradient was not finite in {_run(bad)}")
        if len(high) > self._spike_steps:
            raise Rollback(step, f"the loss was above {self.threshold():.3f} in {_run(high)}")

    def threshold(self) -> float | None:
        """Above this a loss is a spike; None while too few are known, or if spikes are not looked for."""
        losses = self.vitals.losses
        if not self._factor or len(losses) < ENOUGH:
            return None
        middle = statistics.median(losses)
        spread = NORMAL * statistics.median(abs(loss - middle) for loss in losses)
        return middle + self._factor * max(spread, LEAST * abs(middle))

    def turned(self, trouble: Rollback, checkpoint: int) -> None:
        """The run stands at `checkpoint` again and goes on after the step of the trouble.

        Raises `ConfigError`, with the evidence, when that has come to pass too often.
        """
        vitals = self.vitals
        vitals.bad, vitals.high = [], []
        vitals.went_back.append({"step": trouble.last, "checkpoint": checkpoint, "why": trouble.why})
        if len(vitals.went_back) > self._rollbacks:
            told = "; ".join(one["why"] for one in vitals.went_back)
            raise ConfigError(
                f"pretrain: this run does not learn: {told}. It went back {self._rollbacks} times "
                "(pretrain.rollbacks); lower pretrain.optimizer.learning_rate or .clip, or raise .warmup_steps"
            )
        logger.warning(
            "%s: back to the checkpoint of step %d, and on after step %d", trouble.why, checkpoint, trouble.last
        )


def _run(steps: list[int]) -> str:
    return f"{len(steps)} updates in a row (steps {steps[0]} to {steps[-1]})"
