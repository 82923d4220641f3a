"""What a configuration may hold that came through Prefect's server: from a form, or from whoever reaches the server.

Its run has the rights and the environment of a worker. So a form sets neither what starts processes (`[launch]`) nor
where a collector's key is sent (`[telemetry]`): both are the worker's own. It may name an environment variable only as
the worker's configuration or a shipped one does, for a key with the same address. `nautile deploy` passes these on in
the environment variable NAUTILE_WORKER. A configuration given by its name is a file of the worker, and not restricted.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from pydantic import GetJsonSchemaHandler, ValidationError
from pydantic.json_schema import JsonSchemaValue

from common.errors import ConfigError
from configs.base import Section
from configs.operation import LaunchConfig, TelemetryConfig

WORKER = "NAUTILE_WORKER"
_REMEDY = "it comes from the configuration that `nautile deploy` serves"


class Variable(Section):
    """The name of an environment variable that a configuration uses, and where its value is sent."""

    name: str
    kind: str = ""  # of the endpoint; empty: the variable holds an address itself
    origin: str = ""  # scheme, host and port of the endpoint's address; empty: its vendor's


class WorkerSettings(Section):
    """What a run that a form asks for takes from its worker."""

    launch: LaunchConfig = LaunchConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    variables: tuple[Variable, ...] = ()


WORKERS_OWN = frozenset(WorkerSettings.model_fields) - {"variables"}


class WithoutWorkersOwn:
    """Metadata of a parameter's type: Prefect's form and its server's check of the values have not those sections."""

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        form = handler(schema)
        properties = handler.resolve_ref_schema(form)["properties"]
        for name in WORKERS_OWN:
            properties.pop(name, None)
        return form


def worker_settings(table: Mapping[str, Any]) -> WorkerSettings:
    """What a worker that serves this configuration (as plain values) gives to the runs of forms."""
    own = {name: table[name] for name in WORKERS_OWN if name in table}
    return WorkerSettings(**own, variables=tuple(variable for _, variable in _variables(table, "config")))


def this_worker() -> WorkerSettings:
    """The settings in NAUTILE_WORKER; without it the defaults. Raises `ConfigError` if it holds something else."""
    text = os.environ.get(WORKER)
    try:
        return WorkerSettings.model_validate_json(text) if text else WorkerSettings()
    except ValidationError as error:
        raise ConfigError(f"{WORKER} is not what `nautile deploy` sets: {error.errors()[0]['msg']}") from None


def as_on_worker(table: Mapping[str, Any], worker: WorkerSettings, shipped: Iterator[Mapping[str, Any]]) -> Any:
    """The table of a form with the sections of the worker. `shipped`: the tables of configurations that ship here.

    Raises `ConfigError` with the path of a field that a form may not set so.
    """
    own, default = (settings.model_dump(mode="json") for settings in (worker, WorkerSettings()))
    for section in sorted(WORKERS_OWN & table.keys()):
        given = table[section] if isinstance(table[section], Mapping) else {"": table[section]}
        for name, value in given.items():
            if value not in (own[section].get(name), default[section].get(name)):
                raise ConfigError(f"config.{section}.{name}: a form may not set it: {_REMEDY}")
    allowed = set(worker.variables)
    for path, variable in _variables(table, "config"):
        if variable not in allowed:
            allowed |= {known for other in shipped for _, known in _variables(other, "")}
        if variable not in allowed:
            where = f" with the address {variable.origin or 'of its vendor'}" if variable.kind else ""
            raise ConfigError(
                f"{path}: a form may not name the environment variable {variable.name!r}{where}: {_REMEDY}"
            )
    return {**table, **{name: own[name] for name in WORKERS_OWN}}


def _variables(value: Any, path: str) -> Iterator[tuple[str, Variable]]:
    """Each field that names an environment variable, by its path."""
    if isinstance(value, Mapping):
        for name, field in value.items():
            if name == "key_variable" and field:
                parts = urlsplit(str(value.get("url", "")))
                origin = f"{parts.scheme}://{parts.netloc}".lower() if parts.netloc else ""
                yield f"{path}.{name}", Variable(name=str(field), kind=str(value.get("kind", "openai")), origin=origin)
            elif name == "notify" and field:
                yield f"{path}.{name}", Variable(name=str(field))
            else:
                yield from _variables(field, f"{path}.{name}")
    elif isinstance(value, (list, tuple)):
        for number, entry in enumerate(value):
            yield from _variables(entry, f"{path}.{number}")
