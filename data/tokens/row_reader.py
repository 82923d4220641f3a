"""Random access to the rows of a `tokens` artifact: two reads per row, independent of the number of shards.

A third one reads the lengths of the prompts, where a source is trained on its replies alone.

The file `rows.u4`, which `data.tokens.shards` writes, says where each row begins: for every shard in the
order of the index, `rows + 1` pairs (first token, first piece) of uint32. It is memory-mapped, 8 bytes a row: 1.2 GB
for 36,000 shards of 4,096 rows, which the page cache holds as far as there is room.

Shards stay open as far as the process's limit of open files allows. Before rows are read together, the kernel is
advised of all of them (`posix_fadvise`), so that a disk or file server can work on them in parallel.
"""

import os
import resource
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nautile.common.errors import ConfigError
from nautile.common.files import RemoteFiles, file_size
from nautile.configs.base import TrainOn
from nautile.data.tokens.shards import OFFSET_TYPE, OFFSETS, REBUILD, ShardIndex, Split, count_type, token_type

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

    With `train_on` "replies" rows have the lengths of their prompts; such an artifact must be of form "synth".
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
        """Rows in `split`."""
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
