"""Units of tokenised documents to one `tokens` artifact: which are dropped, packed into rows, indexed, counted.

Three steps, for units that are worked on anywhere and in any order (`tasks.ingest`); `write_tokens` does all three
here, for documents that one process has:

    data.tokens.tokenise_file.tokenise_file     a file of the source -> a unit of ids and hashes
    data.screening.corpus_copies.find_copies    the hashes of all units -> which documents are copies: needs every unit
    pack_unit                      a unit -> its shards, after which its ids are removed
    publish                        the index over all shards, the counts, the exemplars

Names and bytes of the shards depend on the unit's place in the source, never on who worked when.
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
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import ConfigError
from common.events import Emit
from common.files import write_atomically
from data.records import Record, Rejected, SynthRecord, batched
from data.screening.corpus_copies import KEPT, REASONS, find_copies, read_verdicts
from data.screening.text_hash import HASH_RANGE
from data.tokenizer import tokenizer_for
from data.tokens.exemplar_sample import choose_exemplars
from data.tokens.packing import ConcatPacker, FirstFitPacker
from data.tokens.shards import ShardEntry, ShardIndex, Split, write_index, write_shard
from data.tokens.tokenise_file import (
    CANDIDATES,
    HITS,
    CorpusPlan,
    DocumentChecks,
    FileCounts,
    TokenisedFile,
    read_counts,
    tokenise_file,
)

log = logging.getLogger(__name__)

PROGRESS_SECONDS = 0.5
PIECE = 4096  # documents
HITS_SHOWN = 10_000

Scan = Callable[[int], Iterator[Record | Rejected]]  # rows of a source from the n-th on


@dataclass(frozen=True)
class PackedFile:
    """What is remembered of a packed unit; its JSON is the mark that its shards are in place."""

    text_bytes: int  # UTF-8 bytes of the kept tokens
    dropped: dict[str, int]  # copies, by reason
    shards: list[ShardEntry]


@dataclass(frozen=True)
class PublishedTokens:
    """What `publish_tokens` made: counts for the manifest, and the sample for retrieval."""

    rows_read: int
    documents: int
    rejected: dict[str, int]
    index: ShardIndex
    bytes_per_token: float
    exemplars: list[SynthRecord]
    samples: list[dict[str, Any]]
    contaminated: dict[str, int]  # hits by benchmark
    tokens_per_second: float  # of the first round, in one process

    def facts(self) -> dict[str, Any]:
        """The counts as plain data, named for people."""
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
    screens: DocumentChecks | None = None,
    against: Sequence[Path] = (),
) -> PublishedTokens:
    """Tokenise and pack the rows of `scan(0)` into `out`, in this process; each of the three steps is done once.

    Raises `ConfigError` if not one record is usable.
    """
    unit, mark = work / "unit", work / "packed.json"
    begun, last = time.monotonic(), 0.0

    def told(rows: int, tokens: int, total: int | None) -> None:
        nonlocal last
        if (now := time.monotonic()) - last > PROGRESS_SECONDS or rows == plan.records:
            rate, last = tokens / max(1e-9, now - begun), now
            emit("progress", done=rows, total=plan.records, unit="records", note=f"{rate / 1e3:,.0f}k tokens/s")

    def rows() -> Iterator[Record | Rejected]:
        for number, row in enumerate(scan(0)):
            if number == plan.records:
                return
            yield row

    tokenise_file(batched(rows(), plan.form), plan, screens or DocumentChecks(), unit, plan.exemplars, threads, told)
    find_copies([unit], against, work / "settling", emit)
    pack_file(unit, 0, plan, mark, out)
    return publish_tokens([unit], [mark], plan, out)


def pack_file(folder: Path, number: int, plan: CorpusPlan, mark: Path, out: Path) -> PackedFile:
    """Pack the documents of a settled unit that were kept, write its shards under `out`, and give its ids' disk back.

    `mark` is written when the shards are in place; a unit with a mark is not done again. Memory: one shard.
    """
    if mark.is_file():
        packed = read_packed_file(mark)
    else:
        private = mark.with_name(f"{mark.stem}.{uuid.uuid4().hex[:12]}")  # two processes may do the same unit
        try:
            packed = _packed(TokenisedFile(folder, plan.tokenizer.vocabulary), number, plan, private)
            for entry in packed.shards:
                target = out / entry.file
                target.parent.mkdir(parents=True, exist_ok=True)
                (private / entry.file).replace(target)
        finally:
            shutil.rmtree(private, ignore_errors=True)
        write_atomically(mark, json.dumps(asdict(packed)).encode())
    TokenisedFile(folder, plan.tokenizer.vocabulary).release()
    return packed


def read_packed_file(mark: Path) -> PackedFile:
    """What is remembered of a packed unit."""
    plain = json.loads(mark.read_bytes())
    return PackedFile(**{**plain, "shards": [ShardEntry(**entry) for entry in plain["shards"]]})


def _packed(unit: TokenisedFile, number: int, plan: CorpusPlan, private: Path) -> PackedFile:
    verdict = read_verdicts(unit.folder)
    dropped = {reason: int(count) for code, reason in REASONS.items() if (count := (verdict == code).sum())}
    limit = plan.validation_share * HASH_RANGE  # as `in_validation` has it, without a detour over floats
    held_out = unit.hashes < np.uint64(math.ceil(limit)) if limit < HASH_RANGE else np.ones(len(verdict), bool)
    packing = _Packing(unit, number, plan, private)
    for split, chosen in (("train", ~held_out), ("validation", held_out)):
        packing.run(split, np.flatnonzero((verdict == KEPT) & chosen))
    return PackedFile(packing.text_bytes, dropped, packing.shards)


class _Packing:
    """The kept documents of a unit into shards, one split after the other."""

    def __init__(self, unit: TokenisedFile, number: int, plan: CorpusPlan, folder: Path) -> None:
        self._unit, self._number, self._plan, self._folder = unit, number, plan, folder
        self._tokens = np.asarray(unit.tokens)  # a plain view: slicing a memmap costs ten times as much
        self._starts = np.concatenate([[0], np.cumsum(unit.lengths)])
        self._byte_lengths = tokenizer_for(plan.tokenizer).byte_lengths.astype(np.uint8)  # no token is over 128 bytes
        self.shards: list[ShardEntry] = []
        self.text_bytes = 0

    def run(self, split: Split, documents: np.ndarray) -> None:
        """`documents`: their places in the unit, ascending. A shard ends with the document that fills it."""
        chat = self._plan.form == "synth"
        made, tokens = 0, self._tokens
        packer: FirstFitPacker | ConcatPacker = (FirstFitPacker if chat else ConcatPacker)(self._plan.row_length)
        for start, end, prompt in self._places(documents):
            if isinstance(packer, FirstFitPacker):
                packer.add(tokens[start:end], prompt)
            else:
                packer.add(tokens[start:end])
            if packer.rows >= self._plan.rows_per_shard:
                self._close(split, made, packer)
                made, packer = made + 1, type(packer)(self._plan.row_length)
        if packer.rows:
            self._close(split, made, packer)

    def _places(self, documents: np.ndarray) -> Iterator[tuple[int, int, int]]:
        """Where each document begins and ends, and its prompt; a piece at a time, for an int is 32 bytes in Python."""
        prompts = self._unit.prompts
        for first in range(0, len(documents), PIECE):
            some = documents[first : first + PIECE]
            before = np.zeros(len(some), np.int64) if prompts is None else prompts[some]
            yield from zip(self._starts[some].tolist(), self._starts[some + 1].tolist(), before.tolist(), strict=True)

    def _close(self, split: Split, number: int, packer: FirstFitPacker | ConcatPacker) -> None:
        packed = packer.finish()
        self.text_bytes += int(self._byte_lengths[packed.tokens].sum(dtype=np.int64))
        vocabulary = self._plan.tokenizer.vocabulary
        self.shards.append(write_shard(self._folder, number, split, packed, vocabulary, self._number))


def publish_tokens(units: Sequence[Path], marks: Sequence[Path], plan: CorpusPlan, out: Path) -> PublishedTokens:
    """The index over the shards of all units, and the counts. Raises `ConfigError` if nothing is there to train on."""
    counts = [read_counts(unit) for unit in units]
    packed = [read_packed_file(mark) for mark in marks]
    shards = tuple(sorted((entry for unit in packed for entry in unit.shards), key=lambda entry: entry.file))
    rejected: Counter[str] = Counter()
    for reasons in (*(one.rejected for one in counts), *(one.dropped for one in packed)):
        rejected.update(reasons)
    if not any(entry.split == "train" for entry in shards):
        told = ", ".join(f"{count} {reason}" for reason, count in sorted(rejected.items())) or "it is empty"
        raise ConfigError(f"no usable record for training in the source ({told})")
    names = {entry.file for entry in shards}
    for path in (out / "shards").iterdir():
        if f"shards/{path.name}" not in names:  # of a process that was taken for lost and came back
            path.unlink()
    index = ShardIndex(plan.tokenizer, tokenizer_for(plan.tokenizer).fingerprint, plan.row_length, plan.form, shards)
    write_index(out, index)
    return PublishedTokens(
        rows_read=sum(one.rows for one in counts),
        documents=index.total("documents"),
        rejected=dict(sorted(rejected.items())),
        index=index,
        bytes_per_token=round(sum(unit.text_bytes for unit in packed) / index.total("tokens"), 4),
        exemplars=_exemplars(units, plan),
        samples=_samples(counts),
        contaminated=_hits(units, out),
        tokens_per_second=sum(one.tokens for one in counts) / max(1e-9, sum(one.seconds for one in counts)),
    )


def _exemplars(units: Sequence[Path], plan: CorpusPlan) -> list[SynthRecord]:
    if not plan.exemplars:
        return []
    return choose_exemplars(((unit / CANDIDATES, read_verdicts(unit) == KEPT) for unit in units), plan.exemplars)


def _samples(counts: Sequence[FileCounts]) -> list[dict[str, Any]]:
    return next((one.samples for one in counts if one.samples), [])


def _hits(units: Sequence[Path], out: Path) -> dict[str, int]:
    """The overlaps with held-out questions by benchmark; the first of them go into the artifact, to be looked at."""
    found: Counter[str] = Counter()
    shown: list[str] = []
    for unit in units:
        with (unit / HITS).open(encoding="utf-8") as lines:
            for line in lines:
                found[json.loads(line)["benchmark"]] += 1
                if len(shown) < HITS_SHOWN:
                    shown.append(line)
    if shown:
        write_atomically(out / "contamination.jsonl", "".join(shown).encode())
    return dict(sorted(found.items()))
