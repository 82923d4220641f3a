"""Rows in a micro-batch, and whether a batch divides into micro-batches over the devices. Without JAX."""

from nautile.common.errors import ConfigError
from nautile.configs.training import PretrainConfig


def rows_at_once(config: PretrainConfig, devices: int) -> int:
    """Rows in a micro-batch: `pretrain.micro_rows` or the whole batch, but at least one per device if it has enough."""
    return max(config.micro_rows or config.batch_rows, min(devices, config.batch_rows))


def check_rows(config: PretrainConfig, devices: int) -> None:
    """Raise ConfigError unless a batch divides into micro-batches, and a micro-batch among the devices."""
    micro = rows_at_once(config, devices)
    if config.batch_rows % micro:
        raise ConfigError(f"pretrain.batch_rows {config.batch_rows} is not a multiple of pretrain.micro_rows {micro}")
    if micro % devices:
        field = "micro_rows" if config.micro_rows else "batch_rows"
        raise ConfigError(
            f"pretrain.{field} {micro} does not divide among {devices} devices: make it a multiple of {devices}"
        )
