"""The formats that `nautile export` can write, and the project's own: safetensors, configuration, tokenizer."""

import json
from collections.abc import Callable
from pathlib import Path

from nautile.common.files import write_text
from nautile.data.chat_template import encode_prompt
from nautile.data.label_set import copy_label_set
from nautile.data.tokenizer import tokenizer_for
from nautile.model.exports.onnx.folder import export_onnx
from nautile.model.exports.tokenizer_files import TOKENIZER, TOKENIZER_CONFIG, tokenizer_json
from nautile.model.exports.transformers.export import export_transformers
from nautile.model.exports.web.folder import export_web
from nautile.model.weights.files import load_weights, refuse_occupied, save_weights


def export_nautile(checkpoint: Path, out: Path) -> list[Path]:
    """Export a checkpoint folder: `weights.safetensors`, `config.json`, `tokenizer.json`, `tokenizer_config.json`.

    `tokenizer.json` is for the `tokenizers` library; `tokenizer_config.json` has the special tokens and the prompt
    template that the model was trained on, with `{query}` for the question. The labels and the head of a tuned
    checkpoint are copied. `load_weights` returns the same bits from the export. Returns the files. Raises ConfigError
    if `out` is not empty or the checkpoint cannot be read.
    """
    refuse_occupied(out)
    params, model, tokenizer_config = load_weights(checkpoint)
    tokenizer = tokenizer_for(tokenizer_config)
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / TOKENIZER, json.dumps(tokenizer_json(tokenizer), ensure_ascii=False, indent=1))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.context,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": list(tokenizer.specials),
        "prompt": tokenizer.decode(encode_prompt(tokenizer, "{query}")),
        "fingerprint": tokenizer.fingerprint,
    }
    write_text(out / TOKENIZER_CONFIG, json.dumps(settings, ensure_ascii=False, indent=1))
    copy_label_set(checkpoint, out)
    save_weights(out, params, model, tokenizer_config)
    return sorted(out.iterdir())


# Each exports a checkpoint folder into a new or empty folder, returns the files, and raises ConfigError if it cannot.
FORMATS: dict[str, Callable[..., list[Path]]] = {
    "nautile": export_nautile,
    "onnx": export_onnx,
    "transformers": export_transformers,
    "web": export_web,
}
WITH_BITS = ("onnx", "web")  # formats with the option `bits`, the number of bits per stored weight
