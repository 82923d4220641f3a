"""Reads files of tensors from other programs: safetensors, in one file or several with an index, and numpy archives.

Names and shapes are read before any data, because a few bytes of an archive can unpack to any amount of zeros. Nothing
is ever unpickled.
"""

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
from safetensors import safe_open

from nautile.common.commands import shell_command
from nautile.common.errors import ConfigError
from nautile.common.files import read_bounded_json
from nautile.common.input_files import check_regular
from nautile.common.text import first_line
from nautile.model.weights.digests import DIGESTS, first_fault, read_digests

INDEX = ".index.json"
HEADER_BYTES = 16_384  # of an array in an archive; numpy itself accepts headers of up to 10,000
MOST_TENSORS = 100_000
FLOATS = ("F64", "F32", "F16", "BF16")
PICKLES = (".pt", ".pth", ".bin", ".pkl", ".ckpt")
_PREFERRED = ("model.safetensors.index.json", "model.safetensors")


@dataclass(frozen=True)
class TensorFile:
    """A file and the shapes of its tensors."""

    path: Path
    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str) -> np.ndarray:
        """Read a tensor as float32. Raises ConfigError if its data cannot be read, or are no floats of 16 bits or more.

        Integers and floats of 8 bits are weights only with the scales that a quantisation keeps elsewhere.
        """
        with _readable(self.path):
            if self.path.suffix == ".npz":
                with ZipFile(self.path) as archive, archive.open(f"{name}.npy") as member:
                    if _npy_shape(archive, f"{name}.npy") != self.shapes[name]:
                        raise ValueError(f"{name} changed while it was read")
                    array = np.lib.format.read_array(member, allow_pickle=False)
                    self._check_type(name, array.dtype.name, array.dtype.kind == "f")
                    return array.astype(np.float32)
            with safe_open(self.path, framework="flax") as opened:
                kind = opened.get_slice(name).get_dtype()
                self._check_type(name, kind, kind in FLOATS)
                return np.asarray(opened.get_tensor(name), np.float32)

    def _check_type(self, name: str, kind: str, is_float: bool) -> None:
        if not is_float:
            raise ConfigError(
                f"{self.path}: `{name}` is of type {kind}, and weights are floats of 16 bits or more: these are "
                "quantised or of another model; import the weights before their quantisation"
            )


def tensor_files(path: Path) -> list[TensorFile]:
    """Open the tensor files of `path`: a file, an index of several, or a folder with either.

    Raises ConfigError if there is none or no single choice, for a pickle, and for an index that names files outside its
    folder or tensors that its files do not hold.
    """
    if path.is_dir():
        path = _file_of_folder(path)
    if path.suffix in PICKLES:
        raise ConfigError(_pickle_message(path))
    if path.name.endswith(INDEX):
        return _files_of_index(path)
    with _readable(path):
        check_regular(path)
        if path.suffix == ".npz":
            with ZipFile(path) as archive:
                members = archive.namelist()
                if len(members) > MOST_TENSORS:
                    raise ValueError(f"it holds {len(members):,} arrays, more than any model has")
                return [TensorFile(path, {name.removesuffix(".npy"): _npy_shape(archive, name) for name in members})]
        with safe_open(path, framework="flax") as opened:
            names = opened.keys()
            return [TensorFile(path, {name: tuple(opened.get_slice(name).get_shape()) for name in names})]


def check_digests(folder: Path) -> None:
    """Raise ConfigError if the folder has digests and a file does not match them."""
    if not (folder / DIGESTS).exists():
        return
    fault = first_fault(folder, read_digests(folder))
    if fault is None:
        return
    if not fault.is_file():
        raise ConfigError(f"{folder}: lacks {fault.name}, which {DIGESTS} lists; export the checkpoint again")
    raise ConfigError(
        f"{fault}: is not the file that was exported (its sha256 differs from {DIGESTS}): it is truncated or was "
        f"changed; export the checkpoint again, or delete {DIGESTS} if you changed it yourself"
    )


def _file_of_folder(folder: Path) -> Path:
    """The tensor file or index of a folder."""
    for name in _PREFERRED:
        if (folder / name).is_file():
            return folder / name
    names = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".npz", *PICKLES))
    # Prefer readable files; if there are only pickles, the caller refuses the first by name.
    readable = [path for path in names if path.suffix not in PICKLES]
    if len(readable) > 1:
        raise ConfigError(f"{folder}: holds several files of tensors and no {_PREFERRED[0]}; name one of them")
    if not names:
        raise ConfigError(f"{folder}: holds no weights: neither .safetensors nor .npz")
    return (readable or names)[0]


def _pickle_message(path: Path) -> str:
    """The message that refuses a pickle, with a command that converts its weights and settings."""
    program = (
        "import json, torch, safetensors.torch as s; "
        f'd = torch.load({json.dumps(str(path), ensure_ascii=False)}, map_location="cpu", weights_only=True); '
        'w = d.get("state_dict", d); '
        's.save_file({k: v.clone().contiguous() for k, v in w.items()}, "model.safetensors"); '
        '"config" in d and json.dump(d["config"], open("config.json", "w"))'
    )
    return (
        f"{path}: is a pickle, which can run any program when it is opened, so it is not. If you trust it, convert it "
        f"where torch is installed, {shell_command('python', '-c', program)}, and import model.safetensors"
    )


def _files_of_index(path: Path) -> list[TensorFile]:
    """The files that an index lists, after checking that index and files agree."""
    table = read_bounded_json(path)
    places: Any = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise ConfigError(f"{path}: has no table `weight_map` of tensors and their files")
    # Only files in the same folder: an index must not reach outside it.
    for name in sorted(set(places.values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ConfigError(f"{path}: {name!r} is not the name of a .safetensors file beside it")
        if not (path.parent / name).is_file():
            raise ConfigError(f"{path}: names the file {name}, which is not there")
    files = [file for name in sorted(set(places.values())) for file in tensor_files(path.parent / name)]
    actual = {(tensor, file.path.name) for file in files for tensor in file.shapes}
    for tensor, name in sorted(actual ^ set(places.items())):
        fault = "holds" if (tensor, name) in actual else "lacks"
        raise ConfigError(f"{path}: {name} {fault} the tensor `{tensor}`, and the index says otherwise")
    return files


def _npy_shape(archive: ZipFile, member: str) -> tuple[int, ...]:
    """The shape of an array in the archive, from its header; the data is not read."""
    with archive.open(member) as opened:
        # A header claims any length, and would be read whole before numpy looks at it.
        file = io.BytesIO(opened.read(HEADER_BYTES))
    version = np.lib.format.read_magic(file)
    # Versions 1 and 2 of the format; version 3 only adds names of fields that are not ASCII.
    headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in headers or not member.endswith(".npy"):
        raise ValueError(f"{member} is of the array format {version}")
    shape, _, kind = headers[version](file)
    # A type of text or of bytes may be megabytes wide, so that a small shape takes any amount of memory.
    if kind.hasobject or kind.kind not in "biufc" or kind.itemsize > 16:
        raise ValueError(f"{member} holds {'pickled objects' if kind.hasobject else str(kind)[:40]}, not plain numbers")
    return shape


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Convert errors of reading into a ConfigError that names the file."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # of three libraries, whose readers raise anything for what they do not expect
        raise ConfigError(
            f"{path}: cannot be read as safetensors or as a numpy archive (.npz): {first_line(error)}"
        ) from None
