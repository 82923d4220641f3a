"""The formats that `nautile export` can write, by name."""

from collections.abc import Callable
from pathlib import Path

from model.exports.nautile_format import export_nautile
from model.exports.onnx.folder import export_onnx
from model.exports.transformers.export import export_transformers
from model.exports.web.folder import export_web

# Each writes the checkpoint in a folder into a new or an empty one and returns the files; ConfigError where it cannot.
FORMATS: dict[str, Callable[..., list[Path]]] = {
    "nautile": export_nautile,
    "onnx": export_onnx,
    "transformers": export_transformers,
    "web": export_web,
}
WITH_BITS = ("onnx", "web")  # those that take `bits`: how many each weight is stored with
