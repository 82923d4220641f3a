"""Imports weights in the layout of the paper's author: the published ones, or our own exports for transformers.

The author's decay is measured to the end of the context and clipped. `decay="window"` computes the same; then the
context changes the results, so it is read from the files next to the weights or has to be given. Tensors are read from
safetensors (one file or several) or a numpy archive (.npz), names and shapes before any data, because a few bytes of an
archive can unpack to any amount of zeros; nothing is ever unpickled. A file may also hold tensors
that a plain conversion of the author's state dict includes: the tied output matrix and the RoPE tables, which must
equal those of this model, and cached copies of a layer's parameters, which are not read.
"""

import io
import json
from collections.abc import Iterator, Mapping
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
from nautile.configs.model import ModelConfig, TokenizerConfig
from nautile.data.label_set import HEAD, LABELS, Head, LabelSet, load_head, read_label_set, save_head, write_label_set
from nautile.model.layers.common import Params
from nautile.model.weights.author_layout import from_author, read_author_config
from nautile.model.weights.author_shapes import author_shapes
from nautile.model.weights.files import (
    CONFIG,
    DIGESTS,
    refuse_not_finite,
    refuse_occupied,
    save_weights,
    verified_digests,
)

SCORE = ("score.weight", "score.bias")  # the head of a classifier [C, D] and [C]
ROPE = ("cos_emb", "sin_emb")  # the author's RoPE tables [positions, head dim / 2]
LARGEST_CONTEXT = 1 << 17  # rows of such a table
# Suffixes of cached copies of parameters, which the author's layers create in generation: a state dict saved afterwards
# includes them.
CACHED_SUFFIXES = (
    *("_conv_kernel_t", "_decay_slopes_cached", "_anchor_slopes_cached", "_phase_scale_b"),
    *("_score_bias_b", "_score_scale_b", "_theta_cached", "_w_int_cached"),
)
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


def load_author_weights(
    path: Path,
    model: ModelConfig | None = None,
    tokenizer: TokenizerConfig | None = None,
    *,
    context: int | None = None,
    sca_epsilon: float | None = None,
) -> tuple[Params, ModelConfig, TokenizerConfig]:
    """Load the author's weights: parameters and configurations, as `load_weights` returns them for a checkpoint.

    path: a file of tensors, an index of several, or a folder with either.
    model: the sizes where the config.json next to the weights does not give them; None: those of the paper.
    context, sca_epsilon (of the SCA layers' first norm): take precedence over both.

    Raises ConfigError with the first difference if a tensor is missing or unknown or a shape does not fit, if the
    context is unknown, if two sources differ on it, and if a number is not finite.
    """
    tokenizer = tokenizer or TokenizerConfig()
    model = model or ModelConfig(vocabulary=tokenizer.vocabulary)
    author = {"decay": "window", "grid": "ordered", "integration": "normalised"}
    model = model.model_copy(update={"vocabulary": tokenizer.vocabulary, **author})
    folder = path if path.is_dir() else path.parent
    if (folder / DIGESTS).exists():
        verified_digests(folder, f"export the checkpoint again, or delete {DIGESTS} if you changed it yourself")
    files = tensor_files(path)
    contexts = {"--context": context}
    if (folder / CONFIG).exists():
        model, tokenizer, contexts[CONFIG] = read_author_config(folder / CONFIG, model, tokenizer)
    names = _check_tensors(path, files, model)
    for name in (name for name in ROPE if name in names):
        contexts[name] = names[name][0].shapes[names[name][1]][0]
    contexts = {source: value for source, value in contexts.items() if value is not None}
    if not contexts:
        raise ConfigError(
            f"{path}: the context of these weights is unknown: there is neither `maxlen` in a {CONFIG} next to them "
            "nor a table `cos_emb`; the decays depend on it, so set --context (4096 for the published model)"
        )
    if len(set(contexts.values())) > 1:
        listed = ", ".join(f"{source} {value}" for source, value in contexts.items())
        raise ConfigError(f"{path}: the context of these weights is not one number: {listed}")
    changes = {"context": next(iter(contexts.values()))} | (
        {} if sca_epsilon is None else {"sca_norm_epsilon": sca_epsilon}
    )
    model = ModelConfig.model_validate({**model.model_dump(), **changes})
    tensors = {name: file.read(stored) for name, (file, stored) in names.items() if name not in SCORE}
    refuse_not_finite(tensors, f"{path}: cannot be imported", "the file is damaged, or its training diverged")
    _check_redundant(path, tensors, model)
    return from_author(tensors, model), model.with_tokenizer(tokenizer), tokenizer


def import_weights(
    path: Path,
    out: Path,
    model: ModelConfig,
    tokenizer: TokenizerConfig,
    *,
    context: int | None = None,
    sca_epsilon: float | None = None,
) -> list[Path]:
    """Load weights with `load_author_weights`, and save them as a checkpoint in the new or empty folder `out`.

    With the labels and the head of a classifier; raises ConfigError where one is there without the other.
    """
    refuse_occupied(out)
    params, model, tokenizer = load_author_weights(path, model, tokenizer, context=context, sca_epsilon=sca_epsilon)
    labels = read_label_set(path if path.is_dir() else path.parent)
    head = _head(path, labels, model.width)
    out.mkdir(parents=True, exist_ok=True)
    if labels is not None:
        write_label_set(out, labels)
    if head is not None:
        save_head(out / HEAD, head)
    save_weights(out, params, model, tokenizer)
    return sorted(out.iterdir())


def _head(path: Path, labels: LabelSet | None, width: int) -> Head | None:
    """The head of a classifier, from the tensors or, as exports once had it, from a file beside them; None without."""
    stored = {name: file for file in tensor_files(path) for name in file.shapes if name in SCORE}
    if not stored:
        folder = path if path.is_dir() else path.parent
        has_head = labels is not None and labels.method == "head"
        return load_head(folder / HEAD, width, len(labels.classes)) if labels is not None and has_head else None
    if labels is None:
        raise ConfigError(
            f"{path}: holds the head of a classifier (`{SCORE[0]}`), and there is no {LABELS} beside it: copy that of "
            "the export that was tuned"
        )
    if labels.method != "head" or len(stored) < len(SCORE):
        raise ConfigError(
            f"{path}: {LABELS} says that this model was tuned by the method {labels.method!r}, and its "
            f"tensors are {', '.join(f'`{name}`' for name in sorted(stored))}"
        )
    weight_CD, bias_C = (stored[name].read(name) for name in SCORE)
    if weight_CD.shape != (len(labels.classes), width) or bias_C.shape != weight_CD.shape[:1]:
        raise ConfigError(
            f"{path}: `{SCORE[0]}` has shape {weight_CD.shape}, and model and {LABELS} need "
            f"({len(labels.classes)}, {width})"
        )
    return Head(weight_CD.T, bias_C)


def _check_tensors(path: Path, files: list[TensorFile], model: ModelConfig) -> dict[str, tuple[TensorFile, str]]:
    """Map each tensor's plain name to its file and its name there. Raises ConfigError unless they fit the model.

    The plain name has no prefix such as "model."; cached copies of parameters are left out.
    """
    stored = {name: file for file in files for name in file.shapes}
    if sum(len(file.shapes) for file in files) != len(stored):
        raise ConfigError(f"{path}: two of its files hold a tensor of the same name")
    # Wrappers put a prefix before every name ("model.", "module."); the embedding shows which.
    prefixes = [name.removesuffix("embedding.weight") for name in stored if name.endswith("embedding.weight")]
    prefix = prefixes[0] if prefixes else ""
    names = {
        name.removeprefix(prefix): (file, name) for name, file in stored.items() if not name.endswith(CACHED_SUFFIXES)
    }
    shapes = {plain: file.shapes[name] for plain, (file, name) in names.items()}
    layers = model.blocks * len(model.pattern)
    if layers > len(shapes):
        raise ConfigError(f"{path}: has {len(shapes)} tensors, too few for {layers} layers")
    expected = dict(author_shapes(model))
    for name, shape in expected.items():
        if name not in shapes:
            raise ConfigError(f"{path}: lacks the tensor `{name}` of shape {shape}")
        spare = 2 * shape[0] + 1024  # unused rows, by which a table is padded for sharding
        actual = shapes[name]
        rows_fit = name == "embedding.weight" and actual[1:] == shape[1:] and shape[0] <= actual[0] <= spare
        if actual != shape and not rows_fit:
            raise ConfigError(f"{path}: `{name}` has shape {actual}, and this model's is {shape}")
    redundant = {"lm_head.weight": shapes["embedding.weight"]}
    for name in (name for name in ROPE if name in shapes):
        positions, *_ = (*shapes[name], 0)
        redundant[name] = (min(positions, LARGEST_CONTEXT), model.attention_head_dim // 2)
    for name in shapes:
        if name in SCORE:
            continue  # `_head` reads it
        if name not in expected and name not in redundant:
            raise ConfigError(f"{path}: holds the tensor `{name}`, which this model does not have")
        if name in redundant and shapes[name] != redundant[name]:
            raise ConfigError(f"{path}: `{name}` has shape {shapes[name]}, and this model's is {redundant[name]}")
    return names


def _check_redundant(path: Path, tensors: Mapping[str, np.ndarray], model: ModelConfig) -> None:
    """Raise `ConfigError` if a redundant tensor differs from what this model computes itself."""
    if not np.array_equal(tensors.get("lm_head.weight", tensors["embedding.weight"]), tensors["embedding.weight"]):
        raise ConfigError(
            f"{path}: `lm_head.weight` is not equal to `embedding.weight`, and this model has one matrix for both"
        )
    half = model.attention_head_dim // 2
    for name in (name for name in ROPE if name in tensors):
        # In float64: at position 2,000 the model's own float32 angles are already 2e-4 off. bfloat16 is 4e-3 off.
        angles_LH = np.arange(len(tensors[name]))[:, None] * model.rope_base ** (-np.arange(half) / half)
        if not np.allclose(tensors[name], np.cos(angles_LH) if name == "cos_emb" else np.sin(angles_LH), atol=1e-2):
            raise ConfigError(f"{path}: `{name}` is not RoPE's table with base {model.rope_base:g}")


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
