"""Pack documents into rows of a fixed length: concatenate-and-split for web text, first-fit for chat records.

A packed shard is ragged: the kept tokens in row order with no padding, and the length of every piece of a document.
Padding appears only when the loader fills its arrays, so half-empty rows cost no disk.
"""

from dataclasses import dataclass, field

import numpy as np

BLOCK = 128  # rows whose free space is summed up by one maximum


@dataclass(frozen=True)
class PackedRows:
    """Rows of one shard. All arrays are in row order.

    tokens: [kept] ids; pieces_per_row: [rows]; lengths: [pieces], summing to kept and to at most `row_length` a row;
    prompts: [pieces], tokens of each chat record before the assistant's part (None for web text).
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
        return self.rows * self.row_length - len(self.tokens)


@dataclass
class ConcatPacker:
    """Concatenates documents and cuts the stream every `row_length` tokens. Nothing is lost; the last row may be short.

    A document cut by a row's end continues as a new piece in the next row. The loader takes the last token's target
    from there, so every token but a document's first is learnt exactly once.
    """

    row_length: int
    _documents: list[np.ndarray] = field(default_factory=list)
    _kept: int = 0

    @property
    def rows(self) -> int:
        return -(-self._kept // self.row_length)

    def add(self, ids: np.ndarray) -> None:
        """Append one document, its end-of-text included."""
        if len(ids):
            self._documents.append(ids)
            self._kept += len(ids)

    def finish(self) -> PackedRows:
        """Everything added so far as rows."""
        lengths = np.array([len(document) for document in self._documents], np.int64)
        ends = np.cumsum(lengths)
        # A piece ends where a document ends or a row does.
        row_ends = np.append(np.arange(self.row_length, self._kept, self.row_length), self._kept)
        cuts = np.union1d(ends, row_ends) if self._kept else np.zeros(0, np.int64)
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
class FirstFitPacker:
    """Puts each document whole into the first row that has room for it.

    The beginning of a document longer than a row fills a row of its own; the rest is counted as cropped. (Dropping it
    would lose most of the long reasoning in SYNTH. A beginning teaches nothing false: the row ends without an end
    marker.)
    """

    row_length: int
    _documents: list[np.ndarray] = field(default_factory=list)
    _prompts: list[int] = field(default_factory=list)
    _row_of: list[int] = field(default_factory=list)
    # Free tokens of each row [blocks, BLOCK], and the largest in each block: a fit is found by looking through the
    # blocks' maxima and one block, not through every row.
    _free: np.ndarray = field(default_factory=lambda: np.zeros((1, BLOCK), np.int64))
    _most_free: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))
    _cropped_documents: int = 0
    _cropped_tokens: int = 0
    rows: int = 0

    def add(self, ids: np.ndarray, prompt: int) -> None:
        """Place one document; its first `prompt` tokens are not the assistant's."""
        if not len(ids):
            return
        if len(ids) > self.row_length:
            self._cropped_documents += 1
            self._cropped_tokens += len(ids) - self.row_length
            ids = ids[: self.row_length]
        row = self._first_fit(len(ids))
        block, column = divmod(row, BLOCK)
        self._free[block, column] -= len(ids)
        self._most_free[block] = self._free[block].max()
        self._documents.append(ids)
        self._prompts.append(min(prompt, len(ids)))
        self._row_of.append(row)

    def _first_fit(self, length: int) -> int:
        """The first row with room for `length` tokens; a new one if there is none."""
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

    def finish(self) -> PackedRows:
        """Everything added so far as rows; the documents of a row stay in the order they were added."""
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
