"""Records to a `tokens` artifact, resumable by shard: screen, split off validation, tokenise, pack, write.

The stream of records is worked in parts. A part ends with the record that fills `rows_per_shard` training rows and its
rows depend on its own records alone, so after a kill the finished parts stand, the work goes on at the record the last
one ended with, and the bytes are those of an uninterrupted run.
"""

import itertools
import json
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from configs.emit import Emit
from configs.model import TokenizerConfig
from configs.section import ConfigError
from data.chat import encode_turns, turn_of
from data.deduplicate import Seen, content_hash, in_validation
from data.exemplars import Sample, read_candidates, write_candidates
from data.packing import FitPacker, SplitPacker
from data.records import Record, Rejected, SynthRecord, WebRecord
from data.shards import Index, ShardEntry, Split, file_size, write_atomically, write_index, write_shard
from data.tokenizer import Tokenizer, tokenizer_for

log = logging.getLogger(__name__)

BATCH = 512  # records tokenised at once
BATCH_CHARACTERS = 8_000_000  # or fewer, when they are long: bounds memory
PROGRESS_SECONDS = 0.5

Scan = Callable[[int], Iterator[Record | Rejected]]  # rows of a source from the n-th on


@dataclass(frozen=True)
class CorpusPlan:
    """How a stream of records becomes rows. `records`: stop after so many rows of the source (None: all)."""

    tokenizer: TokenizerConfig
    form: Literal["web", "synth"]
    row_length: int
    rows_per_shard: int
    validation_share: float
    exemplars: int = 0
    records: int | None = None


@dataclass(frozen=True)
class Part:
    """What is remembered of a finished part; its JSON is the mark that the part is whole."""

    number: int
    end: int  # rows of the source read up to its end
    last: bool
    text_bytes: int  # UTF-8 bytes of the kept tokens
    rejected: dict[str, int]
    shards: list[ShardEntry]


@dataclass(frozen=True)
class Corpus:
    """What `write_tokens` made: counts for the manifest, and the sample for retrieval."""

    rows_read: int
    documents: int
    rejected: dict[str, int]
    index: Index
    bytes_per_token: float
    exemplars: list[SynthRecord]
    tokens_per_second: float | None  # of the work done in this process; None when nothing was left to do

    def facts(self) -> dict[str, Any]:
        """The counts as plain data, named for people."""
        index = self.index
        disk = index.total("bytes") / max(1, index.total("tokens"))
        return {
            "records": self.rows_read,
            "documents": self.documents,
            "rejected": self.rejected,
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


def write_tokens(scan: Scan, plan: CorpusPlan, work: Path, out: Path, emit: Emit, threads: int = 2) -> Corpus:
    """Tokenise and pack the rows of `scan` into `out`; parts already finished in `work` are not done again.

    `scan(n)` must give the same rows from the n-th on every time. Raises `ConfigError` if not one record is usable.
    """
    parts = _finished_parts(work)
    seen, sample = Seen(), Sample(plan.exemplars)
    for part in parts:
        seen.load(_sidecar(work, part.number, "seen"))
    start = parts[-1].end if parts else 0
    speed = None
    if not (parts and parts[-1].last):
        if parts:
            log.info("going on after %d finished shards, at record %d", len(parts), start)
        begun = time.monotonic()
        worker = _Worker(plan, work, emit, seen, begun, threads)
        rows = itertools.islice(scan(start), None if plan.records is None else max(0, plan.records - start))
        fresh = worker.run(rows, len(parts), start)
        speed = sum(_tokens(part) for part in fresh) / max(1e-9, time.monotonic() - begun)
        parts += fresh
    for part in parts:
        read_candidates(_sidecar(work, part.number, "exemplars"), sample)
    return _published(plan, parts, work, out, sample, speed)


@dataclass
class _Worker:
    """Runs through the rows that are left and closes one part after the other."""

    plan: CorpusPlan
    work: Path
    emit: Emit
    seen: Seen
    begun: float
    threads: int

    def run(self, rows: Iterator[Record | Rejected], number: int, end: int) -> list[Part]:
        tokenizer = tokenizer_for(self.plan.tokenizer)
        parts: list[Part] = []
        building, told = _Building(self.plan), 0.0
        for batch in _batches(rows):
            fresh = [record for record in batch if not isinstance(record, Rejected)]
            encoded = dict(zip(map(id, fresh), _encode(tokenizer, fresh, self.threads), strict=True))
            for record in batch:
                end += 1
                building.add(record, encoded.get(id(record)), self.seen)
                if building.full:
                    parts.append(self._close(building, number + len(parts), end, last=False))
                    building = _Building(self.plan)
            if time.monotonic() - told > PROGRESS_SECONDS:
                told = time.monotonic()
                self._progress(end, sum(_tokens(part) for part in parts) + building.tokens)
        parts.append(self._close(building, number + len(parts), end, last=True))
        self._progress(end, sum(_tokens(part) for part in parts))
        return parts

    def _close(self, building: "_Building", number: int, end: int, last: bool) -> Part:
        """Write a part's files, its mark last."""
        shards, text_bytes = [], 0
        byte_lengths = tokenizer_for(self.plan.tokenizer).byte_lengths
        for split, packer in building.packers.items():
            if packer.rows:
                packed = packer.finish()
                text_bytes += int(byte_lengths[packed.tokens].sum())
                shards.append(write_shard(self.work, number, split, packed, self.plan.tokenizer.vocabulary))
        write_atomically(_sidecar(self.work, number, "seen"), self.seen.take_fresh())
        write_candidates(_sidecar(self.work, number, "exemplars"), building.sample.candidates())
        part = Part(number, end, last, text_bytes, dict(sorted(building.rejected.items())), shards)
        write_atomically(_sidecar(self.work, number, "json"), json.dumps(asdict(part)).encode())
        return part

    def _progress(self, done: int, tokens: int) -> None:
        rate = tokens / max(1e-9, time.monotonic() - self.begun)
        self.emit("progress", done=done, total=self.plan.records, unit="records", note=f"{rate / 1e3:,.0f}k tokens/s")


class _Building:
    """A part in the making."""

    def __init__(self, plan: CorpusPlan) -> None:
        self._plan = plan
        packer = SplitPacker if plan.form == "web" else FitPacker
        self.packers: dict[Split, SplitPacker | FitPacker] = {
            "train": packer(plan.row_length),
            "validation": packer(plan.row_length),
        }
        self.sample = Sample(plan.exemplars)
        self.rejected: Counter[str] = Counter()
        self.tokens = 0

    @property
    def full(self) -> bool:
        return self.packers["train"].rows >= self._plan.rows_per_shard

    def add(self, record: Record | Rejected, encoded: "_Encoded | None", seen: Seen) -> None:
        if isinstance(record, Rejected) or encoded is None:
            self.rejected[record.reason] += 1
            return
        digest = content_hash(record)
        if not seen.add(digest):
            self.rejected["duplicate"] += 1
            return
        split: Split = "validation" if in_validation(digest, self._plan.validation_share) else "train"
        packer = self.packers[split]
        if isinstance(packer, FitPacker):
            packer.add(*encoded)
        else:
            packer.add(encoded[0])
        self.tokens += len(encoded[0])
        if isinstance(record, SynthRecord) and split == "train":
            self.sample.offer(digest, record)


_Encoded = tuple[np.ndarray, int]  # ids of a document, and how many of them are not the assistant's (0 for web text)


def _encode(tokenizer: Tokenizer, records: list[Record], threads: int) -> list[_Encoded]:
    """Ids of each record; web text gets its end-of-text."""
    web = [record for record in records if isinstance(record, WebRecord)]
    if len(web) == len(records):
        end = np.array([tokenizer.end_of_text], np.uint32)
        texts = tokenizer.encode_arrays([record.text for record in web], threads)
        return [(np.concatenate([ids, end]), 0) for ids in texts]
    return encode_turns(tokenizer, [turn_of(record) for record in records if isinstance(record, SynthRecord)], threads)


def _batches(rows: Iterator[Record | Rejected]) -> Iterator[list[Record | Rejected]]:
    batch: list[Record | Rejected] = []
    characters = 0
    for row in rows:
        batch.append(row)
        characters += _characters(row)
        if len(batch) == BATCH or characters > BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _characters(row: Record | Rejected) -> int:
    if isinstance(row, WebRecord):
        return len(row.text)
    return len(row.synthetic_reasoning) + len(row.query) if isinstance(row, SynthRecord) else 0


def _sidecar(work: Path, number: int, suffix: str) -> Path:
    return work / f"part-{number:05d}.{suffix}"


def _finished_parts(work: Path) -> list[Part]:
    """The unbroken run of finished parts from the first on."""
    parts: list[Part] = []
    while (mark := _sidecar(work, len(parts), "json")).is_file():
        plain = json.loads(mark.read_bytes())
        part = Part(**{**plain, "shards": [ShardEntry(**entry) for entry in plain["shards"]]})
        if any(file_size(work / entry.file) != entry.bytes for entry in part.shards):
            log.warning("part %d lost a shard: the work goes on from there", part.number)
            break
        parts.append(part)
    return parts


def _published(
    plan: CorpusPlan, parts: list[Part], work: Path, out: Path, sample: Sample, speed: float | None
) -> Corpus:
    """Lay the shards into `out` under their index and add up the counts."""
    shards = tuple(sorted((entry for part in parts for entry in part.shards), key=lambda entry: entry.file))
    rejected: Counter[str] = sum((Counter(part.rejected) for part in parts), Counter())
    if not any(entry.split == "train" for entry in shards):
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(rejected.items())) or "it is empty"
        raise ConfigError(f"no usable record for training in the source ({reasons})")
    shutil.rmtree(out, ignore_errors=True)  # an earlier attempt may have left half of it
    for entry in shards:
        _link(work / entry.file, out / entry.file)
    index = Index(plan.tokenizer, tokenizer_for(plan.tokenizer).fingerprint, plan.row_length, plan.form, shards)
    write_index(out, index)
    return Corpus(
        rows_read=parts[-1].end,
        documents=index.total("documents"),
        rejected=dict(sorted(rejected.items())),
        index=index,
        bytes_per_token=round(sum(part.text_bytes for part in parts) / index.total("tokens"), 4),
        exemplars=sample.chosen(),
        tokens_per_second=speed,
    )


def _link(source: Path, target: Path) -> None:
    """A second name for the same file, or a copy where the file system has no hard links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _tokens(part: Part) -> int:
    return sum(entry.tokens for entry in part.shards)
