"""The folders that `nautile publish` writes before the upload: one for a model, and one for its documents.

A folder is built under a temporary name and renamed when it is complete. An existing folder with the same files, as
after an interrupted upload, is used unchanged; one with other files is never overwritten.
"""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from nautile.common.errors import ConfigError
from nautile.common.files import sha256_of, write_text
from nautile.data.distill.parquet import write_parquet
from nautile.data.label_set import LabelSet, read_label_set
from nautile.model.exports.formats import FORMATS
from nautile.store.artifacts import Artifact, Store
from nautile.tasks.reporting.cards import (
    TASKS,
    Publication,
    Snippet,
    dataset_card,
    distilled_documents,
    lineage,
    model_card,
    model_facts,
)

CARD = "README.md"
LIBRARIES = {"nautile": "nautile", "transformers": "transformers"}  # format -> library that loads it
TAGS = {"nautile": ("safetensors",), "transformers": ("safetensors", "custom_code")}
ONNX = "onnx"  # the subfolder of the ONNX export
QUESTION = "What is 2 + 2?"


def write_model(
    store: Store,
    checkpoint: Artifact | None,
    folder: Path,
    out: Path,
    repository: str,
    format_: str,
    *,
    onnx_bits: int | None = None,
    license_: str | None = None,
    dataset: str | None = None,
) -> Path:
    """Write the checkpoint in `folder` to `out` in a format of `LIBRARIES`, with its model card.

    `checkpoint`: its artifact, if it is in the store. `onnx_bits`: also write an ONNX export with this number of bits
    per weight. `dataset`: the repository of its documents. Raises `ConfigError` if `out` has other files.
    """
    if checkpoint is not None:
        store.refresh(events=True)  # the cost in the card includes calls that other machines made
        store.check(checkpoint)

    def build(new: Path) -> None:
        FORMATS[format_](folder, new)
        if onnx_bits is not None:
            FORMATS["onnx"](folder, new / ONNX, onnx_bits)
        publication = Publication(
            repository,
            LIBRARIES[format_],
            model_snippets(repository, format_, onnx=onnx_bits is not None, labels=read_label_set(folder)),
            tags=[*TAGS[format_], *(["onnx"] if onnx_bits else [])],
            license=license_,
            dataset=dataset,
        )
        write_text(new / CARD, model_card(model_facts(store, checkpoint, folder), publication))

    return _settle(out, build)


def documents_of(store: Store, checkpoint: Artifact | None) -> Artifact:
    """The distilled documents that a checkpoint was trained on. Raises `ConfigError` if there are none in the store."""
    documents = distilled_documents(store, lineage(store, checkpoint)[0]) if checkpoint else None
    if documents is None:
        name = checkpoint.id if checkpoint else "a folder outside the store"
        raise ConfigError(f"--dataset: the store has no distilled documents that {name} was trained on")
    return documents


def write_dataset(
    store: Store, documents: Artifact, out: Path, repository: str, *, license_: str | None = None
) -> Path:
    """Write distilled documents to `out` as Parquet files with their dataset card. Raises like `write_model`."""
    store.check(documents)

    def build(new: Path) -> None:
        write_parquet(documents.path, new / "data")
        write_text(new / CARD, dataset_card(store, documents, repository, dataset_snippets(repository), license_))

    return _settle(out, build)


def model_snippets(
    repository: str, format_: str, *, onnx: bool = False, labels: LabelSet | None = None
) -> list[Snippet]:
    """Code snippets that load a model of this format from its repository; each is a complete program.

    `labels`: of a tuned checkpoint; a classifier is not asked a question.
    """
    name = repository.partition("/")[2]
    ours = "With this project installed:"
    download = f"hf download {repository} --local-dir {name}\n"
    if labels is not None and labels.form in TASKS:
        folder = name if format_ == "nautile" else f"{name}-checkpoint"
        convert = "" if format_ == "nautile" else f"nautile import {name} {folder}\n"
        use = (
            f"Then `nautile {'classify' if labels.form == 'label' else 'extract'} CHECKPOINT TABLE`, with the id shown:"
        )
        return [Snippet(f"{ours[:-1]}. {use}", "bash", f"{download}{convert}nautile store add {folder}")]
    by_format = {
        "transformers": [
            Snippet(
                "With `transformers` 5 and `torch`; the code of the model is in the repository:",
                "python",
                "from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline\n\n"
                f'tokenizer = AutoTokenizer.from_pretrained("{repository}", trust_remote_code=True)\n'
                f'model = AutoModelForCausalLM.from_pretrained("{repository}", trust_remote_code=True)\n'
                'chat = pipeline("text-generation", model=model, tokenizer=tokenizer)\n'
                f'print(chat([{{"role": "user", "content": "{QUESTION}"}}])[0]["generated_text"][-1]["content"])',
            ),
            Snippet(
                ours,
                "bash",
                f"{download}nautile import {name} {name}-checkpoint\n"
                f'nautile chat {name}-checkpoint --prompt "{QUESTION}"',
            ),
        ],
        "nautile": [
            Snippet(ours, "bash", f'{download}nautile chat {name} --prompt "{QUESTION}"'),
            Snippet(
                "Its weights and its tokenizer alone, without this project (`pip install huggingface_hub safetensors "
                "tokenizers numpy`):",
                "python",
                "from huggingface_hub import snapshot_download\n"
                "from safetensors.numpy import load_file\n"
                "from tokenizers import Tokenizer\n\n"
                f'folder = snapshot_download("{repository}")\n'
                'weights = load_file(f"{folder}/weights.safetensors")\n'
                'tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")\n'
                'print(sum(array.size for array in weights.values()), tokenizer.encode("Hello").ids)',
            ),
        ],
    }
    graphs = Snippet(
        "With `onnxruntime` alone (`pip install onnxruntime numpy tokenizers`), by the graphs in `onnx/`:",
        "bash",
        f'{download}python {name}/onnx/chat.py "{QUESTION}"',
    )
    return [*by_format[format_], *([graphs] if onnx else [])]


def dataset_snippets(repository: str) -> list[Snippet]:
    """Code snippets that load the documents from their repository."""
    code = (
        "from datasets import load_dataset\n\n"
        f'documents = load_dataset("{repository}", split="train")\n'
        'print(documents.num_rows, documents[0]["query"])'
    )
    return [Snippet("", "python", code)]


def _settle(out: Path, build: Callable[[Path], None]) -> Path:
    """Build a folder and rename it to `out`, or keep `out` if it has the same files already."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is not a folder: name another with --out")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, on the same file system, so that the rename is one step.
        work = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from error
    try:
        new = work / "new"
        build(new)
        if out.exists() and any(out.iterdir()):
            if differing := _difference(out, new):
                raise ConfigError(
                    f"{out} exists with other content ({differing}): remove it, or name another folder with --out"
                )
        else:
            new.rename(out)  # replaces an empty folder
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return out


def _difference(existing: Path, new: Path) -> str | None:
    """The first file that differs between two folders, with how it differs; None if they are equal."""
    existing_files, new_files = (
        {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()} for folder in (existing, new)
    )
    for name in sorted(existing_files | new_files):
        if name not in existing_files:
            return f"{name} is missing"
        if name not in new_files:
            return f"{name} is not part of this publication"
        if sha256_of(existing / name) != sha256_of(new / name):
            return f"{name} differs"
    return None
