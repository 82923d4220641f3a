"""Defences against prompt injection in text sent to a chat endpoint: broken chat markers, fenced sections, signs.

Many servers turn a marker in a message's text, such as `<|im_end|>`, into the control token of that name. Whoever wrote
the text could then end the message and answer in the model's place.
"""

import base64
import hashlib
import json
import re
from collections.abc import Sequence

from nautile.common.patterns import FilteredPattern, ignoring_case

_BAR = "|｜"
_LINE_ENDS = r"\n\r\v\f\x1c-\x1e\x85\u2028\u2029"  # as `str.splitlines`
_MARKER = re.compile(
    rf"<(?=[{_BAR}][^\s<>]{{1,64}}[{_BAR}]>)"  # <|im_end|>, <|eot_id|>, <|channel|>
    rf"|<(?=[{_BAR}][\w:/.-]{{1,64}}>|[\w:/.-]{{1,64}}[{_BAR}]>)"  # <|turn>, <turn|>, <|channel>
    rf"|\[(?=[{_BAR}][^\s\[\]]{{1,64}}[{_BAR}]\])"  # [|endofturn|]
    # </s>, <pad>, <think>
    r"|<(?=/?(?:s|think|thinking|reponame|filename|escape|unused_?\d+)>)"
    r"|<(?=/?(?:[bB][oO][sS]|[eE][oO][sS]|eo[dptm]|EO[DPTM]|sop|SOP|pad|PAD|unk|UNK|mask|MASK|cls|CLS|sep|SEP)"
    r"(?:_TOKEN|_token|_id)?>)"
    # <SPECIAL_12>, <reserved_106>, <extra_id_0>
    r"|<(?=(?:SPECIAL|special|reserved|extra|extra_id|ctrl|control)_?\d+>)"
    # <start_of_turn>, <tool_call>, <fim_prefix>, <arg_key>
    r"|<(?=/?(?:(?:start|end|begin)_(?:of|function)|tool|repo|file|issue|jupyter|gh|empty|commit|fim|arg|longcat)_[a-z_]+>)"
    r"|<(?=/?(?:seed|minimax|longcat):[a-z_]+>)"  # <seed:eos>, </seed:think>
    r"|<(?=_(?:system|user|bot|end)>)"
    # <<SYS>>, inside the [INST] of Llama 2
    r"|<(?=</?SYS>>)"
    r"|\[(?=/?(?:INST|IMG|AUDIO|TRANSCRIBE|PREFIX|MIDDLE|SUFFIX|THINK|ARGS|CALL_ID|CLS|SEP|MASK|gMASK|sMASK|UNK|PAD|BOS|EOS"
    r"|STOP|sop|eop|control_\d+)\])"
    # [SYSTEM_PROMPT], [AVAILABLE_TOOLS], [TOOL_CALLS]
    r"|\[(?=/?(?:SYSTEM|AVAILABLE|TOOL|IMG|BEGIN|MODEL)_[A-Z]+\])"
    r"|\](?=~!?b[\[\]])|\[(?=e~\[)|◁(?=/?think▷)"  # MiniMax, Kimi
)
_SIGNS = {
    "chat markers": FilteredPattern(_MARKER, (b"<", b"[", b"]", "◁".encode())),
    "roles": FilteredPattern(
        re.compile(rf"[{_LINE_ENDS}]\W{{0,4}}(?:system|assistant)\W{{0,4}}:", re.IGNORECASE), (b"system", b"assistant")
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
# At the beginning of a line, whichever of Unicode's characters ends the line before it.
_HEADING = re.compile(rf"(?:^|(?<=[{_LINE_ENDS}]))(?====[^\S{_LINE_ENDS}])")


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
    """The inverse of `fenced`: (title, text) sections, their markers still broken; an empty list for any other text."""
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
