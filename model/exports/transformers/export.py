"""Export to Hugging Face `transformers` (`nautile export --format transformers`): weights, code, tokenizer.

    model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

Tensors, fields of config.json and token ids are those of the paper's author (`model/weights/author_layout.py`): ids are
ours + 1, and 0 is padding. `nautile import FOLDER` reads the export back bit for bit, also after tuning and saving.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from nautile.common.files import atomic_path, write_text
from nautile.configs.model import ModelConfig, TokenizerConfig
from nautile.data.label_set import copy_label_set, refuse_head
from nautile.data.tokenizer import Tokenizer, save_tokenizer
from nautile.model.exports.tokenizer_files import PAD, TOKENIZER, TOKENIZER_CONFIG, load_with_tokenizer, tokenizer_json
from nautile.model.weights.author_layout import author_fields, to_author
from nautile.model.weights.files import CONFIG, refuse_occupied, write_digests

CODE = ("configuration_nautile.py", "modeling_nautile.py")
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

    Returns the files. Raises ConfigError if `out` is not empty, if the checkpoint cannot be read, if it has a
    classification head, and if its model has fewer rows than its tokenizer has ids.
    """
    refuse_occupied(out)
    refuse_head(checkpoint, "transformers")
    params, model, tokenizer_config, tokenizer = load_with_tokenizer(checkpoint)
    # Written after the weights, and the digests last: a folder without digests is an export that was interrupted.
    contents = {
        CONFIG: _config(model, tokenizer_config, tokenizer),
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
        },
    }
    out.mkdir(parents=True, exist_ok=True)
    # Older versions of `transformers` refuse a file without this field. More fields would be written in hash order, and
    # the file's digest would vary.
    with atomic_path(out / "model.safetensors") as temporary:
        save_file(to_author(params, model), temporary, metadata={"format": "pt"})
    for name in CODE:
        shutil.copyfile(Path(__file__).parent / name, out / name)
    for name, content in contents.items():
        write_text(out / name, json.dumps(content, ensure_ascii=False, indent=1) + "\n")
    save_tokenizer(out, tokenizer_config)
    copy_label_set(checkpoint, out)
    write_digests(out)
    return sorted(out.iterdir())


def _config(model: ModelConfig, tokenizer_config: TokenizerConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    classes = {"AutoConfig": "configuration_nautile.NautileConfig", "AutoModel": "modeling_nautile.NautileModel"}
    return {
        "architectures": ["NautileForCausalLM"],
        "auto_map": {**classes, "AutoModelForCausalLM": "modeling_nautile.NautileForCausalLM"},
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
