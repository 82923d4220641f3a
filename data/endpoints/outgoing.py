"""Defences against prompt injection in text sent to a chat endpoint: broken chat markers, fenced sections, signs.

Many servers turn a marker in a message's text, such as `<|im_end|>`, into the control token of that name. Whoever wrote
the text could then end the message and answer in the model's place.
"""

import base64
import hashlib
import json
import re
from collections.abc import Sequence

from common.patterns import FilteredPattern, ignoring_case

_BAR = "|｜"
_MARKER = re.compile(
    rf"<(?=[{_BAR}][^\s<>]{{1,64}}[{_BAR}]>)"  # <|im_end|>, <|eot_id|>, <|channel|>
    # </s>, <pad>, <think>
    r"|<(?=/?(?:s|bos|eos|pad|unk|mask|cls|sep|think|reponame|filename|unused\d+)>)"
    # <start_of_turn>, <tool_call>, <fim_prefix>
    r"|<(?=/?(?:(?:start|end|begin)_of|tool|repo|file|issue|jupyter|gh|empty|commit|fim)_[a-z_]+>)"
    # <<SYS>>, inside the [INST] of Llama 2
    r"|<(?=</?SYS>>)"
    r"|\[(?=/?(?:INST|IMG|AUDIO|PREFIX|MIDDLE|SUFFIX|THINK|ARGS|CALL_ID|CLS|SEP|MASK|gMASK|UNK|PAD)\])"
    # [SYSTEM_PROMPT], [AVAILABLE_TOOLS], [TOOL_CALLS]
    r"|\[(?=/?(?:SYSTEM|AVAILABLE|TOOL|IMG|BEGIN|MODEL)_[A-Z]+\])"
)
_SIGNS = {
    "chat markers": FilteredPattern(_MARKER, (b"<", b"[")),
    "roles": FilteredPattern(
        re.compile(r"\n\W{0,4}(?:system|assistant)\W{0,4}:", re.IGNORECASE), (b"system", b"assistant")
    ),
    "orders to a model": FilteredPattern(
        re.compile(
            r"\b(?:ignore|disregard|forget|override)\b[^.\n]{0,40}\b(?:instructions?|prompts?|rubric|rules|above|previous)\b"
            r"|\bsystem prompt\b|\byou are now\b[^.\n]{0,30}\b(?:ai|model|assistant|dan)\b",
            re.IGNORECASE,
        ),
        (b"ignore", b"disregard", b"forget", b"override", b"system prompt", b"you are now"),
    ),
}
_FENCE = re.compile(r"=== ([a-z2-7]{8}) ")
_HEADING = re.compile(r"^(?==== )", re.MULTILINE)


def break_markers(text: str) -> str:
    """`text` with a space inside every chat marker, so that no tokenizer takes it for a control token."""
    return _MARKER.sub(lambda match: f"{match.group()} ", text)


def fenced(sections: Sequence[tuple[str, str]]) -> str:
    """Join (title, text) sections, each below a line `=== CODE title`, and end with the line `=== CODE end`.

    The code is a digest of all sections: the same content gives the same request, and a text cannot forge a fence,
    because it would have to contain its own digest.
    """
    digest = hashlib.sha256(json.dumps(sections).encode()).digest()
    code = base64.b32encode(digest[:5]).decode().lower()
    # A line of a text that begins like a fence is moved by one space, whatever its code is.
    parts = [f"=== {code} {title}\n{_HEADING.sub(' ', text)}" for title, text in sections]
    return "\n".join([*parts, f"=== {code} end"])


def read_fenced(text: str) -> list[tuple[str, str]]:
    """The inverse of `fenced`: its (title, text) sections, or an empty list if `text` is anything else.

    Chat markers and headings in the sections stay broken.
    """
    fence = _FENCE.match(text)
    if fence is None or not text.endswith(f"\n=== {fence[1]} end"):
        return []
    parts = re.split(rf"(?:^|\n)=== {fence[1]} (.*)(?:\n|$)", text)
    # `split` gives '', title, text, title, text, …, 'end', ''.
    return list(zip(parts[1:-2:2], parts[2:-2:2], strict=True))


def hostile_signs(text: str) -> list[str]:
    """Names of the patterns in a text that may be addressed to the model reading it. For statistics, not a verdict."""
    text = f"\n{text}"  # every line then follows a line break, which is faster to search for than a line's beginning
    lowered = ignoring_case(text)
    return [sign for sign, pattern in _SIGNS.items() if pattern.search(text, lowered)]
