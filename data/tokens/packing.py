"""Pack documents into rows of a fixed length: concatenate-and-split for web text, first-fit for chat records.

A packed shard is ragged: the tokens in row order without padding, and the length of each piece of a document. Padding
is added only when the loader builds a batch, so half-empty rows cost no disk space.
"""

from dataclasses import dataclass, field

import numpy as np

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
        """Number of rows."""
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
        """The rows of all documents added so far."""
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
