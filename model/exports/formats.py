"""The formats that `nautile export` can write, by name."""

from collections.abc import Callable
from pathlib import Path

from nautile.model.exports.nautile_format import export_nautile
from nautile.model.exports.onnx.folder import export_onnx
from nautile.model.exports.transformers.export import export_transformers
from nautile.model.exports.web.folder import export_web

# Each exports a checkpoint folder into a new or empty folder, returns the files, and raises ConfigError if it cannot.
FORMATS: dict[str, Callable[..., list[Path]]] = {
    "nautile": export_nautile,
    "onnx": export_onnx,
    "transformers": export_transformers,
    "web": export_web,
}
WITH_BITS = ("onnx", "web")  # formats with the option `bits`, the number of bits per stored weight
