"""The pretraining data loader: the batch of a step is a pure function of (seed, step).

There is no state between steps, so a resume needs only the step number, and every host can build its own slice of the
same global batch. A row is located by arithmetic: its phase from the token budgets, its source from `Mixture`, its
position in the epoch from `data.shuffle`, its shard from the index.

What is trained on is decided by the targets' weights alone (`target_weights`), for pretraining, tuning and
self-distillation: with `train_on = "replies"` the targets inside the prompt have weight 0, those of the reply 1, its
first token and its end marker included. With "all" every target has weight 1, and padding 0.
"""

import os
import resource
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nautile.common.errors import ConfigError
from nautile.common.files import RemoteFiles, file_size
from nautile.configs.base import TrainOn
from nautile.configs.model import TokenizerConfig
from nautile.configs.training import PhaseConfig
from nautile.data.shuffle import permute
from nautile.data.tokenizer import tokenizer_for
from nautile.data.tokens.shards import (
    OFFSET_TYPE,
    OFFSETS,
    REBUILD,
    ShardIndex,
    Split,
    count_type,
    read_index,
    token_type,
    verify_shards,
)
from nautile.data.tokens.source_reading import SourceReading

RESERVED_FILES = 512  # descriptors reserved for everything else in the process
MOST_FILES = 65_536
READERS = 8  # threads that open remote shards
ROWS_PER_ADVICE = 64  # rows that the kernel is advised of before the first of them is read


class PackedRow(NamedTuple):
    """A row without padding. `following`: the id that continues its last piece in the next row, if there is one.

    `prompts`: leading tokens of each piece that are not trained on; None: all pieces are trained on as a whole.
    """

    ids: np.ndarray
    lengths: np.ndarray
    prompts: np.ndarray | None
    following: int | None


class OpenFiles:
    """An LRU cache of open file descriptors, for `files` files.

    Its capacity is the process's limit of open files, which is raised to the hard limit if needed. Open shards of a
    `remote`, of up to `largest` bytes each, take at most half of the disk space that remote files may occupy here.
    """

    def __init__(self, files: int, remote: RemoteFiles | None = None, largest: int = 1) -> None:
        needed = min(files, MOST_FILES) + RESERVED_FILES
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        soft, hard = (needed if limit == resource.RLIM_INFINITY else limit for limit in limits)
        if soft < min(needed, hard):
            soft = min(needed, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limits[1]))
        self._capacity = max(ROWS_PER_ADVICE, min(files, soft - RESERVED_FILES))
        self._remote = remote
        if remote is not None:
            self._capacity = min(self._capacity, max(1, remote.limit // (2 * largest)))
        self.together = min(ROWS_PER_ADVICE, self._capacity)  # files that `descriptors` may open in one call
        self._open: OrderedDict[str, int] = OrderedDict()

    def descriptors(self, paths: Sequence[str]) -> list[int]:
        """The descriptors of at most `together` files, valid until the next call.

        Raises `OSError` naming a file that cannot be opened, and the errors of `remote`.
        """
        distinct_paths = dict.fromkeys(paths)
        for path in distinct_paths.keys() & self._open.keys():
            self._open.move_to_end(path)
        closed_paths = [path for path in distinct_paths if path not in self._open]
        while self._open and len(self._open) + len(closed_paths) > self._capacity:
            os.close(self._open.popitem(last=False)[1])
        if self._remote is None:
            for path in closed_paths:
                self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        elif closed_paths:
            with ThreadPoolExecutor(READERS) as pool:
                openings = {path: pool.submit(self._remote.open, path) for path in closed_paths}
            # If some fail, register the others first, or their descriptors would leak.
            failed = [opening for opening in openings.values() if opening.exception() is not None]
            self._open |= {path: opening.result() for path, opening in openings.items() if opening not in failed}
            for opening in failed:
                opening.result()
        return [self._open[path] for path in paths]

    def __del__(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)


class RowReader:
    """Reads rows of one artifact; `files` may be shared with other readers. For one thread at a time.

    Two reads a row, whatever the number of shards. `rows.u4`, which `data.tokens.shards` writes, says where each row
    begins: for every shard in the order of the index, `rows + 1` pairs (first token, first piece) of uint32. It is
    memory-mapped, 8 bytes a row: 1.2 GB for 36,000 shards of 4,096 rows, which the page cache holds as far as there is
    room.

    With `train_on` "replies" a third read gives the lengths of the prompts; the artifact must be of form "synth".
    """

    def __init__(
        self, folder: Path, index: ShardIndex, end_of_text: int, files: OpenFiles, train_on: TrainOn = "all"
    ) -> None:
        self._folder, self._end_of_text, self._files = folder, end_of_text, files
        self._is_web, self._reads_prompts = index.form == "web", train_on == "replies"
        self._token_type, self._count_type = token_type(index.tokenizer.vocabulary), count_type(index.row_length)
        self._paths = [f"{folder}/{entry.file}" for entry in index.shards]
        self._tokens = np.array([entry.tokens for entry in index.shards], np.int64)  # of each shard
        self._rows = np.array([entry.rows for entry in index.shards], np.int64)
        self._pieces = np.array([entry.pieces for entry in index.shards], np.int64)
        # For each split: the index numbers of its shards, and the cumulative number of rows at the end of each.
        self._shards = {
            split: np.array([number for number, entry in enumerate(index.shards) if entry.split == split], np.int64)
            for split in ("train", "validation")
        }
        self._ends = {split: np.cumsum(self._rows[shards]) for split, shards in self._shards.items()}
        self._first_pair = np.cumsum(self._rows + 1) - (self._rows + 1)
        pairs = int((self._rows + 1).sum())
        if file_size(folder / OFFSETS) != pairs * 2 * OFFSET_TYPE.itemsize:
            raise ConfigError(f"tokens artifact {folder}: {OFFSETS} is missing or damaged; {REBUILD}")
        self._offsets = np.memmap(folder / OFFSETS, OFFSET_TYPE, "r", 0, (pairs, 2))

    def rows(self, split: Split) -> int:
        return int(self._ends[split][-1]) if len(self._ends[split]) else 0

    def read(self, split: Split, numbers: np.ndarray) -> list[PackedRow]:
        """Read rows of `split` by number, in this order. Raises `ConfigError` for a missing or damaged shard."""
        # Row number -> shard -> pair of offsets at the row's beginning, and at the beginning of the next row.
        shard_positions = np.searchsorted(self._ends[split], numbers, side="right")
        shards = self._shards[split][shard_positions]
        pairs = self._first_pair[shards] + self._rows[shards] - (self._ends[split][shard_positions] - numbers)
        first, after = self._offsets[pairs].astype(np.int64).T, self._offsets[pairs + 1].astype(np.int64).T
        # For web text the token after the row is read too: it may continue the row's last document.
        reads_next = (after[0] < self._tokens[shards]) & self._is_web
        token_bytes, count_bytes = self._token_type.itemsize, self._count_type.itemsize
        counts_begin = self._tokens[shards] * token_bytes + self._rows[shards] * count_bytes
        # Byte ranges in the shard, as (offset, size): of the tokens, and of the piece lengths.
        lengths_at, lengths_size = counts_begin + first[1] * count_bytes, (after[1] - first[1]) * count_bytes
        ranges = [
            (first[0] * token_bytes, (after[0] - first[0] + reads_next) * token_bytes),
            (lengths_at, lengths_size),
        ]
        if self._reads_prompts:  # they follow the lengths of all pieces of the shard
            ranges.append((lengths_at + self._pieces[shards] * count_bytes, lengths_size))
        spans = np.array(ranges).transpose(2, 0, 1).tolist()
        shards, reads_next = shards.tolist(), reads_next.tolist()
        rows: list[PackedRow] = []
        for start in range(0, len(shards), self._files.together):
            block = slice(start, start + self._files.together)
            descriptors = self._descriptors(shards[block])
            for descriptor, span in zip(descriptors, spans[block], strict=True):
                for offset, size in span:
                    os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_WILLNEED)
            rows += map(self._row, shards[block], descriptors, reads_next[block], spans[block])
        return rows

    def _row(self, shard: int, descriptor: int, reads_next: bool, span: list[list[int]]) -> PackedRow:
        """Read one row by its byte ranges. `reads_next`: the tokens include the one after the row."""
        try:
            parts = [os.pread(descriptor, size, offset) for offset, size in span]
        except OSError as error:
            raise self._damaged(shard, f"cannot be read ({error.strerror})") from None
        if [len(part) for part in parts] != [size for _, size in span]:
            raise self._damaged(shard, "is too short")
        ids, lengths = np.frombuffer(parts[0], self._token_type), np.frombuffer(parts[1], self._count_type)
        prompts = np.frombuffer(parts[2], self._count_type) if self._reads_prompts else None
        ids, following = (ids[:-1], int(ids[-1])) if reads_next else (ids, None)
        if sum(lengths.tolist()) != len(ids):
            raise self._damaged(shard, f"and {OFFSETS} differ")
        if prompts is not None and (prompts > lengths).any():
            raise self._damaged(shard, "is damaged (a prompt is longer than its document)")
        # After an end-of-text the next token begins another document, and is no target.
        following = None if reads_next and ids[-1] == self._end_of_text else following
        return PackedRow(ids, lengths, prompts, following)

    def _descriptors(self, shards: list[int]) -> list[int]:
        try:
            return self._files.descriptors([self._paths[shard] for shard in shards])
        except OSError as error:
            if error.filename not in self._paths:  # an error of the local cache of remote files, not of a shard
                raise
            raise self._damaged(self._paths.index(error.filename), f"cannot be opened ({error.strerror})") from None

    def _damaged(self, shard: int, problem: str) -> ConfigError:
        name = os.path.relpath(self._paths[shard], self._folder)
        return ConfigError(f"tokens artifact {self._folder}: shard {name} {problem}; {REBUILD}")


def read_document_lengths(folder: Path, index: ShardIndex, most: int) -> np.ndarray:
    """Tokens of each chat record in the first `most` training shards, in row order: int64 [documents].

    Cropped ones have the length of a row. Raises `OSError` for a shard that is not in the folder.
    """
    token_size, counts = token_type(index.tokenizer.vocabulary).itemsize, count_type(index.row_length)
    entries = [entry for entry in index.shards if entry.split == "train"][:most]
    lengths = [
        np.fromfile(folder / e.file, counts, e.pieces, offset=e.tokens * token_size + e.rows * counts.itemsize)
        for e in entries
    ]
    return np.concatenate([np.zeros(0, np.int64), *lengths])


def target_weights(has_target: np.ndarray, positions: np.ndarray, prompts: np.ndarray | int) -> np.ndarray:
    """The weight of the target of each input token, 1 or 0: float32, in the shape of `has_target`.

    has_target: bool, whether a token of the same document follows. positions: of the input token in its document,
    from 0. prompts: leading tokens of its document that are not trained on, which is the length of its prompt, or 0
    to train on all; it broadcasts to `has_target`.
    """
    return (has_target & (positions + 1 >= prompts)).astype(np.float32)


Batch = dict[str, np.ndarray]
MILLION = 1_000_000  # shares are rounded to a millionth, so that row number times share stays within int64
BATCHES_AHEAD = 2  # prepared in a thread while the current step runs
DIGEST_LIMIT = 1 << 30  # bytes (about 1 s of sha256); of a larger artifact only the sizes are checked here


class Mixture:
    """Deterministic weighted interleaving of sources, without state.

    The first source takes row n if floor(share * (n + 1)) > floor(share * n); the others divide the remaining rows by
    the same rule. Among the first n rows a source's count differs from share * n by at most 1 (two sources), or by the
    number of sources.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.sources = tuple(sorted(weights))
        total = sum(weights.values())
        parts = [max(1, round(MILLION * weights[name] / total)) for name in self.sources]
        self._shares = [Fraction(parts[i], sum(parts[i:])) for i in range(len(parts) - 1)]

    def assign(self, first: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """The source of each of the rows first..first+rows-1, and its position among that source's rows.

        Returns (source, nth), both int64 [rows]; `source` indexes `sources`, `nth` counts from 0.
        """
        # `number`: position of each row among the rows that the sources before `i` did not take.
        number = np.arange(first, first + rows, dtype=np.int64)
        source = np.full(rows, len(self.sources) - 1, np.int64)
        nth = np.empty(rows, np.int64)
        unassigned = np.ones(rows, bool)
        for i, share in enumerate(self._shares):
            before = number * share.numerator // share.denominator
            is_own = unassigned & ((number + 1) * share.numerator // share.denominator > before)
            source[is_own], nth[is_own] = i, before[is_own]
            unassigned &= ~is_own
            number = number - before
        nth[unassigned] = number[unassigned]
        return source, nth

    def counts(self, rows: int) -> np.ndarray:
        """Number of rows of each source among the first `rows`; int64 [sources]."""
        remaining, counts = rows, []
        for share in self._shares:
            counts.append(remaining * share.numerator // share.denominator)
            remaining -= counts[-1]
        return np.array([*counts, remaining], np.int64)

    def rows_by_source(self, rows: int) -> dict[str, int]:
        return dict(zip(self.sources, self.counts(rows).tolist(), strict=True))


def phase_rows(phase: PhaseConfig, batch_rows: int, row_length: int) -> tuple[int, dict[str, int]]:
    """(steps, rows of each source) of a phase, which ends when `phase.tokens` positions are read, padding included."""
    steps = -(-phase.tokens // (batch_rows * row_length))
    return steps, Mixture(phase.mixture).rows_by_source(steps * batch_rows)


class Loader:
    """Batches for pretraining from several token sources; `rows` is the number of training rows by source.

    sources: artifact folder by source name. A phase lasts ceil(tokens / (batch_rows * row_length)) steps; padding
    counts as tokens. `before`: rows of each source that an earlier run has drawn; this run continues after them. With
    `hosts` > 1, `batch` returns rows [host * n, (host + 1) * n) of the global batch, n = batch_rows / hosts. `source`
    in a batch indexes `names`. `remote` opens shards that are not in the folders, and verifies what it downloads.
    `train_on`: "replies" for the sources of which only the replies are trained on; the other ones are as a whole.

    Raises `ConfigError` naming the artifact if its shards are damaged, or of another tokenizer or row length.
    """

    def __init__(
        self,
        sources: Mapping[str, Path],
        phases: Sequence[PhaseConfig],
        batch_rows: int,
        seed: int,
        tokenizer: TokenizerConfig,
        before: Mapping[str, int] | None = None,
        host: int = 0,
        hosts: int = 1,
        remote: RemoteFiles | None = None,
        train_on: Mapping[str, TrainOn] | None = None,
    ) -> None:
        if batch_rows % hosts:
            raise ConfigError(f"pretrain.batch_rows {batch_rows} does not divide among {hosts} hosts")
        folders = {name: Path(path) for name, path in sorted(sources.items())}
        indexes = {name: _checked_index(name, folder, tokenizer, remote) for name, folder in folders.items()}
        self.names: tuple[str, ...] = tuple(folders)
        self.row_length: int = _common_row_length(folders, indexes)
        self.train_on: dict[str, TrainOn] = {name: (train_on or {}).get(name, "all") for name in self.names}
        for name, index in indexes.items():
            _check_train_on(name, index, self.train_on[name])
        # The readers of all sources share one cache of open files.
        shards = [entry for index in indexes.values() for entry in index.shards]
        files = OpenFiles(len(shards), remote, max((entry.bytes for entry in shards), default=1))
        end_of_text = tokenizer_for(tokenizer).end_of_text
        self._readers = {
            name: RowReader(folders[name], index, end_of_text, files, self.train_on[name])
            for name, index in indexes.items()
        }
        self._seed, self._batch_rows, self._host, self._hosts = seed, batch_rows, host, hosts
        self.rows: dict[str, int] = {name: reader.rows("train") for name, reader in self._readers.items()}
        self._shares = {
            name: (index.fill(), index.cropped_share(), index.trained_share(self.train_on[name]))
            for name, index in indexes.items()
        }
        self._byte_lengths = tokenizer_for(tokenizer).byte_lengths
        # A phase begins at the step where the previous one ended; epochs of a source continue across phases.
        self._phases: list[_Phase] = []
        before = dict.fromkeys(self.names, 0) | {name: rows for name, rows in (before or {}).items() if name in sources}
        first, drawn = 0, dict(before)
        for config in phases:
            for name in config.mixture:
                if name not in folders:
                    raise ConfigError(
                        f"pretrain.phases {config.name!r}: no tokens of source {name!r}; there are {self.names}"
                    )
                if not self.rows[name]:
                    raise ConfigError(f"tokens artifact {folders[name]}: source {name!r} has no training rows")
            steps, counts = phase_rows(config, batch_rows, self.row_length)
            phase = _Phase(config.name, first, Mixture(config.mixture), dict(drawn))
            self._phases.append(phase)
            for name, count in counts.items():
                drawn[name] += count
            first += steps
        self.steps: int = first
        self.rows_drawn: dict[str, int] = {name: drawn[name] - before[name] for name in self.names}
        # One thread does all the reading; it prepares the next batches while the caller works on the current one.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self._ahead: dict[int, Future[Batch]] = {}

    def phase(self, step: int) -> str:
        return self._phase(step).name

    def rows_drawn_by(self, step: int) -> dict[str, int]:
        """Rows of each source that the first `step` steps draw, including those that an earlier run drew (`before`)."""
        phase = self._phase(step - 1)
        drawn = phase.mixture.rows_by_source((step - phase.first) * self._batch_rows)
        return {name: before + drawn.get(name, 0) for name, before in phase.drawn_before.items()}

    def epochs(self, source: str) -> float:
        """Number of passes over the training rows of `source` in all phases together."""
        return self.rows_drawn[source] / max(1, self.rows[source])

    def reading(self) -> dict[str, SourceReading]:
        return {name: SourceReading(self.train_on[name], *self._shares[name], self.epochs(name)) for name in self.names}

    def batch(self, step: int) -> Batch:
        """The batch of `step`, this host's rows: the arrays of `assemble`, `source` and `bytes`.

        source: int32 [rows], an index into `names`; bytes: int64 [rows], UTF-8 bytes of the targets of each row.
        Raises `IndexError` for a step beyond the phases.
        """
        self._phase(step)
        prefetched_steps = range(step, min(step + 1 + BATCHES_AHEAD, self.steps))
        for other in self._ahead.keys() - prefetched_steps:
            self._ahead.pop(other).cancel()
        for number in prefetched_steps:
            if number not in self._ahead:
                self._ahead[number] = self._thread.submit(self._build, number)
        return self._ahead.pop(step).result()

    def _build(self, step: int) -> Batch:
        """Read this host's rows of a step, source by source, and put them in the order of the mixture."""
        phase = self._phase(step)
        host_rows = self._batch_rows // self._hosts
        first = (step - phase.first) * self._batch_rows + self._host * host_rows
        row_sources, nth = phase.mixture.assign(first, host_rows)
        rows: dict[int, PackedRow] = {}  # by position in the batch
        source = np.zeros(host_rows, np.int32)
        for i, name in enumerate(phase.mixture.sources):
            positions = np.flatnonzero(row_sources == i)
            numbers = self._shuffled(name, nth[positions] + phase.drawn_before[name])
            source[positions] = self.names.index(name)
            rows |= zip(positions.tolist(), self._readers[name].read("train", numbers), strict=True)
        return self._finish([rows[position] for position in range(host_rows)], source)

    def validation(self, source: str, rows: int) -> Batch:
        """A batch of the first `rows` validation rows of `source`, or of as many as it has (possibly none)."""
        reader = self._readers[source]
        count = min(rows, reader.rows("validation"))
        rows_source = np.full(count, self.names.index(source), np.int32)
        future = self._thread.submit(reader.read, "validation", np.arange(count))
        return self._finish(future.result(), rows_source)

    def _shuffled(self, source: str, drawn: np.ndarray) -> np.ndarray:
        """Row numbers of the `drawn`-th draws of a source: each epoch is its own permutation of all rows."""
        size = self.rows[source]
        epochs, index = np.divmod(drawn, size)
        numbers = np.empty_like(index)
        for epoch in np.unique(epochs):
            of_epoch = epochs == epoch
            numbers[of_epoch] = permute(index[of_epoch], size, f"{self._seed}/{source}/{epoch}")
        return numbers

    def _finish(self, rows: list[PackedRow], source: np.ndarray) -> Batch:
        batch = assemble(rows, self.row_length)
        target_bytes = self._byte_lengths[batch["targets"]] * (batch["weights"] > 0)
        return {**batch, "source": source, "bytes": target_bytes.sum(axis=1, dtype=np.int64)}

    def _phase(self, step: int) -> "_Phase":
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step} is not among the {self.steps} steps of the phases")
        return self._phases[bisect_right([phase.first for phase in self._phases], step) - 1]


def assemble(rows: Sequence[PackedRow], row_length: int) -> Batch:
    """Pad ragged rows to arrays, all [rows, row_length].

    tokens int32 (0 in padding), targets int32 (the next token of the same document, else 0), segments int32 (from 1,
    one per piece of a document; 0 is padding), positions int32 (from 0 in each piece), weights float32 (1 where the
    target is trained on, else 0: see `data.tokens.loader`).
    """
    shape = (len(rows), row_length)
    tokens, segments, positions, prompts = (np.zeros(shape, np.int32) for _ in range(4))
    following = np.array([[-1 if row.following is None else row.following] for row in rows], np.int32).reshape(-1, 1)
    if rows:
        row_lengths = np.array([len(row.ids) for row in rows])
        pieces = np.array([len(row.lengths) for row in rows])
        lengths = np.concatenate([row.lengths for row in rows]).astype(np.int64)
        filled = np.arange(row_length) < row_lengths[:, None]
        tokens[filled] = np.concatenate([row.ids for row in rows])
        # Pieces and tokens are numbered over all rows at once; subtracting the number at the start of the row (of the
        # piece) makes the numbers local.
        of_row = np.arange(1, len(lengths) + 1) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        segments[filled] = np.repeat(of_row, lengths)
        positions[filled] = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        if any(row.prompts is not None for row in rows):
            of_piece = [np.zeros_like(row.lengths) if row.prompts is None else row.prompts for row in rows]
            prompts[filled] = np.repeat(np.concatenate(of_piece), lengths)
    # A token has a target if the next token is in the same piece, or continues the last piece in the next row.
    same = np.concatenate([(segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0), following >= 0], axis=1)
    targets = np.where(same, np.concatenate([tokens[:, 1:], following], axis=1), 0).astype(np.int32)
    return {
        "tokens": tokens,
        "targets": targets,
        "segments": segments,
        "positions": positions,
        "weights": target_weights(same, positions, prompts),
    }


@dataclass(frozen=True)
class _Phase:
    """A phase of training. `first`: its first step; `drawn_before`: rows of each source drawn before it."""

    name: str
    first: int
    mixture: Mixture
    drawn_before: dict[str, int]


def _checked_index(name: str, folder: Path, tokenizer: TokenizerConfig, remote: RemoteFiles | None) -> ShardIndex:
    """Read the index of a source's artifact; raises `ConfigError` if it is damaged or of another tokenizer."""
    index = read_index(folder, whole=remote is None)
    if index.fingerprint != tokenizer_for(tokenizer).fingerprint:
        raise ConfigError(
            f"tokens artifact {folder} (source {name!r}) was written with another tokenizer (ranks "
            f"{index.tokenizer.ranks}, and this run has {tokenizer.ranks}); {REBUILD}"
        )
    if remote is None and index.total("bytes") <= DIGEST_LIMIT:
        verify_shards(folder, index)
    return index


def _check_train_on(name: str, index: ShardIndex, train_on: TrainOn) -> None:
    """Raise `ConfigError` if a source is to be trained on replies that it does not have."""
    if train_on == "replies" and index.form == "web":
        raise ConfigError(f"source {name!r}: train_on 'replies' needs prompts, and form 'web' has none: leave it out")
    if index.trained_share(train_on) == 0:
        raise ConfigError(
            f"source {name!r}: train_on 'replies' leaves nothing to train on, because every prompt fills its row of "
            f"{index.row_length} tokens: raise ingest.row_length"
        )


def _common_row_length(folders: Mapping[str, Path], indexes: Mapping[str, ShardIndex]) -> int:
    """The row length of all sources. Raises `ConfigError` if they differ, or if there is no source."""
    lengths = {name: index.row_length for name, index in indexes.items()}
    if not lengths:
        raise ConfigError("pretrain: no token sources were given")
    first = next(iter(lengths.values()))
    for name, length in lengths.items():
        if length != first:
            raise ConfigError(
                f"tokens artifact {folders[name]} (source {name!r}) has rows of {length} tokens, "
                f"others of {first}; {REBUILD}"
            )
    return first
