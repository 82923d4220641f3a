"""Detection of diverging training runs: losses or gradients that are not finite, and loss spikes.

A spike is a loss far above the median of the last steps, measured in their median absolute deviation, which a few
outliers do not change. The monitor's state is saved in checkpoints, so a resumed run makes the same decisions.
"""

import logging
import statistics
from dataclasses import dataclass, field
from typing import Any

from nautile.common.errors import ConfigError

logger = logging.getLogger(__name__)

WINDOW = 128  # losses that a new loss is compared with
MIN_LOSSES = 32  # with fewer, the spread cannot be estimated
NORMAL = 1.4826  # standard deviation of a normal distribution / its median absolute deviation
MIN_SPREAD = 0.02  # as a share of the median: where the loss hardly varies, small changes are no spikes


class Rollback(Exception):
    """Raised when the run diverged at step `last`: restore a checkpoint and continue after that step."""

    def __init__(self, last: int, why: str) -> None:
        super().__init__(why)
        self.last, self.why = last, why


@dataclass
class DivergenceState:
    """The state of `DivergenceMonitor`, saved in checkpoints as JSON under these field names."""

    losses: list[float] = field(default_factory=list)  # of the last steps, without spikes
    bad: list[int] = field(default_factory=list)  # the latest consecutive steps that were not finite
    high: list[int] = field(default_factory=list)  # the latest consecutive steps above the threshold
    went_back: list[dict[str, Any]] = field(default_factory=list)  # one entry for each rollback


class DivergenceMonitor:
    """Observes the loss of every step and decides when to roll back to a checkpoint.

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
