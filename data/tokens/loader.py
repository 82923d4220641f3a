"""The pretraining data loader: the batch of a step is a pure function of (seed, step).

There is no state between steps, so a resume needs only the step number, and every host can build its own slice of the
same global batch. A row is located by arithmetic: its phase from the token budgets, its source from `Mixture`, its
position in the epoch from `data.shuffle`, its shard from the index.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from nautile.common.errors import ConfigError
from nautile.common.files import RemoteFiles
from nautile.configs.base import TrainOn
from nautile.configs.model import TokenizerConfig
from nautile.configs.training import PhaseConfig
from nautile.data.shuffle import permute
from nautile.data.tokenizer import tokenizer_for
from nautile.data.tokens.row_reader import OpenFiles, PackedRow, RowReader
from nautile.data.tokens.shards import REBUILD, ShardIndex, read_index, verify_shards
from nautile.data.tokens.source_reading import SourceReading
from nautile.data.tokens.target_weights import target_weights

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
        """`counts` by the names of the sources."""
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
        """The name of the phase that `step` belongs to."""
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
        """How each source is read, in all phases together."""
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
    target is trained on, else 0: see `data.tokens.target_weights`).
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
            f"tokens artifact {folder} (source {name!r}) was written with tokenizer.ranks "
            f"{index.tokenizer.ranks}, this run has {tokenizer.ranks}; {REBUILD}"
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
