r"""Split texts into words as arrays, a block of texts at a time: the position and a 64-bit hash of each word.

A word is a run of letters and digits in the folded text (`fold`), so case, punctuation and spacing are ignored, and so
is how a letter is written: decomposed or full-width, as a ligature, with soft hyphens or invisible characters in
between, as text from PDF and HTML has them. Markup is no word (`without_markup`). Its hash is computed from its length
and its first and last eight bytes, which cover most words; words over 16 bytes are hashed with XXH3. The hashes depend
on the words alone: not on platform, versions or the other texts of the block.

`FastFolding` is the underlying per-character normalisation (also of `data.screening.duplicates`): a 256-entry table
for ASCII, and replacements for the other characters.
"""

import html
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain

import numpy as np
import xxhash

MOST_REPLACEMENTS = 24  # distinct characters replaced one by one; with more of them the slow path is faster
BLOCK = 1 << 20  # bytes of a block: small enough for the processor's cache
_ASCII = bytes(range(128))
_COMMON = (range(0x80, 0x1100), range(0x1E00, 0xA000))  # Latin, Greek, Cyrillic, Arabic, …; punctuation, ideographs
_WORD = re.compile(r"\w+")
_NOT_A_WORD = re.compile(r"[\W_]")  # `_` emphasises in Markdown and marks an index in LaTeX
_FIRST, _LAST, _LENGTH = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9))
_MARGIN = b" " * 8  # around a block, so that eight bytes can be read at every position
_MASKS = np.array([(1 << (8 * n)) - 1 for n in range(9)], np.uint64)  # the lowest n bytes


class FastFolding:
    """A fast equivalent of the text normalisation `whole`: returns `whole(text)` in UTF-8.

    Six times as fast for most texts. `single(c)`: what `whole` turns the character `c` into, or None if that depends on
    its neighbours. An ASCII character becomes at most one ASCII character.
    """

    def __init__(self, single: Callable[[str], str | None], whole: Callable[[str], str]) -> None:
        self._single, self._whole = single, whole
        ascii_to = [(single(chr(c)) or "").encode() for c in _ASCII]
        self._deleted = bytes(c for c in _ASCII if not ascii_to[c])
        self._table = bytes(ascii_to[c][0] if ascii_to[c] else c for c in _ASCII) + bytes(range(128, 256))

    def __call__(self, text: str) -> bytes:
        raw = text.encode("utf-8", "replace")
        if not text.isascii():
            # Replace the few distinct non-ASCII characters that change; fall back to `whole` if that is not possible.
            unaltered, altered = self._beyond_ascii
            changing = set(raw.translate(None, _ASCII).decode()) - unaltered
            if len(changing) <= MOST_REPLACEMENTS and changing <= altered.keys():
                for character in changing:
                    raw = raw.replace(*altered[character])
            else:
                raw = self._whole(text).encode("utf-8", "replace")
        # The table leaves the bytes of multi-byte characters, all of them 128 and above, unchanged.
        return raw.translate(self._table, self._deleted)

    @cached_property
    def _beyond_ascii(self) -> tuple[frozenset[str], dict[str, tuple[bytes, bytes]]]:
        """Common non-ASCII characters that do not change; and (bytes, replacement) of those that do."""
        folded = {c: self._single(c) for c in map(chr, chain(*_COMMON))}
        altered = {c: (c.encode(), to.encode()) for c, to in folded.items() if to is not None and c != to}
        return frozenset(c for c, to in folded.items() if c == to), altered


# Characters without a glyph of their own (Unicode's Default_Ignorable_Code_Point), and the line's end after a soft
# hyphen.
_INVISIBLE = re.compile(
    "\u00ad\\s*|[\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f"
    "\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


_ENTITY = re.compile(r"&(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z]\w{1,31});")
_ATTRIBUTE = r"""\s+[\w:-]+=(?:"(?:[^"<>\s]*|[^"<>]{0,60})"|'(?:[^'<>\s]*|[^'<>]{0,60})')"""
_LATEX_FORM = (
    "text(?:bf|it|md|normal|rm|sc|sf|sl|tt|up)?|math(?:bb|bf|bm|cal|frak|it|rm|sf|tt)?|emph|underline|mbox|hbox"
    "|operatorname|left|right|[bB]igg?[lmr]?|(?:display|text|script)style|q?quad|hspace|limits"
)
# What only forms a text: tags of HTML, the address of a link in Markdown, commands of LaTeX.
_MARKUP = re.compile(
    rf"</?[a-zA-Z][a-zA-Z0-9]*(?:{_ATTRIBUTE})*\s*/?>|(?<=\])\([^\s()]+\)|\\(?:{_LATEX_FORM})(?![a-zA-Z])|\\[dt](?=frac|binom)"
)


def without_markup(text: str) -> str:
    """The text with entities of HTML as their characters, and without what only forms it."""
    if "&" in text:
        text = _ENTITY.sub(lambda entity: html.unescape(entity[0]), text)
    return _MARKUP.sub(" ", text) if "<" in text or "\\" in text or "](" in text else text


_MARKS = re.compile("[\u0300-\u036f]")


def fold(text: str) -> str:
    """The text without invisible characters, in Unicode's compatible composed form (NFKC), casefolded.

    Marks that no letter is composed with, such as a line under each, are left out.
    """
    # Casefolding decomposes some letters, so they are composed once more.
    composed = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", _INVISIBLE.sub("", text)).casefold())
    return _MARKS.sub("", composed)


@cache
def _joining() -> frozenset[str]:
    """The characters that a letter before them may be composed with, though they are no combining marks."""
    pairs = (unicodedata.decomposition(c).split() for c in map(chr, range(0x80, 0x10000)))
    return frozenset(chr(int(pair[1], 16)) for pair in pairs if len(pair) == 2 and not pair[0].startswith("<"))


def _folded_alone(c: str) -> str | None:
    """A character's words; None if that depends on its neighbours, because it joins them or is a soft hyphen."""
    if c == "\u00ad" or unicodedata.combining(c) or c in _joining():
        return None
    folded = fold(c)
    # A character that begins with a mark would join the letter before it.
    return None if folded and unicodedata.combining(folded[0]) else _NOT_A_WORD.sub(" ", folded)


fold_to_words = FastFolding(  # folded, everything that is not a word character replaced by a space
    _folded_alone, lambda text: _NOT_A_WORD.sub(" ", fold(text))
)


def _in_lower_case(c: str) -> str | None:
    """A character in lower case; None if that depends on its neighbours (Σ) or is several characters (İ)."""
    if not _WORD.match(c):
        return " "
    return c.lower() if c != "Σ" and len(c.lower()) == 1 else None


_fold_to_lower_case = FastFolding(_in_lower_case, lambda text: " ".join(word.lower() for word in _WORD.findall(text)))


def lower_words(text: str) -> list[bytes]:
    r"""The words (runs of `\w`) of a text in lower case, as UTF-8. For short texts; `words_of` is for large amounts."""
    return _fold_to_lower_case(text).split()


@dataclass(frozen=True)
class WordArrays:
    """The words of a block of texts, in order: word i is `content[starts[i]:ends[i]]`, and `values[i]` is its hash.

    `first`: the number of the first word of each text, and at the end the number of words, [texts + 1].
    """

    content: bytes
    starts: np.ndarray
    ends: np.ndarray
    values: np.ndarray
    first: np.ndarray

    def text(self, begin: int, end: int) -> list[str]:
        """Words `begin` to `end` (exclusive) as strings."""
        if begin >= end:
            return []
        return self.content[self.starts[begin] : self.ends[end - 1]].decode().split()


def words_of(texts: Sequence[str]) -> Iterator[WordArrays]:
    block: list[bytes] = []
    size = 0
    for text in texts:
        block.append(fold_to_words(without_markup(text)))
        size += len(block[-1])
        if size >= BLOCK:
            yield _block_words(block)
            block, size = [], 0
    if block:
        yield _block_words(block)


def _block_words(block: list[bytes]) -> WordArrays:
    """Find and hash the words of a block of folded texts."""
    content = _MARGIN + b" ".join(block) + _MARGIN
    # Word boundaries: where the content changes between a space and another byte.
    inside = np.frombuffer(content, np.uint8) != ord(" ")
    edges = np.flatnonzero(inside[1:] != inside[:-1]) + 1
    starts, ends = edges[::2], edges[1::2]
    # Hash the length and the first eight bytes of each word, and the last eight of a longer one.
    eight = np.ndarray((len(content) - 7,), "<u8", content, strides=(1,))  # the eight bytes from each position on
    lengths = ends - starts
    values = (eight[starts] & _MASKS[np.minimum(lengths, 8)]) * _FIRST
    values += lengths.astype(np.uint64) * _LENGTH
    values ^= values >> np.uint64(32)
    long = np.flatnonzero(lengths > 8)
    values[long] += eight[ends[long] - 8] * _LAST
    # In words over 16 bytes that misses the middle, so the whole word is hashed instead.
    for n in np.flatnonzero(lengths > 16).tolist():
        values[n] = xxhash.xxh3_64_intdigest(content[starts[n] : ends[n]])
    # A text ends at the space that separates it from the next, the last one at the margin.
    text_ends = len(_MARGIN) + np.cumsum([len(text) + 1 for text in block])
    first = np.concatenate([[0], np.searchsorted(starts, text_ends)])
    return WordArrays(content, starts, ends, values, first)


def grams(values: np.ndarray, length: int) -> np.ndarray:
    """A hash of each `length` consecutive words, [words - length + 1]; it depends on the order of the words."""
    count = max(0, len(values) - length + 1)
    total = np.zeros(count, np.uint64)
    for offset in range(length):
        total += values[offset : offset + count] * _multiplier(offset)
    return mix_bits(total)


def grams_at(values: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """As `grams`, only for the n-grams that begin at `starts`, [starts]."""
    total = np.zeros(len(starts), np.uint64)
    for offset in range(length):
        total += values[starts + offset] * _multiplier(offset)
    return mix_bits(total)


def _multiplier(offset: int) -> np.uint64:
    """An odd factor for the word at an offset of an n-gram, so that another order gives another sum."""
    return np.uint64(pow(0x9E3779B97F4A7C15, offset + 1, 1 << 64))


def mix_bits(values: np.ndarray) -> np.ndarray:
    """Each value with its bits mixed (the finaliser of MurmurHash3)."""
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return values ^ (values >> np.uint64(33))
