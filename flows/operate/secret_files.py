"""Secrets from files, as is usual in containers: NAME_FILE is the path of a file with the value of NAME."""

import os
import re
from pathlib import Path

from nautile.common.errors import ConfigError
from nautile.common.files import read_bounded_text

_SECRET = re.compile(
    r"(PREFECT_API_AUTH_STRING|PREFECT_SERVER_DATABASE_(CONNECTION_URL|PASSWORD)|HF_TOKEN|\w+_API_KEY)_FILE"
)


def read_secret_files() -> None:
    """Replace each variable NAME_FILE of the environment by NAME with the content of the file.

    Only for known secrets, because other programs have variables that end in _FILE too. Raises `ConfigError` if a file
    is unreadable, empty or not one line of text, and if both variables are set.
    """
    for variable in [name for name in os.environ if _SECRET.fullmatch(name)]:
        name, path = variable.removesuffix("_FILE"), os.environ[variable]
        if name in os.environ:
            raise ConfigError(f"{name} and {variable} are both set: keep one of them")
        try:
            value = read_bounded_text(Path(path)).strip()
        except ConfigError as error:
            raise ConfigError(f"{variable}: {error}") from None
        if not value or not value.isprintable():
            raise ConfigError(f"{variable}: {path} {'is empty' if not value else 'is not one line of text'}")
        del os.environ[variable]
        os.environ[name] = value
