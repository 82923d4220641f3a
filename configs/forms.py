"""Restrictions on runs that are started through Prefect's server, by a form or by anyone who can reach the server.

A form names a configuration that its worker knows, and overrides in the syntax of `--set`. The run has the permissions
and the environment of the worker. So overrides may change neither how processes are started (`[launch]`) nor where a
collector's key is sent (`[telemetry]`). They may name an environment variable only if the named configuration, the
worker's or a shipped one names it too, with the same address. `nautile deploy` passes the configuration that it serves
to the worker in the environment variable NAUTILE_WORKER, so that its name means the same on another machine.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from pydantic import ValidationError

from common.errors import ConfigError
from configs.base import Section
from configs.secrets import is_variable_name

WORKER = "NAUTILE_WORKER"
WORKERS_OWN = ("launch", "telemetry")  # sections that overrides may not change
_REMEDY = "it comes from the configuration that `nautile deploy` serves"


class ServedConfig(Section):
    """The configuration that a worker serves: its name in forms, its table, and the table of its base configuration."""

    name: str
    table: dict[str, Any]
    base: dict[str, Any]


class Variable(NamedTuple):
    """An environment variable that a configuration names, and where its value is sent."""

    name: str
    kind: str = ""  # kind of the endpoint; empty: the variable contains the address itself
    origin: str = ""  # scheme, host and port of the endpoint; empty: the vendor's default


def served_here() -> ServedConfig | None:
    """The configuration in NAUTILE_WORKER; None if it is not set. Raises `ConfigError` if it is invalid."""
    text = os.environ.get(WORKER)
    try:
        return ServedConfig.model_validate_json(text) if text else None
    except ValidationError as error:
        raise ConfigError(f"{WORKER} is not a value that `nautile deploy` sets: {error.errors()[0]['msg']}") from None


def refuse_in_form(before: Mapping[str, Any], after: Mapping[str, Any], known: Iterable[Mapping[str, Any]]) -> None:
    """Raise `ConfigError` with the path of the first field that overrides may not set to its value.

    `before`, `after`: the table of the named configuration without and with the overrides. `known`: further tables
    whose environment variables are allowed; they are read only if needed.
    """
    for section in WORKERS_OWN:
        if after.get(section, {}) != before.get(section, {}):
            raise ConfigError(f"overrides: {section}: a form may not set it: {_REMEDY}")
    allowed = {variable for _, variable in _variables(before, "")}
    for path, variable in _variables(after, ""):
        if variable not in allowed:
            allowed |= {known_variable for table in known for _, known_variable in _variables(table, "")}
        if variable not in allowed:
            if not is_variable_name(variable.name):
                # Not repeated: a key may stand in the place of its variable's name.
                raise ConfigError(f"overrides: {path}: it is the NAME of an environment variable, not a key: {_REMEDY}")
            where = f" with the address {variable.origin or 'of its vendor'}" if variable.kind else ""
            raise ConfigError(
                f"overrides: {path}: a form may not name the environment variable {variable.name!r}{where}: {_REMEDY}"
            )


def _variables(value: Any, path: str) -> Iterator[tuple[str, Variable]]:
    """(path, variable) of each field that names an environment variable."""
    if isinstance(value, Mapping):
        for name, field in value.items():
            place = f"{path}.{name}" if path else name
            if name == "key_variable" and field:
                parts = urlsplit(str(value.get("url", "")))
                origin = f"{parts.scheme}://{parts.netloc}".lower() if parts.netloc else ""
                yield place, Variable(str(field), str(value.get("kind", "openai")), origin)
            elif name == "notify" and field:
                yield place, Variable(str(field))
            else:
                yield from _variables(field, place)
    elif isinstance(value, (list, tuple)):
        for number, entry in enumerate(value):
            yield from _variables(entry, f"{path}.{number}")
