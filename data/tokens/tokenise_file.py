"""Tokenise one file of a source: write the token ids of its documents to disk, not yet packed into rows.

The folder of a tokenised file (written by `tokenise_file`, read by `TokenisedFile`):

    tokens.u2|u4      the ids of all documents, concatenated (uint16 for under 65,536 ids, else uint32)
    lengths.u4        [documents] ids of each
    prompts.u4        [documents] ids before the assistant's part (chat records only)
    hashes.u8         [documents] content hashes
    band-NN.u8        [documents] one MinHash band, if near copies are searched for
    exemplars.jsonl   candidates for the sample of exemplars
    hits.jsonl        overlaps of rejected documents with held-out questions
    counts.json       the counts (`FileCounts`), written last

It is written under a temporary name of this process and renamed when complete, so it is either complete or absent, even
if two processes tokenise the same file (a host that is believed dead may still be working).
"""

import json
import os
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from nautile.common.files import write_atomically
from nautile.configs.model import TokenizerConfig
from nautile.data.chat_template import encode_turns
from nautile.data.records import Record, RecordBatch, RecordForm
from nautile.data.screening.contamination import ContaminationIndex
from nautile.data.screening.corpus_copies import HASHES, band_file
from nautile.data.screening.text_hash import in_validation, text_hash
from nautile.data.tokenizer import Tokenizer, tokenizer_for
from nautile.data.tokens.exemplar_sample import ExemplarSample, write_candidates
from nautile.data.tokens.shards import token_type

LENGTHS, PROMPTS, COUNTS = "lengths.u4", "prompts.u4", "counts.json"
CANDIDATES = "exemplars.jsonl"
HITS = "hits.jsonl"
LENGTH_TYPE = np.dtype("<u4")
PARTIAL = ".partial-"
SAMPLES = 3  # first records shown in the manifest
SAMPLE_CHARACTERS = 400
HITS_PER_DOCUMENT = 3  # written, the largest share first
HIT_CHARACTERS = 80  # of the beginning of a document, written with its hit


@dataclass(frozen=True)
class CorpusPlan:
    """How records become rows. `exemplars`: size of the sample for retrieval; `records`: only for progress messages."""

    tokenizer: TokenizerConfig
    form: RecordForm
    row_length: int
    rows_per_shard: int
    validation_share: float
    exemplars: int = 0
    records: int | None = None


@dataclass(frozen=True)
class DocumentChecks:
    """Checks of each document besides its content hash.

    contamination: index of the held-out questions; a document that overlaps one is rejected. bands: maps texts to
    [documents, bands] uint64, the MinHash bands that near copies are found by.
    """

    contamination: ContaminationIndex | None = None
    bands: Callable[[list[str]], np.ndarray] | None = None


@dataclass(frozen=True)
class FileCounts:
    """Counts of a tokenised file: rows read, rejected ones by reason, documents and ids written."""

    rows: int
    documents: int
    tokens: int
    rejected: dict[str, int]
    seconds: float  # of one process, including the download
    samples: list[dict[str, Any]] = field(default_factory=list)  # the first records, for display


def tokenise_file(
    batches: Iterable[RecordBatch],
    plan: CorpusPlan,
    checks: DocumentChecks,
    folder: Path,
    candidates: int = 0,
    threads: int = 1,
    progress: Callable[[int, int, int | None], None] = lambda rows, tokens, total: None,
) -> FileCounts:
    """Tokenise the rows of `batches` into `folder`; if that is complete already, only return its counts.

    `candidates`: exemplars kept per exercise; `progress(rows, tokens, total)` is called after each batch. Memory use
    depends only on the size of a batch. Errors of the reader are passed on, and no partial file is left.
    """
    if is_finished(folder):
        return read_counts(folder)
    start_time = time.monotonic()
    chat = plan.form == "synth"
    tokenizer = tokenizer_for(plan.tokenizer)
    rows, rejected = 0, Counter[str]()
    samples: list[dict[str, Any]] = []
    candidates = candidates if chat else 0  # exemplars are exercises
    sample = ExemplarSample(candidates)
    with _FolderWriter(folder, plan.tokenizer.vocabulary, chat=chat) as writer:
        with (writer.partial / HITS).open("w", encoding="utf-8") as hits:
            for batch in batches:
                rows += batch.rows
                batch, texts = _reject_contaminated(batch, checks.contamination, hits)
                rejected += batch.rejected
                if texts:
                    # One hash decides three things: exact copies, the validation split, and the sample of exemplars.
                    hashes = np.array([text_hash(text) for text in texts], np.uint64)
                    if checks.bands is not None:
                        # Before the ids of the same documents: `add` counts them.
                        writer.add_bands(checks.bands(texts))
                    # Exemplars come from the training split only, so that no validation text reaches a teacher.
                    if candidates:
                        exercises = batch.columns["exercise"]
                        for i, digest in enumerate(hashes.tolist()):
                            if not in_validation(digest, plan.validation_share):
                                sample.offer(digest, writer.documents + i, exercises[i], partial(batch.record, i))
                    if len(samples) < SAMPLES:
                        sample_rows = range(min(len(texts), SAMPLES - len(samples)))
                        samples += [_shortened(batch.record(i)) for i in sample_rows]
                    _encode(tokenizer, batch, hashes, writer, threads)
                progress(rows, writer.tokens, batch.total)
            hits.flush()
            os.fsync(hits.fileno())
        write_candidates(writer.partial / CANDIDATES, sample.candidates())
        counts = FileCounts(
            rows,
            writer.documents,
            writer.tokens,
            dict(sorted(rejected.items())),
            seconds=time.monotonic() - start_time,
            samples=samples,
        )
        writer.finish(counts)
    return counts


def _reject_contaminated(
    batch: RecordBatch, contamination: ContaminationIndex | None, hits: IO[str]
) -> tuple[RecordBatch, list[str]]:
    """Drop rows that overlap a held-out question and write their hits to `hits`; returns the others and their texts."""
    texts = batch.texts()
    if contamination is None or not texts:
        return batch, texts
    text_hits = contamination.screen(texts)
    if not any(text_hits):
        return batch, texts
    for text, own_hits in zip(texts, text_hits, strict=True):
        for hit in own_hits[:HITS_PER_DOCUMENT]:
            hits.write(json.dumps({**asdict(hit), "begins": text[:HIT_CHARACTERS]}, sort_keys=True) + "\n")
    clean = [i for i, own_hits in enumerate(text_hits) if not own_hits]
    return batch.select(clean, "contaminated"), [texts[i] for i in clean]


def _encode(
    tokenizer: Tokenizer, batch: RecordBatch, hashes: np.ndarray, writer: "_FolderWriter", threads: int
) -> None:
    """Append the ids of every row; web documents get an end-of-text id."""
    if batch.form == "web":
        encoded = tokenizer.encode_arrays(batch.columns["text"], threads)
        end = np.array([tokenizer.end_of_text], np.uint32)
        writer.add([array for ids in encoded for array in (ids, end)], [len(ids) + 1 for ids in encoded], hashes)
        return
    arrays, lengths, prompts = encode_turns(tokenizer, batch.turns(), threads)
    writer.add(arrays, lengths, hashes, prompts)


def _shortened(record: Record) -> dict[str, Any]:
    """The record's fields, long texts cut."""
    return {
        name: value[:SAMPLE_CHARACTERS] + " […]" if isinstance(value, str) and len(value) > SAMPLE_CHARACTERS else value
        for name, value in asdict(record).items()
        if value is not None
    }


class TokenisedFile:
    """A complete tokenised file, its ids memory-mapped."""

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
        """Number of ids of each document, [documents] int64."""
        return np.fromfile(self.folder / LENGTHS, LENGTH_TYPE).astype(np.int64)

    @cached_property
    def prompts(self) -> np.ndarray | None:
        """Number of ids of each chat record before the assistant's part, [documents] int64; None for web text."""
        path = self.folder / PROMPTS
        return np.fromfile(path, LENGTH_TYPE).astype(np.int64) if path.exists() else None

    @cached_property
    def hashes(self) -> np.ndarray:
        """Content hashes, [documents] uint64."""
        return np.fromfile(self.folder / HASHES, "<u8")

    def release(self) -> None:
        """Delete the files of ids and lengths; hashes and counts stay."""
        self.__dict__.pop("tokens", None)
        for name in (_tokens_name(self._type), LENGTHS, PROMPTS):
            (self.folder / name).unlink(missing_ok=True)


class _FolderWriter:
    """Writes the folder of a tokenised file under a temporary name, which `finish` changes. A context manager."""

    def __init__(self, folder: Path, vocabulary: int, *, chat: bool) -> None:
        self._folder = folder
        self._type = token_type(vocabulary)
        self.partial = folder.with_name(f".{folder.name}{PARTIAL}{uuid.uuid4().hex[:12]}")
        self.partial.mkdir(parents=True)
        self._files: dict[str, IO[bytes]] = {}
        for name in (_tokens_name(self._type), LENGTHS, HASHES, *([PROMPTS] if chat else [])):
            self._file(name)
        self.documents = self.tokens = 0

    def __enter__(self) -> "_FolderWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files.values():
            file.close()
        shutil.rmtree(self.partial, ignore_errors=True)

    def add(
        self,
        arrays: Sequence[np.ndarray],
        lengths: Sequence[int],
        hashes: np.ndarray,
        prompts: Sequence[int] | None = None,
    ) -> None:
        """Append documents: `arrays` concatenate to their ids; the other arguments have one entry per document."""
        if arrays:
            ids = np.concatenate(arrays)
            self._files[_tokens_name(self._type)].write(ids.astype(self._type, copy=False).data)
            self.tokens += len(ids)
        self._files[LENGTHS].write(np.asarray(lengths, LENGTH_TYPE).data)
        self._files[HASHES].write(hashes.astype("<u8", copy=False).data)
        if prompts is not None:
            self._files[PROMPTS].write(np.asarray(prompts, LENGTH_TYPE).data)
        self.documents += len(lengths)

    def add_bands(self, bands: np.ndarray) -> None:
        """Append the MinHash bands [documents, bands] of the documents of the next `add`."""
        for number, column in enumerate(bands.T):
            self._file(band_file(number)).write(np.ascontiguousarray(column, "<u8").data)

    def _file(self, name: str) -> IO[bytes]:
        if name not in self._files:
            self._files[name] = (self.partial / name).open("wb")
        return self._files[name]

    def finish(self, counts: FileCounts) -> None:
        """Flush everything to disk, then rename the folder; if another process was faster, its folder is used."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        write_atomically(self.partial / COUNTS, json.dumps(asdict(counts)).encode())
        try:
            self.partial.rename(self._folder)
        except OSError:
            if not is_finished(self._folder):
                raise


def _tokens_name(dtype: np.dtype) -> str:
    return f"tokens.u{dtype.itemsize}"


def read_counts(folder: Path) -> FileCounts:
    """The counts of a tokenised file."""
    return FileCounts(**json.loads((folder / COUNTS).read_bytes()))


def is_finished(folder: Path) -> bool:
    """True if the tokenised file is complete."""
    return (folder / COUNTS).is_file()


def remove_partial_files(folder: Path) -> None:
    """Remove what killed processes left under `folder`. Call it only while nothing is being tokenised there."""
    for leftover in folder.glob(f"*{PARTIAL}*"):
        shutil.rmtree(leftover)
