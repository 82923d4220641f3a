r"""The words of texts as arrays, a block of texts at a time: where each word is, and a 64-bit value for it.

A word is a run of `\w` in the text's casefolded form, so case, punctuation and spacing do not count. Its value is
computed from its length and its first and last eight bytes, which is all of most words; those over 16 bytes are hashed
one by one. The values depend on the words alone: not on the platform, the version or the other texts of the block.

`FastFolding` is the per-character normalisation behind it (and behind `data.screening.text_hash`): a 256-entry byte
table for ASCII, targeted replacements for the rest.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
import xxhash

MOST_REPLACEMENTS = 24  # distinct characters replaced one by one; with more of them the slow path is faster
BLOCK = 1 << 20  # bytes worked on at once: more would leave the processor's cache
_ASCII = bytes(range(128))
_COMMON = (range(0x80, 0x1100), range(0x1E00, 0xA000))  # Latin, Greek, Cyrillic, Arabic … punctuation, ideographs
_WORD = re.compile(r"\w+")
_NOT_A_WORD = re.compile(r"\W")
_FIRST, _LAST, _LENGTH = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9))
_MARGIN = b" " * 8  # so that eight bytes can be read at every position
_MASKS = np.array([(1 << (8 * n)) - 1 for n in range(9)], np.uint64)  # the lowest n bytes


class FastFolding:
    """`fold(text)` is `whole(text)` in UTF-8, six times as fast for most text.

    `single(c)`: what `whole` turns a character into wherever it occurs, or None where that depends on its neighbours.
    For ASCII it is at most one character of ASCII.
    """

    def __init__(self, single: Callable[[str], str | None], whole: Callable[[str], str]) -> None:
        self._single, self._whole = single, whole
        ascii_to = [(single(chr(c)) or "").encode() for c in _ASCII]
        self._deleted = bytes(c for c in _ASCII if not ascii_to[c])
        self._table = bytes(ascii_to[c][0] if ascii_to[c] else c for c in _ASCII) + bytes(range(128, 256))

    def __call__(self, text: str) -> bytes:
        raw = text.encode("utf-8", "replace")
        if not text.isascii():
            unaltered, altered = self._beyond_ascii
            odd = set(raw.translate(None, _ASCII).decode()) - unaltered
            if len(odd) <= MOST_REPLACEMENTS and odd <= altered.keys():
                for character in odd:
                    raw = raw.replace(*altered[character])
            else:
                raw = self._whole(text).encode("utf-8", "replace")
        # Bytes of multi-byte characters are 128 and above, which the table leaves alone.
        return raw.translate(self._table, self._deleted)

    @cached_property
    def _beyond_ascii(self) -> tuple[frozenset[str], dict[str, tuple[bytes, bytes]]]:
        """Common characters outside ASCII that folding leaves alone; and for others, (bytes, replacement)."""
        folded = {c: self._single(c) for c in map(chr, chain(*_COMMON))}
        altered = {c: (c.encode(), to.encode()) for c, to in folded.items() if to is not None and c != to}
        return frozenset(c for c, to in folded.items() if c == to), altered


fold_to_words = FastFolding(  # casefolded, everything that is not a word character replaced by a space
    lambda c: _NOT_A_WORD.sub(" ", c.casefold()), lambda text: _NOT_A_WORD.sub(" ", text.casefold())
)


def _in_lower_case(c: str) -> str | None:
    """None where it depends on the neighbours of a character, as a sigma does, or gives several, as İ does."""
    if _NOT_A_WORD.match(c):
        return " "
    return c.lower() if c != "Σ" and len(c.lower()) == 1 else None


_fold_to_lower_case = FastFolding(_in_lower_case, lambda text: " ".join(word.lower() for word in _WORD.findall(text)))


def lower_words(text: str) -> list[bytes]:
    r"""The runs of `\w` in a text, each in lower case and UTF-8: the words of short texts, to compare and to count."""
    return _fold_to_lower_case(text).split()


@dataclass(frozen=True)
class WordArrays:
    """The words of a block of texts, in order: `content[starts[i]:ends[i]]` and `values[i]` are those of word i.

    `first`: the number of the first word of each text, [texts + 1].
    """

    content: bytes
    starts: np.ndarray
    ends: np.ndarray
    values: np.ndarray
    first: np.ndarray

    def text(self, begin: int, end: int) -> list[str]:
        """Words number `begin` to `end` as strings."""
        if begin >= end:
            return []
        return self.content[self.starts[begin] : self.ends[end - 1]].decode().split()


def words_of(texts: Sequence[str]) -> Iterator[WordArrays]:
    """The words of `texts`, block by block."""
    block: list[bytes] = []
    size = 0
    for text in texts:
        block.append(fold_to_words(text))
        size += len(block[-1])
        if size >= BLOCK:
            yield _block_words(block)
            block, size = [], 0
    if block:
        yield _block_words(block)


def _block_words(block: list[bytes]) -> WordArrays:
    content = _MARGIN + b" ".join(block) + _MARGIN
    # A word begins and ends where the content changes between space and something else.
    inside = np.frombuffer(content, np.uint8) != ord(" ")
    edges = np.flatnonzero(inside[1:] != inside[:-1]) + 1
    starts, ends = edges[::2], edges[1::2]
    # The value of a word of up to eight bytes is made of these and its length, of a longer one also of its last eight.
    eight = np.ndarray((len(content) - 7,), "<u8", content, strides=(1,))  # the eight bytes from each position on
    lengths = ends - starts
    values = (eight[starts] & _MASKS[np.minimum(lengths, 8)]) * _FIRST
    values += lengths.astype(np.uint64) * _LENGTH
    values ^= values >> np.uint64(32)
    long = np.flatnonzero(lengths > 8)
    values[long] += eight[ends[long] - 8] * _LAST
    # Beyond 16 bytes those two leave out the middle, so the whole word is hashed.
    for n in np.flatnonzero(lengths > 16).tolist():
        values[n] = xxhash.xxh3_64_intdigest(content[starts[n] : ends[n]])
    # A text ends before the space that follows it; the last one before the margin.
    text_ends = len(_MARGIN) + np.cumsum([len(text) + 1 for text in block])
    first = np.concatenate([[0], np.searchsorted(starts, text_ends)])
    return WordArrays(content, starts, ends, values, first)


def grams(values: np.ndarray, length: int) -> np.ndarray:
    """A value for each `length` consecutive words, [words - length + 1]; the order of the words counts."""
    count = max(0, len(values) - length + 1)
    total = np.zeros(count, np.uint64)
    for place in range(length):
        total += values[place : place + count] * _multiplier(place)
    return mix_bits(total)


def grams_at(values: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """`grams` of the words from `starts` on only, [starts]."""
    total = np.zeros(len(starts), np.uint64)
    for place in range(length):
        total += values[starts + place] * _multiplier(place)
    return mix_bits(total)


def _multiplier(place: int) -> np.uint64:
    """An odd factor for the word at a place of an n-gram, so that another order gives another sum."""
    return np.uint64(pow(0x9E3779B97F4A7C15, place + 1, 1 << 64))


def mix_bits(values: np.ndarray) -> np.ndarray:
    """Each value with its bits mixed (the finaliser of MurmurHash3)."""
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return values ^ (values >> np.uint64(33))
