"""The model that a command names: an id, a folder, the stage that trained it, or a name of the Hub; else the newest."""

import os
import re
import shutil
import tempfile
from pathlib import Path

from nautile.common.errors import ConfigError
from nautile.common.hub import REPOSITORY, fetch_model_files
from nautile.common.text import did_you_mean
from nautile.data.label_set import HEAD, LABELS, read_label_set
from nautile.data.tokenizer import RANKS_FILE
from nautile.store.add import add_files, check_plain
from nautile.store.artifacts import Artifact, Store
from nautile.store.mirror import open_store
from nautile.store.named import named_or_newest

CONFIG = "config.json"
# What a checkpoint or an ONNX export consists of; of the latter the example as well, since its digest is checked.
# Nothing of it is executed.
HUB_FILES = (
    CONFIG, "weights.safetensors", RANKS_FILE, LABELS, HEAD, "digests.json", "prompt.onnx", "step.onnx", "weights.bin",
    "tokenizer.json", "chat.py",
)  # fmt: skip
_DIGITS = re.compile(r"[0-9a-f]+(\.\d+)?")


def checkpoint_folder(name: str | None, store: Store | None = None) -> Path:
    """The folder of a checkpoint or an export, given as a folder, an id, a stage, or OWNER/NAME[@REVISION] of the Hub.

    None: the newest checkpoint. `store`: None for the one that NAUTILE_STORE names.
    """
    if name and (Path(name) / CONFIG).is_file():
        return Path(name)
    if name and Path(name).is_dir():
        raise ConfigError(f"{name} is not a checkpoint folder: it must hold {CONFIG} and weights.safetensors")
    if name and name.startswith(("/", ".", "~")):
        raise ConfigError(f"{name}: there is no such folder")
    store = store or open_store()
    if name and is_on_hub(name):
        return hub_folder(name, f"; nor is it a folder here, or an artifact of {store.location}")
    # Only an id with its kind can be that of an export: digits alone, and no name at all, mean a checkpoint.
    kind = "export" if name and name.startswith("export/") else "checkpoint"
    return named_or_newest(store, kind, name).path


def is_on_hub(name: str) -> bool:
    """Whether a model's name is OWNER/NAME of the Hub, and not KIND/DIGITS, also with a slip in the kind."""
    owner, _, rest = name.partition("/")
    kinds = ("checkpoint", "export")
    is_id = owner in kinds or (_DIGITS.fullmatch(rest) is not None and did_you_mean(owner, kinds) != "")
    return REPOSITORY.fullmatch(name) is not None and not is_id


def hub_folder(name: str, elsewhere: str = "") -> Path:
    """The folder of a published checkpoint or ONNX export, OWNER/NAME[@REVISION], in the cache of the Hub's client.

    `elsewhere`: for the message, where else it is not. Raises `ConfigError` for a repository that is neither, and as
    `fetch_model_files`.
    """
    folder = fetch_model_files(name, HUB_FILES, elsewhere)
    forms = ((CONFIG, "weights.safetensors"), (CONFIG, "digests.json", "step.onnx"))
    if not any(all((folder / file).is_file() for file in form) for form in forms):
        repository = name.partition("@")[0]
        local = repository.partition("/")[2]
        raise ConfigError(
            f"{name} of the Hub holds no checkpoint and no ONNX export of Nautile. If it is one for transformers: "
            f"`hf download {repository} --local-dir {local}` and `nautile import {local} FOLDER`"
        )
    return folder


def checkpoint_artifact(store: Store, name: str) -> tuple[Artifact | None, Path]:
    """The artifact of a checkpoint or an export (None if its folder is not in the store), and its folder."""
    folder = checkpoint_folder(name)
    # The operator may have written the path of an artifact's folder: then it is that artifact, with its lineage.
    for kind in ("checkpoint", "export"):
        for _, key, number, path in store.folders(kind):
            if path.resolve() == folder.resolve():
                return store.read(kind, key, number, path), folder
    return None, folder


def checkpoint_id(store: Store, name: str) -> str:
    """The full id of a checkpoint that a step will read. A folder outside the store is added to the store."""
    artifact, folder = checkpoint_artifact(store, name)
    if artifact:
        return artifact.full_id
    with tempfile.TemporaryDirectory(prefix="nautile-") as copied:
        if is_on_hub(name) and not Path(name).is_dir():  # whose files are links in its client's cache
            folder = shutil.copytree(folder, Path(copied) / "model")
        return add_model(store, folder, "checkpoint").id


def add_model(store: Store, folder: Path, kind: str) -> Artifact:
    """Add a checkpoint's folder or an ONNX export to the store as an artifact.

    Raises `ConfigError` if the folder is not a valid checkpoint or export.
    """
    # Imports JAX, which the other commands do not need.
    from nautile.model.weights.files import CONFIG, DIGESTS, WEIGHTS, load_weights, read_digests

    if kind == "checkpoint":
        # A trained tokenizer's ranks. A tuned checkpoint's labels and head: without them it would be a plain one.
        names = [CONFIG, WEIGHTS, *(name for name in (RANKS_FILE, LABELS, HEAD) if os.path.lexists(folder / name))]
        check_plain(folder, names)
        # Reading the files checks them, the weights against config.json, before anything is copied.
        load_weights(folder)
        read_label_set(folder)
    elif kind == "export":
        from nautile.model.runtimes.load import load_runtime

        check_plain(folder, [DIGESTS])
        names = [DIGESTS, *read_digests(folder)]
        check_plain(folder, names)
        load_runtime("onnx", folder)
    else:
        raise ConfigError(f"--kind {kind}: only a checkpoint or an export can be added")
    store.prepare()
    store.refresh()
    return add_files(store, kind, folder, names, {"stand_ins": []})
