"""Read a `RunConfig` from TOML: find the file, apply `extends`, and report errors in one line naming the field."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import reduce
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from common.errors import ConfigError
from common.files import read_bounded_text
from common.text import did_you_mean
from configs.base import Section
from configs.forms import ServedConfig, refuse_in_form, served_here
from configs.schema import RunConfig

SectionPart = TypeVar("SectionPart", bound=Section)
MOST_EXTENDED = 20  # files in a chain of `extends`
_SHIPPED = Path(str(resources.files("configs")))


def load(name: str | Path, settings: Sequence[str] | None = None) -> RunConfig:
    """Read a configuration by path, or by the name of one that ships here (`local`, `spark`, `nautile_370m`).

    `settings`: values that replace those of the file, as `reason.policy.steps=3` (see `changed`). Raises `ConfigError`
    with one message naming the file and the field.
    """
    path = locate(name)
    try:
        return RunConfig.model_validate(changed(_read(path), settings or ()))
    except ValidationError as error:
        raise ConfigError(f"{path}: {_first_error(error, RunConfig)}") from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deep") from None


def load_base(name: str | Path) -> RunConfig:
    """The configuration that a file builds on: of the files that it extends the farthest that is whole by itself.

    A file that extends none builds on itself. Raises `ConfigError` as `load` does.
    """
    files = _files(locate(name))
    table: dict[str, Any] = {}
    for _, own in files[:-1]:
        table = _merged(table, own)
        try:
            return RunConfig.model_validate(table)
        except ValidationError:
            continue  # a part that others share
    return load(name)


def load_part(name: str | Path, model: type[SectionPart], settings: Sequence[str] | None = None) -> SectionPart:
    """The tables of `model` from a file that has them alone, or beside those of a whole configuration.

    Raises `ConfigError` as `load` does.
    """
    path = locate(name)
    table = changed(_read(path), settings or ())
    if unknown := sorted(set(table) - set(model.model_fields) - set(RunConfig.model_fields)):
        raise ConfigError(f"{path}: unknown key `{unknown[0]}`; it may have {', '.join(model.model_fields)}")
    try:
        return model.model_validate({name: table[name] for name in model.model_fields if name in table})
    except ValidationError as error:
        raise ConfigError(f"{path}: {_first_error(error, model)}") from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deep") from None


def load_own(path: Path, model: type[SectionPart]) -> SectionPart:
    """Read a file that has the fields of `model` and no others. Raises `ConfigError` as `load` does."""
    try:
        return model.model_validate(_table(path))
    except ValidationError as error:
        raise ConfigError(f"{path}: {_first_error(error, model)}") from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deep") from None


def load_form(name: str, overrides: Sequence[str] = ()) -> tuple[RunConfig, RunConfig]:
    """The configuration that a form of Prefect names, with its overrides, and the base that it builds on.

    `name`: what the worker serves, a shipped configuration, or a path there. `overrides`: as `settings` of `load`.
    Raises `ConfigError` with the form's field and the configuration's, also for what `configs.forms` refuses.
    """
    served = served_here()
    try:
        if served and served.name == name:
            before, base = served.table, RunConfig.model_validate(served.base or served.table)
        else:
            before, base = _read(locate(name)), load_base(name)
        RunConfig.model_validate(before)
    except (ConfigError, ValidationError) as error:
        reason = error if isinstance(error, ConfigError) else f"{name}: {_first_error(error, RunConfig)}"
        raise ConfigError(f"config: {reason}") from None
    after = changed(before, overrides, "overrides:")
    refuse_in_form(before, after, _known_tables(served))
    try:
        return RunConfig.model_validate(after), base
    except ValidationError as error:
        raise ConfigError(f"overrides: {_first_error(error, RunConfig)}") from None


def _known_tables(served: ServedConfig | None) -> Iterator[dict[str, Any]]:
    """The table that this worker serves and those of the shipped configurations, which are read one at a time."""
    if served:
        yield served.table
    yield from (_read(path) for path in sorted(_SHIPPED.glob("*.toml")))


def locate(name: str | Path) -> Path:
    """The file called `name`, else `configs/<name>.toml` of the installation. `ConfigError` if neither exists."""
    path = Path(name)
    if path.is_file():
        return path
    shipped = _SHIPPED / f"{path.name.removesuffix('.toml')}.toml"
    if path.parent == Path(".") and shipped.is_file():
        return shipped
    known = sorted(p.stem for p in shipped.parent.glob("*.toml"))
    raise ConfigError(
        f"no configuration {str(name)!r}{did_you_mean(path.name, known)}: not a file here, "
        f"and none of the shipped ones ({', '.join(known)})"
    )


def _read(path: Path) -> dict[str, Any]:
    """The file's table merged into that of the file it `extends`: tables merge, everything else is replaced."""
    return reduce(_merged, (own for _, own in _files(path)))


def _files(path: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The file and those that it extends, the farthest first, each with its own table."""
    files: list[tuple[Path, dict[str, Any]]] = []
    while True:
        path = path.resolve()
        if any(path == other for other, _ in files):
            names = ", ".join(other.name for other, _ in reversed(files))
            raise ConfigError(f"{path}: `extends` goes in a circle through {names}")
        if len(files) > MOST_EXTENDED:
            raise ConfigError(f"{path}: a chain of `extends` through more than {MOST_EXTENDED} files")
        table = _table(path)
        files.insert(0, (path, table))
        if "extends" not in table:
            return files
        parent = table.pop("extends")
        if not isinstance(parent, str):
            raise ConfigError(f"{path}: `extends` must be the name of one file")
        base = path.parent / parent
        path = base if base.is_file() else locate(parent)


def _table(path: Path) -> dict[str, Any]:
    """The content of one file. Raises `ConfigError` if it is too large or not TOML."""
    try:
        return tomllib.loads(read_bounded_text(path))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from None


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = _merged(base[key], value) if both else value
    return merged


def changed(table: Mapping[str, Any], settings: Sequence[str], option: str = "--set") -> dict[str, Any]:
    """A copy of the table with the values of settings such as `reason.policy.steps=3` and `ingest.sources.0.records=9`.

    A value is written as in TOML; what is not TOML is taken as text, so that `name=trial` needs no quotes. Raises
    `ConfigError` for a setting without `=`, and for a path through a value that is no table and no list; `option` is
    what gave the setting.
    """
    copy = deepcopy(dict(table))
    for setting in settings:
        path, separator, text = setting.partition("=")
        *parents, last = path.strip().split(".")
        if not separator or not all((*parents, last)):
            raise ConfigError(f"{option} {setting}: write it as FIELD=VALUE, for example reason.policy.steps=3")
        place: Any = copy
        where = f"{option} {setting}"
        for part in parents:
            place = place.setdefault(part, {}) if isinstance(place, dict) else place[_index(place, part, where)]
        if isinstance(place, dict):
            place[last] = _toml_value(text)
        else:
            place[_index(place, last, where)] = _toml_value(text)
    return copy


def _index(values: Any, part: str, where: str) -> int:
    """`part` as the place of an entry of a list."""
    if not isinstance(values, list):
        raise ConfigError(f"{where}: {part!r} lies inside a value that is no table and no list")
    if not (part.isdecimal() and int(part) < len(values)):
        raise ConfigError(f"{where}: {part!r} is no entry of a list of {len(values)}: they count from 0")
    return int(part)


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _fields(schema: dict[str, Any], path: Sequence[int | str]) -> set[str]:
    """The names of the fields that a section may have at a path, by the JSON schema of the whole."""

    def sections(place: Any) -> Iterator[dict[str, Any]]:
        if isinstance(place, dict):
            if "$ref" in place:
                place = schema["$defs"][place["$ref"].rpartition("/")[2]]
            yield place
            for other in place.get("anyOf", ()):
                yield from sections(other)

    places = [schema]
    for part in path:
        inner = "items" if isinstance(part, int) else "additionalProperties"
        places = [
            section for place in places for section in sections(place.get("properties", {}).get(part, place.get(inner)))
        ]
    return {name for place in places for name in place.get("properties", {})}


def _first_error(error: ValidationError, model: type[Section]) -> str:
    """The first error in one line, with the number of further ones. `model`: what was validated."""
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
