"""Secrets from files, as containers hand them over: NAME_FILE is the path of a file with what NAME would hold."""

import os
import re
from pathlib import Path

from common.errors import ConfigError

_SECRET = re.compile(
    r"(PREFECT_API_AUTH_STRING|PREFECT_SERVER_DATABASE_(CONNECTION_URL|PASSWORD)|HF_TOKEN|\w+_API_KEY)_FILE"
)


def read_secret_files() -> None:
    """Put the content of each such file into the environment of this process, in place of the path.

    Only for names of secrets: other programs have variables that end in _FILE too. Raises `ConfigError` for a file that
    cannot be read or is empty, and if both variables are set.
    """
    for variable in [name for name in os.environ if _SECRET.fullmatch(name)]:
        name, path = variable.removesuffix("_FILE"), os.environ[variable]
        if name in os.environ:
            raise ConfigError(f"{name} and {variable} are both set: keep one of them")
        try:
            value = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise ConfigError(f"{variable}: {path} cannot be read ({reason})") from None
        if not value:
            raise ConfigError(f"{variable}: {path} is empty")
        del os.environ[variable]
        os.environ[name] = value
