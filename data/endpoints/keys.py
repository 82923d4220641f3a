"""API keys: read from the environment when a request is sent, and kept out of all that is written.

Servers repeat keys in their errors and, asked to, in their replies. A message is written without the key; a reply that
contains it is not kept. That holds for keys of any length, but not for words that stand in the place of a key because
a client demands one: those are no secret, and occur in ordinary text.
"""

import base64
import html
import json
import os
import re
from urllib.parse import quote

from nautile.common.errors import ConfigError
from nautile.configs.endpoint import EndpointConfig

MAX_MESSAGE = 300  # characters of an error message
SHORTEST_ENCODED = 8  # characters; a shorter one is a few digits in base64, as ordinary text may have them
SHORTEST_KEY = 4  # characters; a shorter one could not be told apart from ordinary text
# What the documentation of servers without keys tells their users to set, in small letters.
PLACEHOLDERS = {
    *("empty", "none", "null", "nil", "unused", "dummy", "fake", "test", "any", "anything", "placeholder", "changeme"),
    *("no-key", "no_key", "nokey", "not-needed", "not_needed", "notneeded", "not-used", "no-key-required", "n/a", "na"),
    *("sk-no-key-required", "sk-none", "key", "api-key", "api_key", "apikey", "your-api-key", "your_api_key", "secret"),
    *("ollama", "lm-studio", "lmstudio", "llama.cpp", "llamacpp", "vllm", "sglang", "local", "localhost", "x", "xxx"),
    *("-", "0", "1"),
}


def check_key(name: str, config: EndpointConfig) -> None:
    """Raise `ConfigError` if the environment variable for the endpoint's key is unset or holds no valid key."""
    if config.vendor.needs_key and not config.key_variable:
        raise ConfigError(
            f"endpoint {name!r}: kind {config.kind!r} needs `key_variable`, the variable that holds its key"
        )
    if not config.key_variable:
        return
    key = key_of(config)
    where = f"endpoint {name!r}: the environment variable {config.key_variable} (its `key_variable`)"
    if not key:
        raise ConfigError(f"{where} is not set; export it with the key, or choose another endpoint")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(f"{where} holds characters that no key has; export it again")
    if len(key) < SHORTEST_KEY and key.lower() not in PLACEHOLDERS:
        raise ConfigError(
            f"{where} holds fewer than {SHORTEST_KEY} characters, which could not be kept out of what is written; "
            "for a server without keys leave `key_variable` out, or export the word EMPTY"
        )


def key_of(config: EndpointConfig) -> str:
    """Read the key from the environment, without surrounding white space; empty if there is none."""
    return os.environ.get(config.key_variable, "").strip() if config.key_variable else ""


def repeats_key(text: str, config: EndpointConfig) -> bool:
    return any(form in text for form in _forms(key_of(config)))


def redact_key(text: str, config: EndpointConfig) -> str:
    """Replace the endpoint's key in an error message, in case the server repeats it."""
    for form in _forms(key_of(config)):
        text = text.replace(form, "[key]")
    return text


def safe_message(text: str, config: EndpointConfig) -> str:
    """Shorten a server's message to one line without the key."""
    return " ".join(redact_key(text, config).split())[:MAX_MESSAGE]


def _forms(key: str) -> list[str]:
    """How a secret key may stand in a text: as it is, escaped for JSON, Python, a URL or HTML, or as the part of base64
    (of `user:key`, as HTTP's basic authentication has it) or hexadecimal digits that is the key's; longest first.
    """
    if not key or key.lower() in PLACEHOLDERS:
        return []
    in_json, in_urls = json.dumps(key)[1:-1], {quote(key), quote(key, safe="")}
    forms = {key, in_json, in_json.replace("/", "\\/"), repr(key)[1:-1], html.escape(key), *in_urls}
    forms |= {re.sub("%..", lambda code: code[0].lower(), form) for form in in_urls}
    if len(key) >= SHORTEST_ENCODED:
        forms |= {key.encode().hex(), key.encode().hex().upper()}
        for before in range(3):  # bytes before the key in a group of three
            first, end = -(-8 * before // 6), 8 * (before + len(key)) // 6
            digits = base64.b64encode(bytes(before) + key.encode())[first:end].decode()
            forms |= {digits, digits.replace("+", "-").replace("/", "_")}
    return sorted(forms, key=len, reverse=True)
