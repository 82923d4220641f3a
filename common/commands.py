"""Commands that are printed for users to copy: every word is quoted for a shell, wherever it came from."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path


def shell_command(*words: object) -> str:
    """The words as one line for a shell, each quoted if it has a character that a shell would read."""
    return shlex.join(map(str, words))


def config_words(config: str, settings: Sequence[str] | None) -> str:
    """The configuration and its `--set` options, quoted for a shell, for commands that are printed."""
    return shell_command(config, *(word for setting in settings or () for word in ("--set", setting)))


def retry_command(run: str) -> str:
    """The command that starts a deployment's run again."""
    return shell_command("nautile", "retry", run)


def program() -> str:
    """How the user of this terminal names this program: `nautile`, or its path where it is not on PATH.

    As in a virtual environment that is not active.
    """
    path = Path(sys.argv[0])
    on_path = str(path.parent) in os.environ.get("PATH", "").split(os.pathsep)
    if path.name != "nautile" or on_path or not os.access(path, os.X_OK):
        return "nautile"
    path = path.absolute()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
