"""Load configurations from TOML: find the file, apply `extends` and `--set`, and report errors in one line."""

import os
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import reduce
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from nautile.common.errors import ConfigError
from nautile.common.files import MOST_PARTS, NotToml, parse_toml, read_bounded_toml
from nautile.common.text import did_you_mean, visible
from nautile.configs.base import Section
from nautile.configs.forms import (
    WORKERS_SECTIONS,
    ServedConfig,
    not_in_forms,
    refuse_in_form,
    served_here,
    with_gates_of,
)
from nautile.configs.plugins import check_plug_ins
from nautile.configs.schema import RunConfig

SectionPart = TypeVar("SectionPart", bound=Section)
MOST_EXTENDED = 20  # files in a chain of `extends`
_SHIPPED = Path(str(resources.files("nautile.configs")))


def load(name: str | Path, settings: Sequence[str] | None = None) -> RunConfig:
    """Load a configuration by path, or by the name of a shipped one (`local`, `nautile_100m`, …).

    `settings`: values that replace those of the file, such as `reason.policy.steps=3` (see `changed`). Raises
    `ConfigError` with the file and the field.
    """
    check_plug_ins()
    path = locate(name)
    try:
        return RunConfig.model_validate(changed(_read(path), settings or ()))
    except ValidationError as error:
        # A file of a few settings that names no base lacks most fields; the first of them would be a riddle.
        lacks = error.errors(include_url=False)[0]["type"] == "missing" and len(_files(path)) == 1
        hint = '. To change a few settings of another file, begin with `extends = "local"`' if lacks else ""
        raise ConfigError(f"{path}: {_first_error(error, RunConfig)}{hint}") from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deep") from None


def load_base(name: str | Path) -> RunConfig:
    """The base configuration of a file: the first in its chain of `extends` that is a complete configuration.

    A file that extends none is its own base. Raises the errors of `load`.
    """
    files = _files(locate(name))
    table: dict[str, Any] = {}
    for _, own in files[:-1]:
        table = _merged(table, own)
        try:
            return RunConfig.model_validate(table)
        except ValidationError:
            continue  # incomplete: a file of shared settings
    return load(name)


def load_part(name: str | Path, model: type[SectionPart], settings: Sequence[str] | None = None) -> SectionPart:
    """Load the tables of `model` from a file that may also have those of a whole configuration.

    Raises the errors of `load`.
    """
    path = locate(name)
    table = changed(_read(path), settings or ())
    if unknown := sorted(set(table) - set(model.model_fields) - set(RunConfig.model_fields)):
        raise ConfigError(f"{path}: unknown key `{unknown[0]}`; allowed are {', '.join(model.model_fields)}")
    try:
        return model.model_validate({name: table[name] for name in model.model_fields if name in table})
    except ValidationError as error:
        raise ConfigError(f"{path}: {_first_error(error, model)}") from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deep") from None


def load_own(path: Path, model: type[SectionPart]) -> SectionPart:
    """Load a file that has the fields of `model` and no others. Raises the errors of `load`."""
    try:
        return model.model_validate(read_bounded_toml(path))
    except ValidationError as error:
        raise ConfigError(f"{path}: {_first_error(error, model)}") from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deep") from None


def load_form(
    name: str, overrides: Sequence[str] = (), stored: ServedConfig | None = None
) -> tuple[RunConfig, RunConfig]:
    """Load the configuration that a form of Prefect names, with its overrides; returns it and its base.

    `name`: the configuration that the worker serves, a shipped one, or a path on the worker. `overrides`: as `settings`
    of `load`. `stored`: the configuration, where `name` refers to one in the store. Raises `ConfigError` with the
    fields of form and configuration, also for what `configs.forms` refuses.
    """
    check_plug_ins()  # also what the machine requires that made the deployment
    served = served_here()
    is_served = served is not None and served.name == name
    known = served if is_served else stored
    try:
        if known:
            table, base = known.table, RunConfig.model_validate(known.base or known.table)
        else:
            table, base = _read(locate(name)), load_base(name)
        before = RunConfig.model_validate(table)
    except (ConfigError, ValidationError) as error:
        reason = error if isinstance(error, ConfigError) else f"{name}: {_first_error(error, RunConfig)}"
        raise ConfigError(f"config: {reason}") from None
    try:
        after = RunConfig.model_validate(changed(table, overrides, "overrides:"))
    except ValidationError as error:
        section = str(next(iter(error.errors()[0]["loc"]), ""))
        problem = (
            not_in_forms(section) if section in WORKERS_SECTIONS else f"overrides: {_first_error(error, RunConfig)}"
        )
        raise ConfigError(problem) from None
    refuse_in_form(before, after)
    if served and not is_served:
        after = with_gates_of(after, RunConfig.model_validate(served.table))
    return after, base


def shipped_files(sweeps: bool = False) -> list[Path]:
    """The shipped configurations, or the shipped sweeps: the files that name a configuration (`config`)."""
    return [path for path in sorted(_SHIPPED.glob("*.toml")) if ("config" in read_bounded_toml(path)) == sweeps]


def locate(name: str | Path, sweeps: bool = False) -> Path:
    """The file `name`, else the shipped `configs/<name>.toml`, a configuration or one of the `sweeps`.

    Raises `ConfigError` if neither exists.
    """
    path = Path(name)
    if os.path.isfile(path):  # False also for a name that no file can have
        return path
    shipped = {file.stem: file for file in shipped_files(sweeps)}
    if path.parent == Path(".") and (file := shipped.get(path.name.removesuffix(".toml"))):
        return file
    kind = "sweep" if sweeps else "configuration"
    raise ConfigError(
        f"no {kind} {visible(repr(str(name)), 300)}{did_you_mean(path.name, shipped)}: not a file here, "
        f"and none of the shipped ones ({', '.join(shipped)})"
    )


def _read(path: Path) -> dict[str, Any]:
    """The table of a file merged into those of the files it extends: tables are merged, other values replaced."""
    return reduce(_merged, (own for _, own in _files(path)))


def _files(path: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The file and the files that it extends, the base first, each with its own table."""
    files: list[tuple[Path, dict[str, Any]]] = []
    while True:
        path = path.resolve()
        if any(path == other for other, _ in files):
            names = ", ".join(other.name for other, _ in reversed(files))
            raise ConfigError(f"{path}: `extends` is circular: {names}")
        if len(files) > MOST_EXTENDED:
            raise ConfigError(f"{path}: the chain of `extends` has more than {MOST_EXTENDED} files")
        table = read_bounded_toml(path)
        files.insert(0, (path, table))
        if "extends" not in table:
            return files
        parent = table.pop("extends")
        if not isinstance(parent, str):
            raise ConfigError(f"{path}: `extends` must be the name of one file")
        base = path.parent / parent
        path = base if os.path.isfile(base) else locate(parent)


def _merged(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """`base` with the values of `overrides`; tables are merged recursively."""
    merged = dict(base)
    for key, value in overrides.items():
        are_tables = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = _merged(base[key], value) if are_tables else value
    return merged


def changed(table: Mapping[str, Any], settings: Sequence[str], option: str = "--set") -> dict[str, Any]:
    """A copy of the table with settings such as `reason.policy.steps=3` and `ingest.sources.0.records=9` applied.

    A value is parsed as TOML, else taken as text, so that `name=trial` needs no quotes. `option`: where the settings
    come from, for messages. Raises `ConfigError` for a setting without `=`, or whose path leads through a value that is
    neither a table nor a list.
    """
    copy = deepcopy(dict(table))
    for setting in settings:
        path, separator, text = setting.partition("=")
        *parents, last = path.strip().split(".")
        if not separator or not all((*parents, last)):
            raise ConfigError(f"{option} {setting}: write it as FIELD=VALUE, for example reason.policy.steps=3")
        if len(parents) > MOST_PARTS:
            raise ConfigError(f"{option} {visible(setting, 80)}: has over {MOST_PARTS} parts")
        container: Any = copy
        where = f"{option} {setting}"
        for part in parents:
            if isinstance(container, dict):
                container = container.setdefault(part, {})
            else:
                container = container[_index(container, part, where)]
        position = last if isinstance(container, dict) else _index(container, last, where)
        container[position] = _toml_value(text, where)
    return copy


def _index(values: Any, part: str, where: str) -> int:
    """Parse a part of a path as the index of an entry of the list `values`."""
    if not isinstance(values, list):
        raise ConfigError(f"{where}: {part!r} is inside a value that is neither a table nor a list")
    if not (part.isdecimal() and len(part) < 10 and int(part) < len(values)):
        raise ConfigError(
            f"{visible(where, 80)}: {visible(part, 20)!r} is not an index of a list of {len(values)} entries (counted "
            "from 0)"
        )
    return int(part)


def _toml_value(text: str, where: str) -> Any:
    try:
        table = parse_toml(f"value = {text}", visible(where, 80))
    except NotToml:
        return text
    if len(table) > 1:
        raise ConfigError(f"{visible(where, 80)}: sets several values; each is a setting of its own")
    return table["value"]


def _fields(schema: dict[str, Any], path: Sequence[int | str]) -> set[str]:
    """The field names that are allowed at a path, by the JSON schema of the whole configuration."""

    def alternatives(node: Any) -> Iterator[dict[str, Any]]:
        """A node of the schema, with its reference resolved, and the alternatives of its `anyOf`."""
        if isinstance(node, dict):
            if "$ref" in node:
                node = schema["$defs"][node["$ref"].rpartition("/")[2]]
            yield node
            for alternative in node.get("anyOf", ()):
                yield from alternatives(alternative)

    nodes = [schema]
    for part in path:
        inner = "items" if isinstance(part, int) else "additionalProperties"
        nodes = [
            child for node in nodes for child in alternatives(node.get("properties", {}).get(part, node.get(inner)))
        ]
    return {name for node in nodes for name in node.get("properties", {})}


def _first_error(error: ValidationError, model: type[Section]) -> str:
    """The first validation error in one line, and the number of further ones. `model`: the class that was validated."""
    details = error.errors(include_url=False)
    head = details[0]
    where = ".".join(str(part) for part in head["loc"])
    if head["type"] == "extra_forbidden":
        *parents, key = head["loc"]
        text = f"unknown key `{where}`{did_you_mean(str(key), _fields(model.model_json_schema(), parents))}"
    else:
        reason = head["msg"].removeprefix("Value error, ")
        text = f"`{where}`: {reason}" if where else reason
    return text + (f" (and {len(details) - 1} more)" if len(details) > 1 else "")
