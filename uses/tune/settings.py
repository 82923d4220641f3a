"""Settings of a fine-tuning, with a search over learning rates by validation loss."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from nautile.common.errors import ConfigError
from nautile.common.files import read_json, write_json
from nautile.uses.tune.config import TuneConfig
from nautile.uses.tune.fine_tune import TuningSettings


def tuning_settings(config: TuneConfig, loss: Literal["reply", "options"]) -> TuningSettings:
    """The settings for `fine_tune`. Raises `ConfigError` for a method that trains no weights."""
    if config.method not in ("full", "lora"):
        raise ConfigError(f"tune.method {config.method!r} trains no weights")
    return TuningSettings(config.method, loss, config.optimizer, config.epochs, config.batch_rows, config.rank)


def searched_settings(
    config: TuneConfig,
    loss: Literal["reply", "options"],
    work: Path,
    shots: int,
    loss_at: Callable[[TuningSettings, str], float],
) -> TuningSettings:
    """The settings with the one of `learning_rates` that has the lowest validation loss.

    `loss_at(settings, rate)` tunes with a rate and returns its loss. Losses are stored in `work`, so a resumed run
    measures none twice. Without `learning_rates` the configured rate is used.
    """
    path = work / f"rates-{shots}.json"
    settings = tuning_settings(config, loss)
    losses: dict[str, float] = read_json(path) or {}
    by_rate = {
        rate: replace(settings, optimizer=config.optimizer.model_copy(update={"learning_rate": rate}))
        for rate in config.learning_rates
    }
    for rate, candidate in by_rate.items():
        # JSON has only texts as keys.
        name = f"{rate:g}"
        if name not in losses:
            losses[name] = loss_at(candidate, name)
            write_json(path, losses)
    return by_rate[min(by_rate, key=lambda rate: losses[f"{rate:g}"])] if by_rate else settings


def kept_losses(config: TuneConfig, work: Path) -> dict[str, dict[str, float]]:
    """The stored validation losses: number of shots -> learning rate -> loss."""
    losses = {str(shots): read_json(work / f"rates-{shots}.json") for shots in config.shots}
    return {shots: by_rate for shots, by_rate in losses.items() if by_rate}
