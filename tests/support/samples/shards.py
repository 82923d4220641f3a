"""Shard files read in the plainest way, by which tests judge what was written and what the loader makes of it."""

from functools import cached_property
from pathlib import Path

import numpy as np

from nautile.data.tokens.shards import ShardEntry, ShardIndex, count_type, token_type


class Shard:
    """One shard file, memory-mapped."""

    def __init__(self, path: Path, entry: ShardEntry, index: ShardIndex) -> None:
        self.entry = entry
        self._path = path
        self._token_type = token_type(index.tokenizer.vocabulary)
        self._count_type = count_type(index.row_length)
        self._form = index.form

    @cached_property
    def tokens(self) -> np.ndarray:
        """All ids of the shard in row order, [tokens]."""
        return np.memmap(self._path, self._token_type, "r", 0, (self.entry.tokens,))

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each piece, [pieces]."""
        return self._counts(self.entry.rows, self.entry.pieces)

    @cached_property
    def prompts(self) -> np.ndarray | None:
        """Tokens of each chat record before the assistant's part, [pieces]; None for web text."""
        return self._counts(self.entry.rows + self.entry.pieces, self.entry.pieces) if self._form == "synth" else None

    @cached_property
    def first_piece(self) -> np.ndarray:
        """The number of the first piece of each row, [rows + 1]."""
        return np.concatenate([[0], np.cumsum(self._counts(0, self.entry.rows), dtype=np.int64)])

    @cached_property
    def first_token(self) -> np.ndarray:
        """The offset of the first token of each row, [rows + 1]."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])[self.first_piece]

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, piece lengths) of a row, without padding."""
        tokens = self.tokens[self.first_token[number] : self.first_token[number + 1]]
        return tokens, self.lengths[self.first_piece[number] : self.first_piece[number + 1]]

    def following(self, number: int, end_of_text: int) -> int | None:
        """The id that continues a row's last document in the next row, if the row's end cuts it (web text only)."""
        end = int(self.first_token[number + 1])
        if self._form != "web" or end == self.entry.tokens or self.tokens[end - 1] == end_of_text:
            return None
        return int(self.tokens[end])

    def _counts(self, skip: int, count: int) -> np.ndarray:
        offset = self.entry.tokens * self._token_type.itemsize + skip * self._count_type.itemsize
        return np.fromfile(self._path, self._count_type, count, offset=offset)
