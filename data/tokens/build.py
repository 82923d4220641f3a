"""Build a `tokens` artifact from tokenised files: drop copies, pack into rows, index, count.

Four steps. `tasks.ingest` runs the first and the third once per file, in any process and order; `write_tokens` runs all
of them in this process, for a source that needs no parallelism:

    tokenise_file     a file of the source -> a folder of ids and hashes (`TokenisedFile`)
    find_copies       the hashes of all files -> which documents are copies (`data.screening.corpus_copies`)
    pack_file         a tokenised file -> its shards; its ids are deleted
    publish_tokens    the index over all shards, the counts, the exemplars

Names and bytes of the shards depend only on the source and the file's number in it, not on processes or their order.
"""

import heapq
import json
import logging
import math
import os
import shutil
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from nautile.common.errors import ConfigError
from nautile.common.events import Emit
from nautile.common.files import sync_folder, write_atomically
from nautile.configs.model import TokenizerConfig
from nautile.data.chat_template import encode_turns
from nautile.data.records import Record, RecordBatch, RecordForm, Rejected, SynthRecord, batched, from_dict, to_dict
from nautile.data.screening.contamination import ContaminationIndex
from nautile.data.screening.corpus_copies import HASHES, KEPT, REASONS, band_file, find_copies, read_verdicts
from nautile.data.screening.duplicates import HASH_RANGE, in_validation, text_hash
from nautile.data.tokenizer import Tokenizer, tokenizer_for
from nautile.data.tokens.shards import (
    ConcatPacker,
    FirstFitPacker,
    ShardEntry,
    ShardIndex,
    Split,
    token_type,
    write_index,
    write_shard,
)

LENGTHS, PROMPTS, COUNTS = "lengths.u4", "prompts.u4", "counts.json"
CANDIDATES = "exemplars.jsonl"
HITS = "hits.jsonl"
LENGTH_TYPE = np.dtype("<u4")
PARTIAL = ".partial-"
SAMPLES = 3  # first records shown in the manifest
SAMPLE_CHARACTERS = 400
HITS_PER_DOCUMENT = 3  # written, the largest share first
HIT_CHARACTERS = 80  # of the beginning of a document, written with its hit

log = logging.getLogger(__name__)

LEAST_CANDIDATES = 64  # per exercise and file
SLACK = 4  # candidates of a file, as a multiple of its even share of the sample
PROGRESS_SECONDS = 0.5
DOCUMENT_BLOCK = 4096  # documents whose offsets are Python integers at a time
MOST_HITS = 10_000  # overlaps with held-out questions that are written into the artifact; all are counted


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
        write_rows(writer.partial / CANDIDATES, sample.rows())
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
    """A complete tokenised file, its ids memory-mapped. Its folder, written by `tokenise_file`:

    tokens.u2|u4      the ids of all documents, concatenated (uint16 for under 65,536 ids, else uint32)
    lengths.u4        [documents] ids of each
    prompts.u4        [documents] ids before the assistant's part (chat records only)
    hashes.u8         [documents] content hashes
    band-NN.u8        [documents] one MinHash band, if near copies are searched for
    exemplars.jsonl   candidates for the sample of exemplars
    hits.jsonl        overlaps of rejected documents with held-out questions
    counts.json       the counts (`FileCounts`), written last

    It is renamed from a temporary name of its process when complete, so it is complete or absent, even if two processes
    tokenise the same file (a host that is believed dead may still be working).
    """

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
    return FileCounts(**json.loads((folder / COUNTS).read_bytes()))


def is_finished(folder: Path) -> bool:
    return (folder / COUNTS).is_file()


def remove_partial_files(folder: Path) -> None:
    """Remove what killed processes left under `folder`. Call it only while nothing is being tokenised there."""
    for leftover in folder.glob(f"*{PARTIAL}*"):
        shutil.rmtree(leftover)


def candidates_per_exercise(size: int, files: int) -> int:
    """Number of candidates that each of `files` files keeps per exercise, for a sample of `size` records."""
    return size if files <= 1 else min(size, max(LEAST_CANDIDATES, -(-SLACK * size // files)))


class ExemplarSample:
    """Keeps, per exercise (paper §3.2), the `capacity` records of smallest hash among those offered.

    So the sample does not depend on the order of records, files or processes. A file contributes at most
    `candidates_per_exercise` of each exercise: one that occurs in a single file may get less than an even share.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._heaps: dict[str, list[tuple[int, int, SynthRecord]]] = defaultdict(list)

    def offer(self, digest: int, document: int, exercise: str | None, record: Callable[[], Record]) -> None:
        """Consider a document by its content hash `digest` and number; `record()` is called only if it is kept."""
        heap = self._heaps[exercise or ""]
        # Negated keys: the heap's first entry is then the one of the largest hash.
        if len(heap) >= self._capacity and (not self._capacity or (-digest, -document) < heap[0][:2]):
            return
        exercise_record = record()
        assert isinstance(exercise_record, SynthRecord)
        entry = (-digest, -document, exercise_record)
        if len(heap) < self._capacity:
            heapq.heappush(heap, entry)
        else:
            heapq.heapreplace(heap, entry)

    def rows(self) -> Iterator[dict[str, Any]]:
        """The kept records as JSON data, by exercise and hash, each with its hash and the number of its document."""
        for name in sorted(self._heaps):
            for negative, document, record in sorted(self._heaps[name], key=lambda entry: entry[:2], reverse=True):
                yield {"hash": -negative, "document": -document, **to_dict(record)}


def choose_exemplars(files: Iterable[tuple[Path, np.ndarray]], size: int) -> list[SynthRecord]:
    """Choose the sample: the first record of each exercise by hash, then the second of each, up to `size` records.

    files: the path of each file's candidates, and which of its documents were kept, [documents] bool. Holds the hashes
    of all candidates and the chosen records in memory.
    """
    by_exercise: dict[str, list[tuple[int, Path, int]]] = defaultdict(list)  # (hash, file, line)
    for path, kept_documents in files:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                row = json.loads(line)
                if kept_documents[row["document"]]:
                    by_exercise[row["exercise"] or ""].append((row["hash"], path, number))
    ranked = [(rank, name, *e) for name, entries in by_exercise.items() for rank, e in enumerate(sorted(entries))]
    ranked.sort(key=lambda entry: entry[:2])
    # Read the files a second time, now parsing only the chosen records.
    chosen_lines: dict[Path, dict[int, int]] = defaultdict(dict)  # file -> line -> position in the sample
    for position, (_, _, _, path, number) in enumerate(ranked[:size]):
        chosen_lines[path][number] = position
    records: dict[int, SynthRecord] = {}
    for path, positions in chosen_lines.items():
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                if number in positions and isinstance(record := from_dict(json.loads(line), "synth"), SynthRecord):
                    records[positions[number]] = record
    return [records[position] for position in sorted(records)]


def write_exemplars(path: Path, records: Iterable[SynthRecord]) -> None:
    """Write records as JSON lines in SYNTH's own schema."""
    write_rows(path, map(to_dict, records))


def write_rows(path: Path, rows: Iterable[dict]) -> None:
    # ASCII, because some readers split lines at Unicode line separators, which a text may contain.
    write_atomically(path, "".join(json.dumps(row, ensure_ascii=True) + "\n" for row in rows).encode())


Scan = Callable[[int], Iterator[Record | Rejected]]  # rows of a source from number n on


@dataclass(frozen=True)
class PackedFile:
    """Counts of a packed file. As JSON they are its marker file, which says that its shards are in place."""

    text_bytes: int  # UTF-8 bytes of the kept tokens
    dropped: dict[str, int]  # copies, by reason
    shards: list[ShardEntry]


@dataclass(frozen=True)
class PublishedTokens:
    """Result of `publish_tokens`: counts for the manifest, and the sample for retrieval."""

    rows_read: int
    documents: int
    rejected: dict[str, int]
    index: ShardIndex
    bytes_per_token: float
    exemplars: list[SynthRecord]
    samples: list[dict[str, Any]]
    contaminated: dict[str, int]  # hits by benchmark
    tokens_per_second: float  # of tokenising, in one process

    def row_figures(self) -> dict[str, float]:
        """Shares of the training rows: of filled positions, of cropped documents, of targets that are in replies.

        The last is what `train_on = "replies"` trains on; web text has none.
        """
        index = self.index
        share = None if index.form == "web" else index.trained_share("replies")
        figures = {"fill": index.fill(), "cropped_share": index.cropped_share(), "reply_share": share}
        return {name: round(value, 4) for name, value in figures.items() if value is not None}

    def facts(self) -> dict[str, Any]:
        index = self.index
        disk = index.total("bytes") / max(1, index.total("tokens"))
        return {
            "records": self.rows_read,
            "documents": self.documents,
            "rejected": self.rejected,
            "contaminated": self.contaminated,
            "tokens": index.total("tokens"),
            "rows": index.rows("train"),
            "validation_rows": index.rows("validation"),
            "shards": len(index.shards),
            "kept": index.total("tokens"),
            "cropped": index.total("cropped"),
            "cropped_documents": index.total("cropped_documents"),
            "padded": index.total("padded"),
            **self.row_figures(),
            "bytes_per_token": self.bytes_per_token,
            "disk_bytes_per_token": round(disk, 4),
        }


def write_tokens(
    scan: Scan,
    plan: CorpusPlan,
    work: Path,
    out: Path,
    emit: Emit,
    threads: int = 2,
    checks: DocumentChecks | None = None,
    against: Sequence[Path] = (),
) -> PublishedTokens:
    """Tokenise and pack `scan(0)` in this process; finished steps are skipped. Raises as `publish_tokens`."""
    folder, marker = work / "file", work / "packed.json"
    start_time, last_event_time = time.monotonic(), 0.0

    def progress(rows: int, tokens: int, total: int | None) -> None:
        nonlocal last_event_time
        if (now := time.monotonic()) - last_event_time > PROGRESS_SECONDS or rows == plan.records:
            rate, last_event_time = tokens / max(1e-9, now - start_time), now
            emit("progress", done=rows, total=plan.records, unit="records", note=f"{rate / 1e3:,.0f}k tokens/s")

    def rows() -> Iterator[Record | Rejected]:  # a generator: a finished file is not read again, not even opened
        yield from islice(scan(0), plan.records)

    batches = batched(rows(), plan.form)
    tokenise_file(batches, plan, checks or DocumentChecks(), folder, plan.exemplars, threads, progress)
    find_copies([folder], against, work / "settling", emit)
    pack_file(folder, 0, plan, marker, out)
    return publish_tokens([folder], [marker], plan, out)


def pack_file(folder: Path, number: int, plan: CorpusPlan, marker: Path, out: Path) -> PackedFile:
    """Pack the documents that `find_copies` kept into shards under `out`, then delete the file's token ids.

    `marker` is written once the shards are in place; a file with a marker is not packed again. Holds one shard in
    memory.
    """
    if marker.is_file():
        packed = read_packed_file(marker)
    else:
        private = marker.with_name(f".{marker.stem}.{uuid.uuid4().hex[:12]}")  # two processes may pack the same file
        try:
            packed = _pack(TokenisedFile(folder, plan.tokenizer.vocabulary), number, plan, private)
            for entry in packed.shards:
                target = out / entry.file
                target.parent.mkdir(parents=True, exist_ok=True)
                # The same file packed twice gives the same names and bytes: it does not matter whose shard stays.
                (private / entry.file).replace(target)
            if packed.shards:
                # The names too, before the marker says that they are in place and the ids are deleted.
                sync_folder(out / "shards")
                sync_folder(out)
        finally:
            shutil.rmtree(private, ignore_errors=True)
        write_atomically(marker, json.dumps(asdict(packed)).encode())
    TokenisedFile(folder, plan.tokenizer.vocabulary).release()
    return packed


def read_packed_file(marker: Path) -> PackedFile:
    plain = json.loads(marker.read_bytes())
    return PackedFile(**{**plain, "shards": [ShardEntry(**entry) for entry in plain["shards"]]})


def _pack(file: TokenisedFile, number: int, plan: CorpusPlan, private: Path) -> PackedFile:
    """Write the shards of a tokenised file, of both splits, under the folder `private`."""
    verdicts = read_verdicts(file.folder)
    dropped = {reason: int(count) for code, reason in REASONS.items() if (count := (verdicts == code).sum())}
    # The same test as `in_validation`, for all hashes at once, with integers: float64 cannot hold a 64-bit hash.
    limit = plan.validation_share * HASH_RANGE
    held_out = file.hashes < np.uint64(math.ceil(limit)) if limit < HASH_RANGE else np.ones(len(verdicts), bool)
    writer = _ShardWriter(file, number, plan, private)
    writer.write("train", np.flatnonzero((verdicts == KEPT) & ~held_out))
    writer.write("validation", np.flatnonzero((verdicts == KEPT) & held_out))
    return PackedFile(writer.text_bytes, dropped, writer.shards)


class _ShardWriter:
    """Packs the kept documents of a tokenised file into shards, one split after the other."""

    def __init__(self, file: TokenisedFile, number: int, plan: CorpusPlan, folder: Path) -> None:
        self._file, self._number, self._plan, self._folder = file, number, plan, folder
        self._tokens = np.asarray(file.tokens)  # a plain array view: slicing a memmap is ten times slower
        self._starts = np.concatenate([[0], np.cumsum(file.lengths)])
        self._byte_lengths = tokenizer_for(plan.tokenizer).byte_lengths.astype(np.uint8)  # no token is over 128 bytes
        self.shards: list[ShardEntry] = []
        self.text_bytes = 0

    def write(self, split: Split, documents: np.ndarray) -> None:
        """Pack documents of a split, numbers ascending; a shard ends with the document that fills it."""
        chat = self._plan.form == "synth"
        shard, tokens = 0, self._tokens
        packer: FirstFitPacker | ConcatPacker = (FirstFitPacker if chat else ConcatPacker)(self._plan.row_length)
        for start, end, prompt in self._offsets(documents):
            if isinstance(packer, FirstFitPacker):
                packer.add(tokens[start:end], prompt)
            else:
                packer.add(tokens[start:end])
            if packer.rows >= self._plan.rows_per_shard:
                self._close_shard(split, shard, packer)
                shard, packer = shard + 1, type(packer)(self._plan.row_length)
        if packer.rows:
            self._close_shard(split, shard, packer)

    def _offsets(self, documents: np.ndarray) -> Iterator[tuple[int, int, int]]:
        """(begin, end, prompt ids) of each document. Converted in blocks, because a Python int takes 32 bytes."""
        prompts = self._file.prompts
        for first in range(0, len(documents), DOCUMENT_BLOCK):
            block = documents[first : first + DOCUMENT_BLOCK]
            begins, ends = self._starts[block], self._starts[block + 1]
            own_prompts = np.zeros(len(block), np.int64) if prompts is None else prompts[block]
            yield from zip(begins.tolist(), ends.tolist(), own_prompts.tolist(), strict=True)

    def _close_shard(self, split: Split, number: int, packer: FirstFitPacker | ConcatPacker) -> None:
        packed = packer.finish()
        self.text_bytes += int(self._byte_lengths[packed.tokens].sum(dtype=np.int64))
        vocabulary = self._plan.tokenizer.vocabulary
        self.shards.append(write_shard(self._folder, number, split, packed, vocabulary, self._number))


def publish_tokens(folders: Sequence[Path], markers: Sequence[Path], plan: CorpusPlan, out: Path) -> PublishedTokens:
    """Write the index over all shards, and choose the exemplars. Raises `ConfigError` if there is no training row."""
    # Add up the counts: rows rejected while tokenising, and documents dropped as copies.
    counts = [read_counts(folder) for folder in folders]
    packed = [read_packed_file(marker) for marker in markers]
    shards = tuple(sorted((entry for file in packed for entry in file.shards), key=lambda entry: entry.file))
    rejected: Counter[str] = Counter()
    for reasons in (*(file.rejected for file in counts), *(file.dropped for file in packed)):
        rejected.update(reasons)
    if not any(entry.split == "train" for entry in shards):
        listed = ", ".join(f"{count} {reason}" for reason, count in sorted(rejected.items())) or "it is empty"
        raise ConfigError(f"no usable record for training in the source ({listed})")
    names = {entry.file for entry in shards}
    for path in (out / "shards").iterdir():
        if f"shards/{path.name}" not in names:  # written by a process that was believed dead and came back
            path.unlink()
    index = ShardIndex(plan.tokenizer, tokenizer_for(plan.tokenizer).fingerprint, plan.row_length, plan.form, shards)
    write_index(out, index)
    candidates = ((folder / CANDIDATES, read_verdicts(folder) == KEPT) for folder in folders)
    return PublishedTokens(
        rows_read=sum(file.rows for file in counts),
        documents=index.total("documents"),
        rejected=dict(sorted(rejected.items())),
        index=index,
        bytes_per_token=round(sum(file.text_bytes for file in packed) / index.total("tokens"), 4),
        exemplars=choose_exemplars(candidates, plan.exemplars) if plan.exemplars else [],
        samples=next((file.samples for file in counts if file.samples), []),
        contaminated=_publish_hits(folders, out),
        tokens_per_second=sum(file.tokens for file in counts) / max(1e-9, sum(file.seconds for file in counts)),
    )


def _publish_hits(folders: Sequence[Path], out: Path) -> dict[str, int]:
    """Count the overlaps with held-out questions by benchmark; write the first `MOST_HITS` into the artifact."""
    counts: Counter[str] = Counter()
    first_lines: list[str] = []
    for folder in folders:
        with (folder / HITS).open(encoding="utf-8") as lines:
            for line in lines:
                counts[json.loads(line)["benchmark"]] += 1
                if len(first_lines) < MOST_HITS:
                    first_lines.append(line)
    if first_lines:
        write_atomically(out / "contamination.jsonl", "".join(first_lines).encode())
    return dict(sorted(counts.items()))
