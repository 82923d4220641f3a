"""Export to onnxruntime (`nautile export --format onnx --bits 32 | 8 | 4`): two graphs, their weights, an example.

`digests.json` lists every file but the model card, to which measurements are added later.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from nautile.common.errors import ConfigError
from nautile.common.extras import how_to_install
from nautile.common.files import read_bounded_json, sha256_of, write_text
from nautile.configs.model import ModelConfig
from nautile.data.chat_template import encode_prompt
from nautile.data.label_set import copy_label_set, read_label_set
from nautile.data.tokenizer import save_tokenizer
from nautile.model.exports.tokenizer_files import TOKENIZER, load_with_tokenizer, tokenizer_json
from nautile.model.weights.files import (
    CONFIG,
    DIGESTS,
    FORMAT,
    refuse_occupied,
    verified_digests,
    write_digests,
)

BITS = (32, 8, 4)
PROMPT, STEP, WEIGHTS = "prompt.onnx", "step.onnx", "weights.bin"
EXAMPLE, CARD = "chat.py", "README.md"
HEAD_MULTIPLE = 16  # onnxruntime's GroupQueryAttention needs attention head dimensions that are multiples of this
INT8_ACTIVATIONS = 4  # `accuracy_level` of MatMulNBits: int8 products, several times as fast as float32
MEASURED = "## Measured\n"


def export_onnx(checkpoint: Path, out: Path, bits: int = 32) -> list[Path]:
    """Export a checkpoint folder for onnxruntime into the new or empty folder `out`, with `bits` per weight.

    Returns the files. Raises ConfigError if `out` is not empty, if the checkpoint cannot be read or its model cannot be
    expressed in ONNX, and if the package onnx is missing.
    """
    if bits not in BITS:
        raise ConfigError(f"--bits {bits}: is not one of {', '.join(map(str, BITS))}")
    refuse_occupied(out)
    params, model, tokenizer_config, tokenizer = load_with_tokenizer(checkpoint)
    labels = read_label_set(checkpoint)
    has_head = labels is not None and labels.method == "head"
    if "A" in model.pattern and model.attention_head_dim % HEAD_MULTIPLE:
        raise ConfigError(
            f"{checkpoint}: --format onnx: onnxruntime's attention needs heads of a multiple of {HEAD_MULTIPLE}, and "
            f"this model has width/attention_heads = {model.attention_head_dim}"
        )
    try:
        import onnx
    except ImportError:
        raise ConfigError(f"exports for onnxruntime and the web need onnx: {how_to_install('onnx')}") from None
    from nautile.model.exports.onnx.graph import WeightFile
    from nautile.model.exports.onnx.graphs import prompt_graph, step_graph, write_weights

    # Nothing is written until all checks have passed.
    out.mkdir(parents=True, exist_ok=True)
    with WeightFile(out / WEIGHTS, bits) as weights:
        write_weights(weights, params, model)
    onnx.save(prompt_graph(weights, model, INT8_ACTIVATIONS, has_head), out / PROMPT)
    onnx.save(step_graph(weights, model, INT8_ACTIVATIONS), out / STEP)
    copy_label_set(checkpoint, out)
    write_text(out / TOKENIZER, json.dumps(tokenizer_json(tokenizer), ensure_ascii=False, indent=1))
    weights_sha256 = sha256_of(out / WEIGHTS)
    settings = {
        "format": FORMAT,
        "model": model.model_dump(mode="json"),
        "tokenizer": save_tokenizer(out, tokenizer_config),
        "onnx": {"bits": bits, "weights_sha256": weights_sha256},
        "chat": {
            "prompt": tokenizer.decode(encode_prompt(tokenizer, "{query}")),
            "stop_ids": [tokenizer.im_end, tokenizer.end_of_text],
            "think_end": tokenizer.think_end,
        },
    }
    write_text(out / CONFIG, json.dumps(settings, ensure_ascii=False, indent=1) + "\n")
    shutil.copyfile(Path(__file__).parent / EXAMPLE, out / EXAMPLE)
    # The card comes after the digests, which do not cover it.
    write_digests(out, {WEIGHTS: weights_sha256})
    write_text(out / CARD, _card(model, bits, (out / WEIGHTS).stat().st_size))
    return sorted(out.iterdir())


def is_onnx_export(folder: Path) -> bool:
    """Whether `folder` looks like an ONNX export; `check_digests` verifies it."""
    return (folder / DIGESTS).is_file() and (folder / STEP).is_file()


def check_digests(folder: Path) -> dict[str, Any]:
    """Verify an export and return its `bits` and `weights_sha256`. Raises ConfigError if any file has changed."""
    if not {PROMPT, STEP, WEIGHTS, CONFIG} <= set(verified_digests(folder)):
        raise ConfigError(f"{folder / DIGESTS}: does not list the files of an ONNX export; export the checkpoint again")
    settings = read_bounded_json(folder / CONFIG)
    facts = settings.get("onnx") if isinstance(settings, dict) else None
    fields = (facts.get("bits"), facts.get("weights_sha256")) if isinstance(facts, dict) else (None, None)
    if fields[0] not in BITS or not isinstance(fields[1], str):
        raise ConfigError(f"{folder / CONFIG}: `onnx` lacks `bits` or `weights_sha256`; export the checkpoint again")
    return {"bits": fields[0], "weights_sha256": fields[1]}


def add_measurement(folder: Path, line: str) -> None:
    """Add a line to the "Measured" section of the model card; the first replaces its placeholder."""
    path = folder / CARD
    card = path.read_text(encoding="utf-8") if path.exists() else MEASURED
    before, heading, after = card.partition(MEASURED)
    # Keep the earlier measurements, but not the placeholder text or the same line.
    lines = [entry for entry in after.strip().splitlines() if entry.startswith("- ")]
    lines = [entry for entry in lines if entry != f"- {line}"]
    write_text(path, before + (heading or MEASURED) + "\n" + "\n".join([*lines, f"- {line}"]) + "\n")


def _card(model: ModelConfig, bits: int, size: int) -> str:
    """The README.md of an export with `size` bytes of weights."""
    storage = {
        32: "float32",
        8: "8 bits in blocks of 256 with a float32 scale; int8 activations in products",
        4: "4 bits in blocks of 128 (input projections of the SCA layers: 64) with a float32 scale and a zero point; "
        "8 bits for the table of the embedding and head and for the readouts of the SCA layers; int8 activations in "
        "products",
    }[bits]
    return f"""# A Nautile model for onnxruntime

Weights: {storage} ({size / 2**20:.1f} MiB). Everything else is computed in float32. Context: {model.context} tokens.

`prompt.onnx` reads a prompt and `step.onnx` one more token; both use `weights.bin`. Each returns logits and the state
that the next step takes: decayed sums and the last inputs of the convolution, whose size is constant, and keys and
values, which grow with the context.

    pip install onnxruntime numpy tokenizers
    python chat.py "What is 2 + 2?"

`digests.json` has the sha256 of every file but this one. With Nautile installed, `nautile chat FOLDER --runtime onnx`
chats with the model. A folder with a `labels.json` (a checkpoint tuned on labels) can be added to a store with
`nautile store add FOLDER --kind export`, for `nautile classify`.

{MEASURED}
Nothing yet: `nautile evaluate FOLDER --runtime onnx --against CHECKPOINT` adds the change in accuracy here.
"""
