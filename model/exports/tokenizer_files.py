"""The tokenizer files of exports, as Hugging Face libraries read them (`tokenizer.json`)."""

from pathlib import Path
from typing import Any

from nautile.common.errors import ConfigError
from nautile.configs.model import ModelConfig, TokenizerConfig
from nautile.data.bpe_training import byte_letters, library_pattern
from nautile.data.tokenizer import Tokenizer, tokenizer_for
from nautile.model.layers.common import Params
from nautile.model.weights.files import load_weights

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
PAD = "<|pad|>"


def load_with_tokenizer(checkpoint: Path) -> tuple[Params, ModelConfig, TokenizerConfig, Tokenizer]:
    """Load a checkpoint and its tokenizer. Raises ConfigError also if the tokenizer has more ids than the model."""
    params, model, config = load_weights(checkpoint)
    tokenizer = tokenizer_for(config)
    if tokenizer.vocabulary > model.vocabulary:
        raise ConfigError(
            f"{checkpoint}: the tokenizer in its config.json has {tokenizer.vocabulary} ids, and its model only "
            f"{model.vocabulary}: the checkpoint belongs to another tokenizer"
        )
    return params, model, config, tokenizer


def tokenizer_json(tokenizer: Tokenizer, *, padding: bool = False) -> dict[str, Any]:
    """The content of `tokenizer.json`.

    The `tokenizers` library then encodes plain text as `tokenizer` does, and the names of special tokens as their ids.
    `padding`: number the ids as the paper's author does, ours + 1 with `PAD` as 0. The reasoning markers are then not
    special, so that a reply decoded without special tokens still shows where its reasoning ends.
    """
    shift, specials, visible = 0, tokenizer.specials, set[str]()
    if padding:
        shift, visible = 1, {"<|think_start|>", "<|think_end|>"}
        specials = {PAD: 0, **{name: number + shift for name, number in specials.items()}}
    ranks = {tokenizer.decode_bytes([rank]): rank for rank in range(tokenizer.config.ranks)}
    letters = byte_letters()
    spelling = {token: "".join(letters[byte] for byte in token) for token in ranks}
    # The library wants the pair that each token is merged from; the ranks have only the result.
    merges = [
        [spelling[part] for part in _parents(token, ranks)]
        for token in sorted(ranks, key=lambda token: ranks[token])
        if len(token) > 1
    ]
    regex = library_pattern(tokenizer.pattern)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number, "content": name, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": name not in visible,
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
            # The special tokens are listed in the vocabulary, because the library otherwise numbers them from the
            # vocabulary's size on, and the full tokenizer has gaps before its special tokens.
            "vocab": {**{spelling[token]: rank + shift for token, rank in ranks.items()}, **specials},
            "merges": merges,
        },
    }  # fmt: skip


def _parents(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The two tokens that `token` is merged from: merge its bytes in rank order until two parts are left."""
    parts = [token[index : index + 1] for index in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(parts[index] + parts[index + 1], len(ranks)) for index in range(len(parts) - 1)]
        best = pairs.index(min(pairs))
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts
