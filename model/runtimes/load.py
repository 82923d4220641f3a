"""The runtimes by name, as for the option `--runtime`."""

from collections.abc import Callable
from pathlib import Path

from nautile.common.errors import ConfigError
from nautile.model.exports.onnx.folder import is_onnx_export
from nautile.model.runtimes.jax_runtime import JaxRuntime
from nautile.model.runtimes.onnx_runtime import OnnxRuntime
from nautile.model.runtimes.protocol import Runtime

RUNTIMES: dict[str, Callable[[Path], Runtime]] = {"jax": JaxRuntime, "onnx": OnnxRuntime}


def load_runtime(name: str, folder: Path) -> Runtime:
    """Load a checkpoint (jax) or an ONNX export (onnx) from `folder`. Raises ConfigError if that fails."""
    check_runtime(name, folder)
    return RUNTIMES[name](folder)


def check_runtime(name: str, folder: Path) -> None:
    """Raise ConfigError unless the runtime called `name` can load `folder`."""
    if name not in RUNTIMES:
        raise ConfigError(f"--runtime {name}: is not one of {', '.join(RUNTIMES)}")
    exported = is_onnx_export(folder)
    if name == "jax" and exported:
        raise ConfigError(f"{folder}: is an ONNX export: add `--runtime onnx`")
    if name == "onnx" and not exported:
        raise ConfigError(f"{folder}: is no ONNX export; `nautile export CHECKPOINT FOLDER --format onnx` creates one")
