"""Configurations in the store, and the references to them that are parameters of flows.

`nautile run` stores its configuration as it stands with all its `--set` options. The flow reads it back by its
reference, as would a retry, a form or an API call that names it: it means the same whatever becomes of the file.
"""

import hashlib
import re
from collections.abc import Sequence

from nautile.common.commands import config_words, shell_command
from nautile.common.errors import ConfigError
from nautile.common.files import read_bounded_json, write_text, writing
from nautile.configs.forms import ServedConfig
from nautile.configs.load import load_form
from nautile.configs.schema import RunConfig
from nautile.store.artifacts import Store

_REFERENCE = re.compile(r"[^/\\]+@([0-9a-f]{16})")


def store_config(store: Store, config: RunConfig, base: RunConfig | None, words: str) -> str:
    """Write a configuration to the store; returns the reference to it: its name and its digest.

    `words`: the configuration as the command line names it, quoted for a shell. Raises `ConfigError` if the store is
    not writable.
    """
    text = ServedConfig.of(words, config, base or config).model_dump_json()
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = store.stored_config(digest)
    with writing(store.root):
        store.prepare()
        path.parent.mkdir(exist_ok=True)
        write_text(path, text)
    return f"{config.name}@{digest}"


def follow(store: Store, argument: str, overrides: Sequence[str]) -> tuple[RunConfig, RunConfig, str]:
    """The configuration that a flow's parameters mean, its base, and both as words of a command line.

    `argument`: a reference of `store_config`, else as of `load_form`. Raises the errors of `load_form`.
    """
    words = config_words(argument, overrides)
    match = _REFERENCE.fullmatch(argument)
    if not match or not (path := store.stored_config(match[1])).is_file():
        return *load_form(argument, overrides), words
    try:
        stored = ServedConfig.model_validate(read_bounded_json(path))
    except ValueError:
        raise ConfigError(f"config: {path} is no configuration that `nautile run` has stored") from None
    return *load_form(argument, overrides, stored), stored.name + words.removeprefix(shell_command(argument))
