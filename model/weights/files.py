"""Reads and writes `checkpoint` artifacts: `weights.safetensors` (float32, dotted names, sorted) and `config.json`.

With a tokenizer that was trained, its ranks are a third file.
Equal weights give equal bytes: safetensors orders the tensors, and the header has no free-form metadata, which would be
written in hash order.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from nautile.common.errors import ConfigError
from nautile.common.files import atomic_path, read_bounded_json, sha256_of, write_text
from nautile.common.input_files import check_regular
from nautile.common.text import first_line
from nautile.configs.model import MOST_LAYERS, ModelConfig, TokenizerConfig
from nautile.data.tokenizer import read_tokenizer, save_tokenizer
from nautile.model.layers.common import Params
from nautile.model.nautile import shapes

FORMAT = 2  # of config.json; 1 had the number of SCA layers before the only attention layer of a block, not `pattern`
WEIGHTS = "weights.safetensors"
CONFIG = "config.json"
DIGESTS = "digests.json"  # of an export: the sha256 of each file, to detect missing and changed files
LARGEST = 2**24  # largest dimension, so that products fit into 64 bits; shapes are checked before allocating


def save_weights(folder: Path, params: Params, model: ModelConfig, tokenizer: TokenizerConfig) -> None:
    """Write the files of a checkpoint into `folder` (created if absent), atomically, weights first.

    Raises `ConfigError`, before writing anything, if a weight is not finite: no run may start from such weights.
    """
    arrays = {name: np.ascontiguousarray(leaf, np.float32) for name, leaf in flatten_dict(params, sep=".").items()}
    refuse_not_finite(arrays, f"{folder}: these weights are not written", "use an earlier checkpoint")
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder / WEIGHTS) as temporary:
        save_file(arrays, temporary)
    tokenizer_fields = save_tokenizer(folder, tokenizer)
    # A folder without config.json is no checkpoint, so it is written last.
    settings = {
        "format": FORMAT,
        "model": model.model_dump(mode="json"),
        "tokenizer": tokenizer_fields,
    }
    write_text(folder / CONFIG, json.dumps(settings, indent=2, sort_keys=True) + "\n")


def refuse_not_finite(arrays: Mapping[str, np.ndarray], what: str, way_out: str) -> None:
    """Raise `ConfigError` if an array has a number that is not finite. `what` and `way_out`: around the reason."""
    counts = {name: array.size - int(np.isfinite(array).sum()) for name, array in arrays.items()}
    counts = {name: count for name, count in counts.items() if count}
    if counts:
        name, count = next(iter(counts.items()))
        raise ConfigError(
            f"{what}: {count} of the {arrays[name].size} numbers of `{name}` are not finite, and {len(counts)} of "
            f"{len(arrays)} parameters have such numbers; {way_out}"
        )


def refuse_occupied(out: Path) -> None:
    """Raise ConfigError unless `out` is a new or an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: already holds something; name a new or an empty folder")


def load_weights(folder: Path) -> tuple[Params, ModelConfig, TokenizerConfig]:
    """Read a checkpoint: float32 parameters as nested dicts, and the configurations of model and tokenizer.

    Raises `ConfigError` naming the file and the first difference: a missing, unreadable or truncated file, another
    format version, a missing or an unknown parameter, another shape or type, or numbers that are not finite.
    """
    model, tokenizer = read_config(folder / CONFIG)
    path = folder / WEIGHTS
    if not os.path.lexists(path):
        raise ConfigError(
            f"{path}: is missing, so {folder} is no checkpoint; of an export, name the checkpoint that it was made from"
        )
    # Names, shapes and types are compared before any data is read.
    expected = flatten_dict(shapes(model), sep=".")
    try:
        check_regular(path)
        with safe_open(path, framework="numpy") as tensors:
            _compare(path, expected, tensors)
            arrays = {name: tensors.get_tensor(name) for name in expected}
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{path}: cannot be read as weights ({first_line(error)}); make the checkpoint again"
        ) from None
    refuse_not_finite(arrays, f"{path}: cannot be used", "use another checkpoint")
    loaded = {name: jnp.asarray(array) for name, array in arrays.items()}
    return unflatten_dict(loaded, sep="."), model, tokenizer


def read_config(path: Path) -> tuple[ModelConfig, TokenizerConfig]:
    """Read model and tokenizer configuration from a config.json. Raises `ConfigError` with the first fault."""
    try:
        table = read_bounded_json(path)
        if table["format"] not in (1, FORMAT):
            raise ConfigError(f"{path}: format {table['format']!r}, and this version reads formats 1 and {FORMAT}")
        settings = table["model"]
        if table["format"] == 1:
            # A number that no model has makes a pattern that the model's section refuses.
            pattern = "S" * min(settings["sca_per_block"], MOST_LAYERS) + "A"
            settings = {name: value for name, value in settings.items() if name != "sca_per_block"} | {
                "pattern": pattern
            }
        model = ModelConfig.model_validate(settings)
        for name, value in model:
            if isinstance(value, int) and value > LARGEST:
                raise ConfigError(f"{path}: `model.{name}`: {value} is more than any model has")
        tokenizer = read_tokenizer(table["tokenizer"], path.parent)
        return model.with_tokenizer(tokenizer), tokenizer
    except (KeyError, TypeError):
        raise ConfigError(f"{path}: lacks one of `format`, `model`, `tokenizer`") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path}: `{where}`: {first['msg']}") from None


def _compare(path: Path, expected: Mapping[str, Any], tensors: Any) -> None:
    """Raise `ConfigError` for names, shapes or types that differ from the model's."""
    names = set(tensors.keys())
    for name in sorted(names ^ set(expected)):
        fault = "holds the unknown parameter" if name in names else "lacks the parameter"
        raise ConfigError(f"{path}: {fault} `{name}`: it does not belong to the model that config.json describes")
    for name in sorted(expected):
        part = tensors.get_slice(name)
        shape, dtype = tuple(part.get_shape()), part.get_dtype()
        if shape != expected[name].shape or dtype != "F32":
            raise ConfigError(
                f"{path}: `{name}` is {dtype} of shape {shape}; the model in config.json has F32 of shape "
                f"{tuple(expected[name].shape)}"
            )


def write_digests(folder: Path, computed: Mapping[str, str] | None = None) -> None:
    """Write the digests of all files in `folder`. `computed`: digests by file name that need not be computed."""
    computed = computed or {}
    digests = {path.name: computed.get(path.name) or sha256_of(path) for path in sorted(folder.iterdir())}
    write_text(folder / DIGESTS, json.dumps({"sha256": digests}, indent=1) + "\n")


def read_digests(folder: Path) -> dict[str, str]:
    """Read the digests by file name. Raises ConfigError for a malformed table, and for names outside the folder."""
    path = folder / DIGESTS
    table = read_bounded_json(path)
    digests = table.get("sha256") if isinstance(table, dict) else None
    if not isinstance(digests, dict) or not digests:
        raise ConfigError(f"{path}: has no table `sha256` of files; export the checkpoint again")
    for name in digests:
        if Path(name).name != name:
            raise ConfigError(f"{path}: {name!r} is not the name of a file in this folder")
    return digests


def verified_digests(folder: Path, way_out: str = "export the checkpoint again") -> dict[str, str]:
    """`read_digests`, after checking every file. Raises ConfigError with the first that is missing or has changed."""
    digests = read_digests(folder)
    for name, digest in digests.items():
        if not (folder / name).is_file():
            raise ConfigError(f"{folder / name}: is missing, and {DIGESTS} lists it; export the checkpoint again")
        if sha256_of(folder / name) != digest:
            raise ConfigError(f"{folder / name}: is not as it was exported (its sha256 differs); {way_out}")
    return digests
