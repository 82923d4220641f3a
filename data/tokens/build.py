"""Build a `tokens` artifact from tokenised files: drop copies, pack into rows, index, count.

Four steps. `tasks.ingest` runs the first and the third once per file, in any process and order; `write_tokens` runs all
of them in this process, for a source that needs no parallelism:

    data.tokens.tokenise_file.tokenise_file     a file of the source -> a folder of ids and hashes
    data.screening.corpus_copies.find_copies    the hashes of all files -> which documents are copies
    pack_file                                   a tokenised file -> its shards; its ids are deleted
    publish_tokens                              the index over all shards, the counts, the exemplars

Names and bytes of the shards depend only on the source and the file's number in it, not on processes or their order.
"""

import json
import logging
import math
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from nautile.common.errors import ConfigError
from nautile.common.events import Emit
from nautile.common.files import sync_folder, write_atomically
from nautile.data.records import Record, Rejected, SynthRecord, batched
from nautile.data.screening.corpus_copies import KEPT, REASONS, find_copies, read_verdicts
from nautile.data.screening.text_hash import HASH_RANGE
from nautile.data.tokenizer import tokenizer_for
from nautile.data.tokens.exemplar_sample import choose_exemplars
from nautile.data.tokens.packing import ConcatPacker, FirstFitPacker
from nautile.data.tokens.shards import ShardEntry, ShardIndex, Split, write_index, write_shard
from nautile.data.tokens.tokenise_file import (
    CANDIDATES,
    HITS,
    CorpusPlan,
    DocumentChecks,
    TokenisedFile,
    read_counts,
    tokenise_file,
)

log = logging.getLogger(__name__)

PROGRESS_SECONDS = 0.5
DOCUMENT_BLOCK = 4096  # documents whose offsets are Python integers at a time
MOST_HITS = 10_000  # overlaps with held-out questions that are written into the artifact; all are counted

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
        """The counts as plain data, with the names that manifests show."""
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
    """Tokenise and pack the rows of `scan(0)` into `out`, in this process; finished steps are skipped.

    Raises `ConfigError` if not one record is usable.
    """
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
    """Read the marker of a packed file."""
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
        """Pack documents of one split, given by their numbers in the file, ascending.

        A shard ends with the document that fills it.
        """
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
    """Write the index over the shards of all files, and choose the exemplars.

    Raises `ConfigError` if there is nothing to train on.
    """
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
