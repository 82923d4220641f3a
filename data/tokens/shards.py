"""The `tokens` artifact: shard files, and an index with their names, counts and digests.

    index.json                           what was tokenised and how; per shard its rows, counts, sizes and sha256
    rows.u4                              where each row begins in its shard (`data.tokens.loader`)
    shards/<split>-<file>-<number>.bin   ids (uint16 under 65,536 ids, else uint32), then the pieces of documents:
                                         per row how many, per piece its length, per chat record where the assistant
                                         begins. <file> is the number of the file in its source

Counts take two bytes per row and two to four per piece: with a small vocabulary and at least some 50 tokens per piece,
a token takes at most 2.1 bytes.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from nautile.common.errors import ConfigError
from nautile.common.files import INDEX_LIMIT, atomic_path, file_size, read_bounded_text, sha256_of, write_atomically
from nautile.configs.base import TrainOn
from nautile.configs.model import TokenizerConfig
from nautile.data.tokenizer import read_tokenizer, save_tokenizer, tokenizer_for

BLOCK = 128  # rows per block; a block's maximum of free space decides whether its rows are searched


@dataclass(frozen=True)
class PackedRows:
    """The rows of one shard. All arrays are in row order.

    tokens: [tokens] ids; pieces_per_row: [rows]; lengths: [pieces], which sum to the number of tokens, and to at most
    `row_length` per row; prompts: [pieces], tokens of each chat record before the assistant's part (None for web text).
    """

    tokens: np.ndarray
    pieces_per_row: np.ndarray
    lengths: np.ndarray
    prompts: np.ndarray | None
    row_length: int
    documents: int
    cropped_documents: int
    cropped_tokens: int

    @property
    def rows(self) -> int:
        return len(self.pieces_per_row)

    @property
    def padded_tokens(self) -> int:
        """Number of padding tokens that the loader adds to fill the rows."""
        return self.rows * self.row_length - len(self.tokens)


@dataclass
class ConcatPacker:
    """Concatenates documents and cuts the stream every `row_length` tokens. The last row may be short.

    A document that is cut continues as a new piece in the next row. The loader takes the target of the last token from
    there, so every token except a document's first is a training target exactly once.
    """

    row_length: int
    _documents: list[np.ndarray] = field(default_factory=list)
    _length: int = 0  # tokens added so far

    @property
    def rows(self) -> int:
        return -(-self._length // self.row_length)

    def add(self, ids: np.ndarray) -> None:
        """Append one document, its end-of-text included."""
        if len(ids):
            self._documents.append(ids)
            self._length += len(ids)

    def finish(self) -> PackedRows:
        lengths = np.array([len(document) for document in self._documents], np.int64)
        ends = np.cumsum(lengths)
        # A piece ends at the end of a document or of a row.
        row_ends = np.append(np.arange(self.row_length, self._length, self.row_length), self._length)
        cuts = np.union1d(ends, row_ends) if self._length else np.zeros(0, np.int64)
        return PackedRows(
            tokens=np.concatenate(self._documents) if self._documents else np.zeros(0, np.uint32),
            pieces_per_row=np.bincount((cuts - 1) // self.row_length, minlength=self.rows),
            lengths=np.diff(cuts, prepend=0),
            prompts=None,
            row_length=self.row_length,
            documents=len(self._documents),
            cropped_documents=0,
            cropped_tokens=0,
        )


@dataclass
class FirstFit:
    """Rows of `row_length` tokens, each with some free: a document goes to the first one with room for it."""

    row_length: int
    # Free tokens of each row [blocks, BLOCK], and the maximum of each block [blocks]: a search looks at the maxima and
    # at one block, not at every row.
    _free: np.ndarray = field(default_factory=lambda: np.zeros((1, BLOCK), np.int64))
    _most_free: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))
    rows: int = 0

    def place(self, length: int) -> int:
        """Take `length` tokens of the first row with room for them, or of a new row; returns its number."""
        row = self._first_fit(length)
        block, column = divmod(row, BLOCK)
        self._free[block, column] -= length
        self._most_free[block] = self._free[block].max()
        return row

    def _first_fit(self, length: int) -> int:
        """The number of the first row with room for `length` tokens; a new row if there is none."""
        fits = self._most_free >= length
        if fits[block := int(fits.argmax())]:
            return block * BLOCK + int((self._free[block] >= length).argmax())
        block, column = divmod(self.rows, BLOCK)
        if block == len(self._most_free):
            self._free = np.concatenate([self._free, np.zeros_like(self._free)])
            self._most_free = np.concatenate([self._most_free, np.zeros_like(self._most_free)])
        self._free[block, column] = self.row_length
        self.rows += 1
        return self.rows - 1


def packed_lengths(lengths: np.ndarray, row_length: int) -> tuple[float, float]:
    """(fill, share of cropped documents) of chat records with `lengths` tokens [documents] in rows of `row_length`."""
    rows = FirstFit(row_length)
    for length in np.minimum(lengths, row_length).tolist():
        rows.place(length)
    tokens = int(np.minimum(lengths, row_length).sum())
    return tokens / max(1, rows.rows * row_length), float((lengths > row_length).sum()) / max(1, len(lengths))


@dataclass
class FirstFitPacker:
    """Puts each document uncut into the first row that has room for it.

    A document longer than a row is cropped to its first `row_length` tokens, which fill a row. Dropping such documents
    would lose most of the long reasoning in SYNTH; and because a cropped one has no end marker, the model does not
    learn to stop early.
    """

    row_length: int
    _documents: list[np.ndarray] = field(default_factory=list)
    _prompts: list[int] = field(default_factory=list)
    _row_of: list[int] = field(default_factory=list)
    _cropped_documents: int = 0
    _cropped_tokens: int = 0

    def __post_init__(self) -> None:
        self._rows = FirstFit(self.row_length)

    @property
    def rows(self) -> int:
        return self._rows.rows

    def add(self, ids: np.ndarray, prompt: int) -> None:
        """Place one document, whose first `prompt` tokens come before the assistant's part."""
        if not len(ids):
            return
        if len(ids) > self.row_length:
            self._cropped_documents += 1
            self._cropped_tokens += len(ids) - self.row_length
            ids = ids[: self.row_length]
        row = self._rows.place(len(ids))
        self._documents.append(ids)
        self._prompts.append(min(prompt, len(ids)))
        self._row_of.append(row)

    def finish(self) -> PackedRows:
        """The rows of all documents added so far; the documents of a row stay in the order they were added."""
        row_of = np.array(self._row_of, np.int64)
        order = np.argsort(row_of, kind="stable")
        documents = [self._documents[i] for i in order]
        return PackedRows(
            tokens=np.concatenate(documents) if documents else np.zeros(0, np.uint32),
            pieces_per_row=np.bincount(row_of, minlength=self.rows),
            lengths=np.array([len(document) for document in documents], np.int64),
            prompts=np.array(self._prompts, np.int64)[order],
            row_length=self.row_length,
            documents=len(documents),
            cropped_documents=self._cropped_documents,
            cropped_tokens=self._cropped_tokens,
        )


FORMAT = "nautile-tokens-1"
OFFSETS = "rows.u4"
OFFSET_TYPE = np.dtype("<u4")
READERS = 8  # threads that read counts
_SHARD = re.compile(r"shards/(train|validation)-[0-9]{5,}-[0-9]{5,}\.bin")
REBUILD = "build it again with `nautile run --force --only ingest`"
Split = Literal["train", "validation"]


@dataclass(frozen=True)
class ShardEntry:
    """One shard in the index. `tokens`, `cropped`, `padded` and `prompt_tokens` count tokens.

    `prompt_tokens`: those before the assistant's part; None for web text.
    """

    file: str
    split: Split
    rows: int
    pieces: int
    documents: int
    tokens: int
    cropped: int
    cropped_documents: int
    padded: int
    bytes: int
    sha256: str
    prompt_tokens: int | None


@dataclass(frozen=True)
class ShardIndex:
    """`index.json`: everything that a loader needs before it opens a shard."""

    tokenizer: TokenizerConfig
    fingerprint: str
    row_length: int
    form: Literal["web", "synth"]
    shards: tuple[ShardEntry, ...]

    def rows(self, split: Split) -> int:
        return sum(entry.rows for entry in self.shards if entry.split == split)

    def total(self, count: str, split: Split | None = None) -> int:
        """The sum over shards of one field of `ShardEntry`, for `split` or for both splits."""
        return sum(getattr(entry, count) for entry in self.shards if split in (None, entry.split))

    def fill(self) -> float:
        """Share of the positions of the training rows that hold a token; the others are padding."""
        return self.total("tokens", "train") / max(1, self.rows("train") * self.row_length)

    def cropped_share(self) -> float:
        """Share of the training documents that were cropped to a row."""
        return self.total("cropped_documents", "train") / max(1, self.total("documents", "train"))

    def trained_share(self, train_on: TrainOn) -> float:
        """Share of the targets of the training rows that have a weight.

        Every token but the first of its document is a target, and the replies' targets are all tokens after the
        prompts. Where a prompt fills its row, no target is left.
        """
        if train_on == "all" or self.form == "web":
            return 1.0
        tokens = self.total("tokens", "train")
        targets = tokens - self.total("documents", "train")
        return (tokens - self.total("prompt_tokens", "train")) / max(1, targets)


def write_shard(
    folder: Path, number: int, split: Split, packed: PackedRows, vocabulary: int, file: int = 0
) -> ShardEntry:
    """Write one shard under `folder`/shards atomically and return its entry. `file`: number of the file in its source.

    The same rows give the same bytes.
    """
    counts = [packed.pieces_per_row, packed.lengths] + ([] if packed.prompts is None else [packed.prompts])
    dtype = count_type(packed.row_length)
    tokens = packed.tokens.astype(token_type(vocabulary), copy=False)
    content = b"".join([tokens.data, *(c.astype(dtype).data for c in counts)])
    name = f"shards/{split}-{file:05d}-{number:05d}.bin"
    write_atomically(folder / name, content)
    return ShardEntry(
        file=name,
        split=split,
        rows=packed.rows,
        pieces=len(packed.lengths),
        documents=packed.documents,
        tokens=len(packed.tokens),
        cropped=packed.cropped_tokens,
        cropped_documents=packed.cropped_documents,
        padded=packed.padded_tokens,
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        prompt_tokens=None if packed.prompts is None else int(packed.prompts.sum()),
    )


def write_index(folder: Path, index: ShardIndex) -> None:
    """Write `rows.u4`, then `index.json`; it is the last file of the artifact to be written."""
    with atomic_path(folder / OFFSETS) as temporary, temporary.open("wb") as file:
        for pairs in _row_offsets(folder, index):
            file.write(pairs.data)
    plain: dict[str, Any] = {
        "format": FORMAT,
        "tokenizer": save_tokenizer(folder, index.tokenizer),
        "fingerprint": index.fingerprint,
        "row_length": index.row_length,
        "form": index.form,
        "rows": {split: index.rows(split) for split in ("train", "validation")},
        **{name: index.total(name) for name in ("documents", "tokens", "cropped", "padded", "bytes")},
        "shards": [asdict(entry) for entry in index.shards],
    }
    write_atomically(folder / "index.json", (json.dumps(plain, indent=1, sort_keys=True) + "\n").encode())


def _row_offsets(folder: Path, index: ShardIndex) -> Iterator[np.ndarray]:
    """Where the rows of each shard begin, by the counts at its end: uint32 [rows + 1, 2] (first token, first piece)."""
    token_size, counts = token_type(index.tokenizer.vocabulary).itemsize, count_type(index.row_length)

    def read(entry: ShardEntry) -> np.ndarray:
        values = np.fromfile(folder / entry.file, counts, entry.rows + entry.pieces, offset=entry.tokens * token_size)
        first_piece = np.concatenate([[0], np.cumsum(values[: entry.rows], dtype=np.int64)])
        first_token = np.concatenate([[0], np.cumsum(values[entry.rows :], dtype=np.int64)])
        if first_piece[-1] != entry.pieces or first_token[-1] != entry.tokens:
            raise ConfigError(f"tokens artifact {folder}: shard {entry.file} is damaged (its counts differ); {REBUILD}")
        return np.stack([first_token[first_piece], first_piece], axis=1).astype(OFFSET_TYPE)

    with ThreadPoolExecutor(READERS) as pool:
        for start in range(0, len(index.shards), 16 * READERS):  # not all at once: the pairs would pile up in memory
            yield from pool.map(read, index.shards[start : start + 16 * READERS])


def read_index(folder: Path, *, whole: bool = True) -> ShardIndex:
    """Read and validate `index.json`; if `whole`, also check that each shard exists with its full size.

    `whole` is False where shards are fetched later. Raises `ConfigError` naming the artifact or the shard.
    """
    try:
        plain = json.loads(_index_text(folder))
        if plain["format"] != FORMAT:
            raise ConfigError(f"tokens artifact {folder}: format {plain['format']!r}, not {FORMAT!r}; {REBUILD}")
        index = ShardIndex(
            tokenizer=read_tokenizer(plain["tokenizer"], folder),
            fingerprint=plain["fingerprint"],
            row_length=plain["row_length"],
            form=plain["form"],
            shards=tuple(ShardEntry(**entry) for entry in plain["shards"]),
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"tokens artifact {folder}: index.json is damaged ({error}); {REBUILD}") from None
    # The file is valid JSON of this format. Now check that it fits the tokenizer and itself, and then the shards.
    if index.fingerprint != tokenizer_for(index.tokenizer).fingerprint:
        raise ConfigError(f"tokens artifact {folder}: written with other token ids than this tokenizer's; {REBUILD}")
    for entry in index.shards:
        if fault := _fault(entry, index):
            raise ConfigError(f"tokens artifact {folder}: index.json is damaged ({fault}); {REBUILD}")
    for entry in index.shards if whole else ():
        # A link could point out of the artifact, to a file that changes.
        size = None if (folder / entry.file).is_symlink() else file_size(folder / entry.file)
        if size != entry.bytes:
            problem = "is missing" if size is None else f"has {size} bytes instead of {entry.bytes}"
            raise ConfigError(f"tokens artifact {folder}: shard {entry.file} {problem}; {REBUILD}")
    return index


def _index_text(folder: Path) -> str:
    path = folder / "index.json"
    try:
        return read_bounded_text(path, INDEX_LIMIT)
    except ConfigError as error:
        problem = str(error).removeprefix(f"{path}:").strip()
        raise ConfigError(f"tokens artifact {folder}: index.json {problem}; {REBUILD}") from None


def _fault(entry: ShardEntry, index: ShardIndex) -> str | None:
    """Why an entry cannot come from `write_shard` (a path outside the folder, inconsistent counts); None if valid."""
    if not isinstance(entry.file, str) or not _SHARD.fullmatch(entry.file):
        return f"no shard is called {str(entry.file)[:80]!r}"
    counts = (entry.rows, entry.pieces, entry.tokens, entry.bytes)
    optional = () if entry.prompt_tokens is None and index.form == "web" else (entry.prompt_tokens,)
    if any(type(count) is not int or count < 0 for count in (*counts, *optional)):
        return f"{entry.file}: counts must be whole numbers of at least 0"
    # Per row its number of pieces; per piece its length, and in chat records also the length of its prompt.
    stored_counts = entry.rows + entry.pieces * (2 if index.form == "synth" else 1)
    size = entry.tokens * token_type(index.tokenizer.vocabulary).itemsize
    size += stored_counts * count_type(index.row_length).itemsize
    return None if size == entry.bytes else f"{entry.file}: its counts add up to {size} bytes, not {entry.bytes}"


def verify_shards(folder: Path, index: ShardIndex) -> None:
    """Compare the sha256 of every shard with the index. Raises `ConfigError` naming the first damaged shard."""
    for entry in index.shards:
        if sha256_of(folder / entry.file) != entry.sha256:
            raise ConfigError(
                f"tokens artifact {folder}: shard {entry.file} is damaged (its sha256 differs); {REBUILD}"
            )


def token_type(vocabulary: int) -> np.dtype:
    return np.dtype("<u2" if vocabulary < 65_536 else "<u4")


def count_type(row_length: int) -> np.dtype:
    return np.dtype("<u2" if row_length < 65_536 else "<u4")
