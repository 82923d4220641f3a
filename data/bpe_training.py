"""Train byte-level BPE merges with the `tokenizers` library, and measure a tokenizer by the bytes of its tokens."""

import base64
import re
from collections.abc import Iterable, Mapping
from typing import Any

from nautile.common.errors import ConfigError
from nautile.configs.model import Digits
from nautile.data.tokenizer import LONG_TEXT, LONGEST_TOKEN, apart_from_space, pattern_of

BYTES_PER_TOKEN = "bytes_per_token"  # a fact: source -> tokenizer -> bytes of the source's text in a token, on average
TRAINED, CUT, WHOLE = "trained", "cl100k_base_cut", "cl100k_base"  # cut to as many ranks


def byte_letters() -> list[str]:
    """The printable letter of each byte in byte-level BPE files: the byte's own character, or one from U+0100 on."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def library_pattern(pattern: str) -> str:
    """How a text is split, in the library's regex dialect (Oniguruma).

    There `{1,3}+` is a repetition, and `$` also matches before a newline.
    """
    return re.sub(r"(\{1,\d\})\+", r"\1", pattern).replace("$", r"\z")


def train_ranks(texts: Iterable[str], ranks: int, digits: Digits) -> bytes:
    """Train `ranks` ranks on texts: the content of a file that tiktoken reads. The same texts give the same bytes.

    Pairs of tokens that occur once are not merged. Raises `ConfigError` if the texts have too few others.
    """
    vocabulary = sorted(_trained(texts, ranks, digits).get_vocab().items(), key=lambda entry: entry[1])
    if len(vocabulary) < ranks:
        raise ConfigError(
            f"tokenizer.train: the sample is enough for {len(vocabulary):,} ranks, not {ranks:,}: raise `megabytes`, "
            "or lower tokenizer.ranks"
        )
    bytes_of = {letter: byte for byte, letter in enumerate(byte_letters())}
    tokens = (bytes(bytes_of[letter] for letter in token) for token, _ in vocabulary)
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))


def _trained(texts: Iterable[str], ranks: int, digits: Digits) -> Any:
    """The library's tokenizer."""
    from tokenizers import Regex, Tokenizer  # of an extra: only this stage trains
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(BPE())
    split = Split(Regex(library_pattern(pattern_of(digits))), "isolated")
    tokenizer.pre_tokenizer = Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    trainer = BpeTrainer(
        vocab_size=ranks, min_frequency=2, show_progress=False, initial_alphabet=byte_letters(),
        max_token_length=LONGEST_TOKEN,
    )  # fmt: skip
    parts = (part for text in texts for part in ([text] if len(text) < LONG_TEXT else apart_from_space(text)))
    tokenizer.train_from_iterator(parts, trainer)
    return tokenizer


def bytes_per_token_rows(facts: Mapping[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The table of a tokenizer's facts, columns and rows: bytes a token by source, beside cl100k_base's."""
    names = {
        TRAINED: f"{facts['ranks']:,} trained ranks",
        CUT: f"cl100k_base's first {facts['ranks']:,}",
        WHOLE: "cl100k_base, whole",
    }
    rows = [
        (source, *("not measured" if (value := values.get(name)) is None else f"{value:.2f}" for name in names))
        for source, values in facts[BYTES_PER_TOKEN].items()
    ]
    return ("Source", *names.values()), rows
