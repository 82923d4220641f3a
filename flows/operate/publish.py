"""What `nautile publish` does: the folders of a model and of its documents, and their upload to the Hugging Face Hub.

A folder is built under a temporary name and renamed when it is complete. An existing folder with the same files, as
after an interrupted upload, is used unchanged; one with other files is never overwritten.

A folder is compared with the repository by digest, so that no file is sent twice. The commit is made after all large
files are uploaded: an interrupted upload does not change the repository, and the next one sends only missing files.
`huggingface_hub` takes 0.5 s to import, so it is imported inside functions.
"""

import hashlib
import json
import logging
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx2  # the HTTP client under huggingface_hub

from nautile.common.errors import ConfigError, Retryable
from nautile.common.files import sha256_of, write_text
from nautile.common.hub import TRANSIENT_STATUSES
from nautile.common.retry import Backoff, retry, retry_after
from nautile.common.text import first_line, visible
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
    task_of,
)

T = TypeVar("T")
logger = logging.getLogger(__name__)

RepositoryKind = Literal["model", "dataset"]
BACKOFF = Backoff(attempts=4, first_s=1.0, longest_s=10.0)
LONGEST_REASON = 300  # maximum characters of a server's message in an error


@dataclass(frozen=True)
class PlannedFile:
    """A file of the folder, and how it differs from the repository's."""

    path: str
    bytes: int
    state: Literal["new", "changed", "same"]


@dataclass(frozen=True)
class UploadPlan:
    """The plan of an upload.

    `head`: the commit that the folder was compared with; None if there is no repository. `others`: files of the
    repository that the folder does not have; they are kept. `private`: of the existing repository, or of the one to
    create.
    """

    repository: str
    kind: RepositoryKind
    folder: Path
    files: tuple[PlannedFile, ...]
    others: tuple[str, ...]
    head: str | None
    private: bool

    @property
    def to_send(self) -> tuple[PlannedFile, ...]:
        """The new and changed files."""
        return tuple(file for file in self.files if file.state != "same")


def check_repository(name: str) -> None:
    """Raise `ConfigError` unless `name` is a valid OWNER/NAME of the Hub."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        reason = first_line(error)
    else:
        if re.fullmatch(r"[^/]+/[^/]+", name):
            return
        reason = "it has no owner"
    raise ConfigError(f"{visible(name, 100)!r} is not a repository of the Hub, OWNER/NAME: {visible(reason, 200)}")


def hub_token() -> str | None:
    """The token of the environment (HF_TOKEN) or of `hf auth login`; None without any."""
    from huggingface_hub import get_token

    return get_token()


def planned_files(folder: Path, listed: dict[str, Any]) -> tuple[PlannedFile, ...]:
    """All files under `folder`, compared with those of the repository (`listed`: path -> `RepoFile`)."""
    files = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        # The size first: most changed files have another one, and gigabytes of weights need not be digested.
        size = path.stat().st_size
        state: Literal["new", "changed", "same"] = "new"
        if remote := listed.get(name):
            state = "same" if size == remote.size and _same_content(path, remote) else "changed"
        files.append(PlannedFile(name, size, state))
    return tuple(files)


def _same_content(path: Path, remote: Any) -> bool:
    """Whether a file equals the repository's: by SHA-256 for an LFS file, else by Git's blob digest."""
    if remote.lfs:
        return sha256_of(path) == remote.lfs.sha256
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest() == remote.blob_id


class HubUploader:
    """Client of the Hub for one token.

    Methods raise `ConfigError` for errors that the operator must fix, and `Retryable` if the Hub does not answer after
    several attempts. No message contains the token.
    """

    def __init__(self, token: str, endpoint: str | None = None, sleep: Callable[[float], object] = time.sleep) -> None:
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars

        if not sys.stderr.isatty():
            disable_progress_bars()
        self._api, self._token, self._sleep = HfApi(endpoint=endpoint, token=token), token, sleep

    def user(self) -> str:
        """The name of the token's owner."""
        return str(self._call("who the token belongs to", self._api.whoami)["name"])

    def plan(self, folder: Path, repository: str, kind: RepositoryKind, private: bool) -> UploadPlan:
        """Compare `folder` with the repository. `private`: for the creation of the repository, if there is none."""
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
        from huggingface_hub.hf_api import RepoFile

        def compare() -> UploadPlan:
            try:
                info = self._api.repo_info(repository, repo_type=kind)
            except GatedRepoError:
                # A subclass of `RepositoryNotFoundError`, but the repository exists: no reason to plan its creation.
                raise
            except RepositoryNotFoundError:
                return UploadPlan(repository, kind, folder, planned_files(folder, {}), (), None, private)
            # At the commit that was read, which `upload` names as its parent: a push in between cannot mix two states.
            entries = self._api.list_repo_tree(repository, recursive=True, revision=info.sha, repo_type=kind)
            remote_files = {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}
            files = planned_files(folder, remote_files)
            others = tuple(sorted(set(remote_files) - {file.path for file in files} - {".gitattributes"}))
            return UploadPlan(repository, kind, folder, files, others, info.sha, bool(info.private))

        return self._call(f"{repository}: cannot be compared", compare)

    def upload(self, plan: UploadPlan, message: str) -> str:
        """Create the repository if necessary, and send the new and changed files as one commit; returns its address."""
        from huggingface_hub import CommitOperationAdd

        where = f"{plan.repository}: nothing was published"
        if plan.head is None:
            repository, kind, private = plan.repository, plan.kind, plan.private
            self._call(where, lambda: self._api.create_repo(repository, repo_type=kind, private=private, exist_ok=True))

        def commit() -> str:
            # Made anew for each attempt: the library keeps the state of an upload in these objects.
            additions = [CommitOperationAdd(file.path, str(plan.folder / file.path)) for file in plan.to_send]
            result = self._api.create_commit(
                plan.repository, additions, commit_message=message, repo_type=plan.kind, parent_commit=plan.head
            )
            return str(result.commit_url)

        return self._call(where, commit)

    def _call(self, where: str, call: Callable[[], T]) -> T:
        """Make a call with retries during an outage of the Hub, and translate its errors. `where`: their prefix."""

        def attempt() -> T:
            try:
                return call()
            except Exception as error:
                translated = self._translate(where, error)
                if translated is None:
                    raise
                raise translated from None  # the library's errors may contain the request and its headers

        return retry(
            attempt,
            BACKOFF,
            should_retry=lambda error: isinstance(error, Retryable),
            retry_after_s=lambda error: getattr(error, "retry_after_s", None),
            before_pause=lambda error, n, pause_s: logger.warning("%s; attempt %d, again in %.1f s", error, n, pause_s),
            sleep=self._sleep,
        )

    def _translate(self, where: str, error: Exception) -> Exception | None:
        """The error to raise in place of an error of the library; None for errors of this program."""
        from huggingface_hub import errors

        # An upload of several files wraps the error of the file that failed.
        if type(error) is RuntimeError and isinstance(error.__cause__, Exception):
            error = error.__cause__
        # The token may stand in the library's message, for example as part of a header.
        text = getattr(error, "server_message", None) or first_line(error)
        reason = visible(" ".join(text.replace(self._token, "(the token)").split()), LONGEST_REASON)
        if isinstance(error, errors.OfflineModeIsEnabled):
            return ConfigError(f"{where}: HF_HUB_OFFLINE forbids any request to the Hub: unset it")
        if isinstance(error, errors.HfHubHTTPError):
            status = error.response.status_code
            if status >= 500 or status in TRANSIENT_STATUSES:
                outage = Retryable(
                    f"{where}: the Hub answered with status {status} ({reason}); run the command again to continue"
                )
                outage.retry_after_s = retry_after(error.response.headers)  # type: ignore[attr-defined]
                return outage
            advice = {
                401: "the Hub refused the token: set HF_TOKEN to a valid token with write access",
                403: "the token has no write access there: set HF_TOKEN to another, or name your own repository",
                404: "the repository does not exist, or the token has no access to it",
                412: "the repository has changed in the meantime: run the command again",
            }
            return ConfigError(f"{where}: {advice.get(status, f'the Hub answered with status {status}')} ({reason})")
        if isinstance(error, httpx2.HTTPError | ConnectionError | TimeoutError) or type(error) is RuntimeError:
            # hf_xet raises a plain RuntimeError for all of its errors.
            return Retryable(
                f"{where}: the Hub did not answer ({type(error).__name__}: {reason}); run the command again"
            )
        if isinstance(error, json.JSONDecodeError):  # such as the page of a proxy
            return Retryable(f"{where}: the Hub's response is not JSON ({reason}); run the command again")
        if isinstance(error, ValueError) and not isinstance(error, ConfigError):
            return ConfigError(f"{where}: {visible(str(error).replace(self._token, '(the token)'), LONGEST_REASON)}")
        return None


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
        snippets = [Snippet(f"{ours[:-1]}. {use}", "bash", f"{download}{convert}nautile store add {folder}")]
        if format_ == "transformers" and labels.classes:
            snippets.insert(0, _pipeline_snippet(repository, labels))
        return snippets
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


def _pipeline_snippet(repository: str, labels: LabelSet) -> Snippet:
    """The call of a classifier by `transformers`."""
    task = task_of(labels.model_dump())
    options = "top_k=None" if labels.form == "label" else 'aggregation_strategy="simple"'
    code = (
        "from transformers import pipeline\n\n"
        f'model = pipeline("{task}", "{repository}", trust_remote_code=True)\n'
        f'for answer in model("A text of yours.", {options}):\n'
        "    print(answer)"
    )
    return Snippet("With `transformers` 5 and `torch`; the code of the model is in the repository:", "python", code)


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
