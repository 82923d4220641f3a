"""Recognise API keys that were written into a configuration, where only the NAME of a key's variable belongs.

A configuration is recorded in events, requests, manifests and the catalog, so a key in it would be on many disks. What
is refused is never repeated in the message.
"""

import re
from collections.abc import Iterator
from typing import Any

# Capital letters, as POSIX has it: most keys mix letters of both cases, or are lower-case hexadecimal.
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,63}")
_LONGEST_WORD = 24  # letters between two underscores
_LONGEST_MIXED_WORD = 15  # the same for a word with digits in it, such as a key of capital letters and digits
_PREFIX = re.compile(
    r"(?i:\b(?:bearer|basic)\s+\S)|\b(?:sk|gsk|csk|hf|xai|nvapi|pplx|gh[oprsu]|github_pat|glpat|xox[abeprs])[-_][\w-]{4}"
    r"|\b(?:r8|fw|tgp_v1|dop_v1|whsec)_\w{4}|\bya29\.\w{4}|\b(?:AKIA|ASIA|AIza|eyJ)\w{8}"
)
_RUN = re.compile(r"(?=[0-9]*[A-Za-z])(?=[A-Za-z]*[0-9])[A-Za-z0-9]{16,}")  # letters and digits, as at random
_SECRET_NAME = re.compile(
    r"(?:.*_)?(?:api_?key|authorization|(?:access|auth|bearer|api|id)_token|secret|secret_key|password|passwd"
    r"|credentials?|cookie)|key|token|auth|bearer"
)
# Fields that identify a user or a cache, as digests or UUIDs.
_IDENTIFIERS = {"user", "safety_identifier", "prompt_cache_key", "cache_salt"}


def is_variable_name(text: str) -> bool:
    """Whether `text` can be the name of an environment variable for a secret, and not the secret itself."""
    if not _VARIABLE.fullmatch(text):
        return False
    words = text.split("_")
    return all(len(word) <= (_LONGEST_WORD if word.isalpha() else _LONGEST_MIXED_WORD) for word in words)


def is_like_key(text: str) -> bool:
    """Whether `text` contains something that looks like an API key: a known prefix, or a long run at random."""
    return bool(_PREFIX.search(text) or _RUN.search(text))


def has_key_prefix(text: str) -> bool:
    """Whether `text` contains a prefix that only keys have; for fields that may contain long identifiers."""
    return bool(_PREFIX.search(text))


def secret_fields(value: Any, path: str) -> Iterator[str]:
    """The paths of fields in JSON data that hold a secret, by their name or by their value."""
    if isinstance(value, dict):
        for name, field in value.items():
            plain = str(name).lower().replace("-", "_")
            if is_like_key(str(name)):
                yield path  # without the name, which is a key itself
            elif isinstance(field, str) and field and _SECRET_NAME.fullmatch(plain):
                yield f"{path}.{name}"
            elif plain not in _IDENTIFIERS:
                yield from secret_fields(field, f"{path}.{name}")
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from secret_fields(entry, path)
    elif isinstance(value, str) and is_like_key(value):
        yield path
