"""`nautile export`: a checkpoint as a folder that others can read: safetensors, configuration, and tokenizer files.

The weights keep this project's names and bytes, so `load_weights` on an export gives back the checkpoint bit for bit.
"""

import json
import os
from pathlib import Path
from typing import Any

from data.chat import encode_prompt
from data.tokenizer import tokenizer_for
from model.tokenizer_json import tokenizer_json
from model.weights import load_weights, refuse_occupied, save_weights

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"


def export(checkpoint: Path, out: Path) -> list[Path]:
    """Write a checkpoint folder as `weights.safetensors`, `config.json`, `tokenizer.json`, `tokenizer_config.json`.

    `tokenizer.json` is for the Hub's `tokenizers` library; its settings file names the specials and shows, with
    `{query}` for the question, the prompt that the model was trained on. Raises ConfigError where `out` holds something
    already or the checkpoint does not read.
    """
    refuse_occupied(out)
    params, model, tokenizer_config = load_weights(checkpoint)
    tokenizer = tokenizer_for(tokenizer_config)
    out.mkdir(parents=True, exist_ok=True)
    _write(out / TOKENIZER, tokenizer_json(tokenizer))
    _write(
        out / TOKENIZER_CONFIG,
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model.context,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "additional_special_tokens": list(tokenizer.specials),
            "prompt": tokenizer.decode(encode_prompt(tokenizer, "{query}")),
            "fingerprint": tokenizer.fingerprint,
        },
    )
    save_weights(out, params, model, tokenizer_config)
    return sorted(out.iterdir())


def _write(path: Path, value: dict[str, Any]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=False, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
