"""Text that leaves for a chat endpoint: chat markers in it are broken, and what is to be read as data is fenced.

Many servers turn a marker that a message spells, such as `<|im_end|>`, into the control token of that name. Whoever
writes the text could then end the message and answer in the model's place.
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
    r"|<(?=/?(?:s|bos|eos|pad|unk|mask|cls|sep|think|reponame|filename|unused\d+)>)"
    r"|<(?=/?(?:(?:start|end|begin)_of|tool|repo|file|issue|jupyter|gh|empty|commit|fim)_[a-z_]+>)"
    r"|<(?=</?SYS>>)"
    r"|\[(?=/?(?:INST|IMG|AUDIO|PREFIX|MIDDLE|SUFFIX|THINK|ARGS|CALL_ID|CLS|SEP|MASK|gMASK|UNK|PAD)\])"
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
    """The (title, text) sections below one another, each under the line `=== CODE title`, and the line `=== CODE end`.

    The code is a digest of all that is fenced: the same content gives the same request, and a text that is to hold its
    own fence would have to hold its own digest.
    """
    digest = hashlib.sha256(json.dumps(sections).encode()).digest()
    code = base64.b32encode(digest[:5]).decode().lower()
    parts = [f"=== {code} {title}\n{_HEADING.sub(' ', text)}" for title, text in sections]
    return "\n".join([*parts, f"=== {code} end"])


def read_fenced(text: str) -> list[tuple[str, str]]:
    """The sections that `fenced` put below one another; none if `text` is anything else.

    Chat markers in them stay broken, and so do headings.
    """
    first = _FENCE.match(text)
    if first is None or not text.endswith(f"\n=== {first[1]} end"):
        return []
    parts = re.split(rf"(?:^|\n)=== {first[1]} (.*)(?:\n|$)", text)
    return list(zip(parts[1:-2:2], parts[2:-2:2], strict=True))


def hostile_signs(text: str) -> list[str]:
    """What in a text looks as if it were meant for the model that reads it: for counts, not a verdict."""
    text = f"\n{text}"  # so that every line follows a line break, which is searched for faster than the place after it
    lowered = ignoring_case(text)
    return [sign for sign, pattern in _SIGNS.items() if pattern.search(text, lowered)]
