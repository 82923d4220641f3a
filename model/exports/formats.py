"""The formats that `nautile export` can write, by name."""

from collections.abc import Callable
from pathlib import Path

from model.exports.nautile_format import export_nautile

# Each writes the checkpoint in a folder into a new or an empty one and returns the files; ConfigError where it cannot.
FORMATS: dict[str, Callable[[Path, Path], list[Path]]] = {
    "nautile": export_nautile,
}
