"""Noticing a run that no longer learns: losses or gradients that are not finite."""

import logging

from configs.section import ConfigError

logger = logging.getLogger(__name__)


class Health:
    """Follows which updates were skipped, and stops the run at more than `limit` in a row."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_a_row: list[int] = []

    def observe(self, step: int, finite: bool) -> None:
        """Take note of one step, in order. Raises `ConfigError` at the first step beyond the limit."""
        if finite:
            self._in_a_row.clear()
            return
        self._in_a_row.append(step)
        logger.warning("step %d: the loss or its gradient is not finite; its update was not applied", step)
        if len(self._in_a_row) > self._limit:
            raise ConfigError(
                f"pretrain: the loss or its gradient was not finite in {len(self._in_a_row)} updates in a row (steps "
                f"{self._in_a_row[0]} to {step}), more than pretrain.skip_limit {self._limit}; lower "
                "pretrain.optimizer.learning_rate or .clip, or raise .warmup_steps"
            )
