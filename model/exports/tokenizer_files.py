"""The tokenizer as Hugging Face libraries read it: `tokenizer.json`, and what all formats write beside it."""

from pathlib import Path
from typing import Any

from common.errors import ConfigError
from configs.model import ModelConfig, TokenizerConfig
from data.tokenizer import PATTERN, Tokenizer, tokenizer_for
from model.layers.common import Params
from model.weights.files import load_weights

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
PAD = "<|pad|>"


def load_with_tokenizer(checkpoint: Path) -> tuple[Params, ModelConfig, TokenizerConfig, Tokenizer]:
    """`load_weights` with the tokenizer. Raises ConfigError also where it has more ids than the model has rows."""
    params, model, config = load_weights(checkpoint)
    tokenizer = tokenizer_for(config)
    if tokenizer.vocabulary > model.vocabulary:
        raise ConfigError(
            f"{checkpoint}: is a checkpoint of another tokenizer: its config.json names one of {tokenizer.vocabulary} "
            f"ids, and its model has {model.vocabulary}"
        )
    return params, model, config, tokenizer


def tokenizer_json(tokenizer: Tokenizer, *, padding: bool = False) -> dict[str, Any]:
    """The content of `tokenizer.json`.

    With it, `tokenizers` encodes plain text as `tokenizer` does, and turns the names of special tokens into their ids.
    `padding`: ids as the paper's author counts them, ours + 1 with `PAD` as 0; then the markers of the reasoning are
    not special, so that a reply decoded without special tokens still shows where its reasoning ends.
    """
    shift, specials, shown = 0, tokenizer.specials, set[str]()
    if padding:
        shift, shown = 1, {"<|think_start|>", "<|think_end|>"}
        specials = {PAD: 0, **{name: number + shift for name, number in specials.items()}}
    ranks = {tokenizer.decode_bytes([rank]): rank for rank in range(tokenizer.config.ranks)}
    letters = byte_letters()
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = [
        [spelled[part] for part in _parents(token, ranks)]
        for token in sorted(ranks, key=lambda token: ranks[token])
        if len(token) > 1
    ]
    # The pattern in the library's dialect (Oniguruma): `{1,3}+` would repeat there, and `$` match before a newline.
    regex = PATTERN.replace("{1,3}+", "{1,3}").replace("$", r"\z")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number, "content": name, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": name not in shown,
            }
            for name, number in specials.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            # The library numbers added tokens on from the vocabulary's size unless the vocabulary names them, and the
            # whole tokenizer has gaps before its specials.
            "vocab": {**{spelled[token]: rank + shift for token, rank in ranks.items()}, **specials},
            "merges": merges,
        },
    }  # fmt: skip


def byte_letters() -> list[str]:
    """The printable letter for each byte in byte-level BPE files: the byte's own, or a letter from U+0100 on."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def _parents(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The two tokens that `token` was merged from, by merging its bytes in the order of the ranks."""
    parts = [token[index : index + 1] for index in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(parts[index] + parts[index + 1], len(ranks)) for index in range(len(parts) - 1)]
        best = pairs.index(min(pairs))
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts
