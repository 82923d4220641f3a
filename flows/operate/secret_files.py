"""Secrets from files, as is usual in containers: NAME_FILE is the path of a file with the value of NAME."""

import os
import re
from pathlib import Path

from nautile.common.errors import ConfigError

_SECRET = re.compile(
    r"(PREFECT_API_AUTH_STRING|PREFECT_SERVER_DATABASE_(CONNECTION_URL|PASSWORD)|HF_TOKEN|\w+_API_KEY)_FILE"
)


def read_secret_files() -> None:
    """Replace each variable NAME_FILE of the environment by NAME with the content of the file.

    Only for known secrets, because other programs have variables that end in _FILE too. Raises `ConfigError` if a file
    is unreadable or empty, and if both variables are set.
    """
    for variable in [name for name in os.environ if _SECRET.fullmatch(name)]:
        name, path = variable.removesuffix("_FILE"), os.environ[variable]
        if name in os.environ:
            raise ConfigError(f"{name} and {variable} are both set: keep one of them")
        try:
            value = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
            raise ConfigError(f"{variable}: {path} cannot be read ({reason})") from None
        if not value:
            raise ConfigError(f"{variable}: {path} is empty")
        del os.environ[variable]
        os.environ[name] = value
