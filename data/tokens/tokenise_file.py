"""One unit of an ingest between its two rounds: its documents as ids, ragged, on disk, not yet packed into rows.

    tokens.u2|u4    the ids of all documents, one after the other (uint16 under 65,536 ids, else uint32)
    lengths.u4      [documents] ids of each
    prompts.u4      [documents] ids before the assistant's part (chat records only)
    hashes.u8       [documents] content hashes; bands.u8 [documents, bands] where near copies are looked for
    unit.json       counts of rows and rejected ones; written last: the unit is whole

A unit is written into a folder of this process's own and renamed, so that there is a whole one or none, also when two
processes do the same one (a host taken for lost may still be at work).
"""

import json
import os
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np

from common.files import write_atomically
from configs.model import TokenizerConfig
from data.chat_template import encode_turns, user_message
from data.records import Form, Record, RecordBatch
from data.screening.contamination import ContaminationIndex
from data.screening.corpus_copies import BANDS, HASHES
from data.screening.text_hash import in_validation, text_hash
from data.tokenizer import Tokenizer, tokenizer_for
from data.tokens.exemplar_sample import ExemplarSample, write_candidates
from data.tokens.shards import token_type

COUNT = np.dtype("<u4")
PARTIAL = ".partial-"
CANDIDATES = "exemplars.jsonl"
HITS = "hits.jsonl"


@dataclass(frozen=True)
class FileCounts:
    """What is remembered of a finished unit: rows of the source read, rejected ones by reason, documents and ids."""

    rows: int
    documents: int
    tokens: int
    rejected: dict[str, int]
    seconds: float  # of work in one process, fetching included
    samples: list[dict[str, Any]] = field(default_factory=list)  # its first records, for people to look at


class TokenisedFile:
    """A finished unit, its files mapped."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        self.folder = folder
        self.counts = read_counts(folder)
        self._type = token_type(vocabulary)

    @cached_property
    def tokens(self) -> np.ndarray:
        """The ids of all documents, [tokens]."""
        path = self.folder / _tokens_name(self._type)
        return np.memmap(path, self._type, "r") if self.counts.tokens else np.zeros(0, self._type)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Ids of each document, [documents] int64."""
        return np.fromfile(self.folder / "lengths.u4", COUNT).astype(np.int64)

    @cached_property
    def prompts(self) -> np.ndarray | None:
        """Ids of each chat record before the assistant's part, [documents] int64; None for web text."""
        path = self.folder / "prompts.u4"
        return np.fromfile(path, COUNT).astype(np.int64) if path.exists() else None

    @cached_property
    def hashes(self) -> np.ndarray:
        """Content hashes, [documents] uint64."""
        return np.fromfile(self.folder / HASHES, "<u8")

    def release(self) -> None:
        """Give back the disk of the ids; hashes and counts stay."""
        self.__dict__.pop("tokens", None)
        for name in (_tokens_name(self._type), "lengths.u4", "prompts.u4"):
            (self.folder / name).unlink(missing_ok=True)


class TokenisedFileWriter:
    """Writes a unit's files document by document; `finish` puts them in place. A context manager."""

    def __init__(self, folder: Path, vocabulary: int, *, chat: bool, bands: bool) -> None:
        self._folder = folder
        self._type = token_type(vocabulary)
        self.partial = folder.with_name(f"{folder.name}{PARTIAL}{uuid.uuid4().hex[:12]}")
        names = [_tokens_name(self._type), "lengths.u4", HASHES, *(["prompts.u4"] if chat else []), *([BANDS] * bands)]
        self.partial.mkdir(parents=True)
        self._files: dict[str, IO[bytes]] = {name: (self.partial / name).open("wb") for name in names}
        self.documents = self.tokens = 0

    def __enter__(self) -> "TokenisedFileWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files.values():
            file.close()
        shutil.rmtree(self.partial, ignore_errors=True)

    def add(self, pieces: Sequence[np.ndarray], lengths: Sequence[int], hashes: np.ndarray) -> None:
        """Append documents: their ids in any number of `pieces`, the ids of each document, [documents] hashes."""
        if pieces:
            ids = np.concatenate(pieces)
            self._files[_tokens_name(self._type)].write(ids.astype(self._type, copy=False).data)
            self.tokens += len(ids)
        self._files["lengths.u4"].write(np.asarray(lengths, COUNT).data)
        self._files[HASHES].write(hashes.astype("<u8", copy=False).data)
        self.documents += len(lengths)

    def add_prompts(self, prompts: Sequence[int]) -> None:
        """The prompt lengths of the chat records added last."""
        self._files["prompts.u4"].write(np.asarray(prompts, COUNT).data)

    def add_bands(self, bands: np.ndarray) -> None:
        """The bands [documents, bands] of the documents added last."""
        self._files[BANDS].write(np.ascontiguousarray(bands, "<u8").data)

    def finish(self, counts: FileCounts) -> None:
        """Everything to disk, then the folder to its place, unless another process was first."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        write_atomically(self.partial / "unit.json", json.dumps(asdict(counts)).encode())
        try:
            self.partial.rename(self._folder)
        except OSError:
            if not is_finished(self._folder):
                raise


def read_counts(folder: Path) -> FileCounts:
    """The counts of a finished unit."""
    return FileCounts(**json.loads((folder / "unit.json").read_bytes()))


def is_finished(folder: Path) -> bool:
    """Whether the unit lies there whole."""
    return (folder / "unit.json").is_file()


def remove_partial_files(folder: Path) -> None:
    """Remove what killed processes left of units under `folder`. Only while no unit is worked on."""
    for partial in folder.glob(f"*{PARTIAL}*"):
        shutil.rmtree(partial)


def _tokens_name(dtype: np.dtype) -> str:
    return f"tokens.u{dtype.itemsize}"


SAMPLES = 3
SAMPLE_CHARACTERS = 400
HITS_A_DOCUMENT = 3  # kept, the largest share first
BEGINNING = 80  # characters of a document that is shown beside its hit


@dataclass(frozen=True)
class CorpusPlan:
    """How records become rows. `exemplars`: the size of the sample for retrieval; `records`: for progress alone."""

    tokenizer: TokenizerConfig
    form: Form
    row_length: int
    rows_per_shard: int
    validation_share: float
    exemplars: int = 0
    records: int | None = None


@dataclass(frozen=True)
class DocumentChecks:
    """What documents are looked at for beside their content hash.

    contamination: held-out questions; a document that overlaps one is rejected. bands: texts -> [documents, bands]
    uint64, for near duplicates.
    """

    contamination: ContaminationIndex | None = None
    bands: Callable[[list[str]], np.ndarray] | None = None


def tokenise_file(
    batches: Iterable[RecordBatch],
    plan: CorpusPlan,
    screens: DocumentChecks,
    folder: Path,
    candidates: int = 0,
    threads: int = 1,
    told: Callable[[int, int, int | None], None] = lambda rows, tokens, total: None,
) -> FileCounts:
    """Tokenise the rows of `batches` into the unit `folder`, or leave it as it is if it is whole already.

    `candidates`: exemplars kept of each exercise; `told(rows, tokens, total)` is called after each batch. Memory
    depends on the batches alone. Errors of the reader pass through, and leave nothing behind.
    """
    if is_finished(folder):
        return read_counts(folder)
    begun = time.monotonic()
    chat = plan.form == "synth"
    tokenizer = tokenizer_for(plan.tokenizer)
    rows, rejected, samples = 0, Counter[str](), []
    candidates = candidates if chat else 0  # exemplars are exercises
    sample = ExemplarSample(candidates)
    with TokenisedFileWriter(folder, plan.tokenizer.vocabulary, chat=chat, bands=screens.bands is not None) as writer:
        with (writer.partial / HITS).open("w", encoding="utf-8") as hits:
            for batch in batches:
                rows += batch.rows
                batch, texts = _clean(batch, screens.contamination, hits)
                rejected += batch.rejected
                if texts:
                    hashes = np.array([text_hash(text) for text in texts], np.uint64)
                    if screens.bands is not None:
                        writer.add_bands(screens.bands(texts))
                    if candidates:
                        _offer(sample, batch, hashes, writer.documents, plan.validation_share)
                    if len(samples) < SAMPLES:
                        samples += [_shown(batch.record(i)) for i in range(min(len(texts), SAMPLES - len(samples)))]
                    _encode(tokenizer, batch, hashes, writer, threads)
                told(rows, writer.tokens, batch.total)
        write_candidates(writer.partial / CANDIDATES, sample.candidates())
        seconds = time.monotonic() - begun
        counts = FileCounts(
            rows, writer.documents, writer.tokens, dict(sorted(rejected.items())), seconds, samples=samples
        )
        writer.finish(counts)
    return counts


def _clean(
    batch: RecordBatch, contamination: ContaminationIndex | None, hits: IO[str]
) -> tuple[RecordBatch, list[str]]:
    """The rows of the batch that overlap no held-out question, and their texts; the hits of the others are kept."""
    texts = batch.texts()
    if contamination is None or not texts:
        return batch, texts
    found = contamination.screen(texts)
    if not any(found):
        return batch, texts
    for text, one in zip(texts, found, strict=True):
        for hit in one[:HITS_A_DOCUMENT]:
            hits.write(json.dumps({**asdict(hit), "begins": text[:BEGINNING]}, sort_keys=True) + "\n")
    places = [i for i, one in enumerate(found) if not one]
    return batch.select(places, "contaminated"), [texts[i] for i in places]


def _encode(
    tokenizer: Tokenizer, batch: RecordBatch, hashes: np.ndarray, writer: TokenisedFileWriter, threads: int
) -> None:
    """Append the ids of every row; web text gets its end-of-text."""
    columns = batch.columns
    if batch.form == "web":
        encoded = tokenizer.encode_arrays(columns["text"], threads)
        end = np.array([tokenizer.end_of_text], np.uint32)
        writer.add([piece for ids in encoded for piece in (ids, end)], [len(ids) + 1 for ids in encoded], hashes)
        return
    queries = map(user_message, columns["query"], columns["exercise"], columns["constraints"])
    turns = zip(queries, columns["synthetic_reasoning"], columns["synthetic_answer"], strict=True)
    pieces, lengths, prompts = encode_turns(tokenizer, turns, threads)
    writer.add(pieces, lengths, hashes)
    writer.add_prompts(prompts)


def _offer(
    sample: ExemplarSample, batch: RecordBatch, hashes: np.ndarray, documents: int, validation_share: float
) -> None:
    for i, (digest, exercise) in enumerate(zip(hashes.tolist(), batch.columns["exercise"], strict=True)):
        if not in_validation(digest, validation_share):
            sample.offer(digest, documents + i, exercise, lambda i=i: batch.record(i))


def _shown(record: Record) -> dict[str, Any]:
    """A record for people to look at, long texts cut."""
    return {key: _cut(value) for key, value in asdict(record).items() if value is not None}


def _cut(value: Any) -> Any:
    if not isinstance(value, str) or len(value) <= SAMPLE_CHARACTERS:
        return value
    return value[:SAMPLE_CHARACTERS] + " […]"
