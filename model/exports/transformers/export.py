"""Export to Hugging Face `transformers` (`nautile export --format transformers`): weights, code, tokenizer.

    model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

A checkpoint tuned for labels is AutoModelForSequenceClassification too, one with a head for entities
AutoModelForTokenClassification; their tokenizer makes of a text what they were tuned to read.

Tensors, fields of config.json and token ids are those of the paper's author (`model/weights/author_layout.py`): ids are
ours + 1, and 0 is padding. `nautile import FOLDER` reads the export back bit for bit, also after tuning and saving.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from nautile.common.files import atomic_path, write_text
from nautile.configs.model import ModelConfig, TokenizerConfig
from nautile.data.label_set import HEAD, LabelSet, Reading, load_head, read_label_set, reading_of, write_label_set
from nautile.data.tokenizer import Tokenizer, save_tokenizer
from nautile.model.exports.tokenizer_files import PAD, TOKENIZER, TOKENIZER_CONFIG, load_with_tokenizer, tokenizer_json
from nautile.model.weights.author_layout import author_fields, to_author
from nautile.model.weights.files import CONFIG, refuse_occupied, write_digests

CODE = ("configuration_nautile.py", "modeling_nautile.py")
TOKENIZER_CODE = "tokenization_nautile.py"  # of a tuned checkpoint
TEMPERATURE = 0.7  # that of `nautile chat`

# The chat and think template (data/chat_template.py). A marker spelled in a message is broken up into plain text. As in
# `nautile serve`, system messages are put before the question; the model is trained on single turns.
CHAT_TEMPLATE = """\
{%- macro plain(text) -%}
{%- set broken = namespace(text=text) -%}
{%- for marker in ['|endoftext|>', '|im_start|>', '|im_end|>', '|think_start|>', '|think_end|>', '|pad|>'] -%}
{%- set broken.text = broken.text | replace('<' ~ marker, '< ' ~ marker) -%}
{%- endfor -%}
{{- broken.text -}}
{%- endmacro -%}
{%- set ahead = namespace(text='') -%}
{%- for message in messages -%}
{%- if message.role in ['system', 'developer'] -%}
{%- set ahead.text = ahead.text ~ message.content ~ '\\n\\n' -%}
{%- elif message.role == 'user' -%}
{{- '<|im_start|>user\\n' ~ plain(ahead.text ~ message.content) ~ '\\n<|im_end|>' -}}
{%- set ahead.text = '' -%}
{%- elif message.role == 'assistant' -%}
{%- set reasoning = message.reasoning_content or '' -%}
{%- set answer = message.content -%}
{%- if '<|think_end|>' in answer -%}
{%- set reasoning = answer.split('<|think_end|>')[0].split('<|think_start|>')[-1] -%}
{%- set answer = answer.split('<|think_end|>')[1:] | join('') -%}
{%- endif -%}
{{- '<|im_start|>assistant\\n<|think_start|>' ~ plain(reasoning) ~ '<|think_end|>\\n' -}}
{{- plain(answer | trim) ~ '\\n<|im_end|>' -}}
{%- else -%}
{{- raise_exception('the role ' ~ message.role ~ ' is none of system, developer, user, assistant') -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n<|think_start|>' -}}
{%- endif -%}
"""


def export_transformers(checkpoint: Path, out: Path) -> list[Path]:
    """Export a checkpoint folder for `transformers` into the new or empty folder `out`; digests.json is written last.

    Returns the files. Raises ConfigError if `out` is not empty, if the checkpoint cannot be read, and if its model has
    fewer rows than its tokenizer has ids.
    """
    refuse_occupied(out)
    params, model, tokenizer_config, tokenizer = load_with_tokenizer(checkpoint)
    tensors = to_author(params, model)
    labels = read_label_set(checkpoint)
    reading = None
    if labels is not None and labels.classes:
        reading = reading_of(labels, tokenizer, model.context)
        if labels.method == "head":
            head = load_head(checkpoint / HEAD, model.width, len(labels.classes))
            # As `save_pretrained` names them: without the prefix the library takes the head for a part of the model.
            tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
            tensors |= {"score.weight": np.ascontiguousarray(head.weight_DC.T), "score.bias": head.bias_C}
    # Written after the weights, and the digests last: a folder without digests is an export that was interrupted.
    contents = {
        CONFIG: _config(model, tokenizer_config, tokenizer)
        | (_classifier(labels, reading) if labels and reading else {}),
        "generation_config.json": _generation(model, tokenizer),
        TOKENIZER: tokenizer_json(tokenizer, padding=True),
        TOKENIZER_CONFIG: {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model.context,
            "model_input_names": ["input_ids", "attention_mask"],
            "padding_side": "left",
            "eos_token": "<|im_end|>",
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
            **(_tokenizer_settings(reading) if reading else {}),
        },
    }
    out.mkdir(parents=True, exist_ok=True)
    # Older versions of `transformers` refuse a file without this field. More fields would be written in hash order, and
    # the file's digest would vary.
    with atomic_path(out / "model.safetensors") as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    for name in (*CODE, TOKENIZER_CODE) if reading else CODE:
        shutil.copyfile(Path(__file__).parent / name, out / name)
    for name, content in contents.items():
        write_text(out / name, json.dumps(content, ensure_ascii=False, indent=1) + "\n")
    save_tokenizer(out, tokenizer_config)
    if labels is not None:  # the head is among the tensors
        write_label_set(out, labels)
    write_digests(out)
    return sorted(out.iterdir())


def _shifted(ids: list[int]) -> list[int]:
    return [number + 1 for number in ids]


def _tokenizer_settings(reading: Reading) -> dict[str, Any]:
    """The fields of tokenizer_config.json by which the tokenizer reads as the checkpoint was tuned."""
    fields = reading._replace(before=_shifted(reading.before), after=_shifted(reading.after))._asdict()
    return {
        "tokenizer_class": "NautileTokenizer",
        "auto_map": {"AutoTokenizer": [None, f"{Path(TOKENIZER_CODE).stem}.NautileTokenizer"]},
        "reading": {name: value for name, value in fields.items() if name != "replies"},
    }


def _classifier(labels: LabelSet, reading: Reading) -> dict[str, Any]:
    """The fields of config.json of a classifier."""
    tuned = {
        "pooling": labels.pooling if labels.method == "head" else None,
        "replies": reading.replies and [_shifted(reply) for reply in reading.replies],
        **labels.model_dump(mode="json", include={"bias", "temperature", "threshold", "thresholds", "calibrated"}),
    }
    kind = "Sequence" if labels.form == "label" else "Token"
    return {
        "architectures": [f"NautileFor{kind}Classification"],
        "id2label": {str(number): label for number, label in enumerate(labels.classes)},
        "label2id": {label: number for number, label in enumerate(labels.classes)},
        "problem_type": f"{'multi' if labels.multi_label else 'single'}_label_classification",
        "classifier": {name: value for name, value in tuned.items() if value is not None},
    }


def _config(model: ModelConfig, tokenizer_config: TokenizerConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    tasks = ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification")
    return {
        "architectures": ["NautileForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_nautile.NautileConfig",
            "AutoModel": "modeling_nautile.NautileModel",
            **{f"AutoModel{task}": f"modeling_nautile.Nautile{task}" for task in tasks},
        },
        "model_type": "nautile",
        "dtype": "float32",
        **author_fields(model, tokenizer_config),
        "unused_ids": [[first + 1, end + 1] for first, end in model.unused_ids],
        "pad_token_id": 0,
        "eos_token_id": tokenizer.im_end + 1,
        "tie_word_embeddings": True,
    }


def _generation(model: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """The sampling of `nautile chat`: a reply has at most three quarters of the context."""
    return {
        "do_sample": True,
        "temperature": TEMPERATURE,
        "top_k": 0,
        "top_p": 1.0,
        "max_new_tokens": model.context * 3 // 4,
        "eos_token_id": [tokenizer.im_end + 1, tokenizer.end_of_text + 1],
        "pad_token_id": 0,
    }
