"""docs/commands.md: every command with its arguments and options, and the fields of what `--json` prints.

`python -m flows.cli.document > docs/commands.md` writes it anew.
"""

from collections.abc import Iterator
from typing import Any

import typer
from pydantic import TypeAdapter

from common.text import markdown_table
from flows.cli.document.outputs import OUTPUTS, VERSION
from flows.cli.main import PANELS, app

_INTRODUCTION = f"""# The commands of `nautile`

Made from the code by `python -m flows.cli.document > docs/commands.md`; a test compares the two. `nautile COMMAND
--help` says the same. Exit codes: 0 done, 1 a stage crashed, 2 something for you to fix (one line says what), 130 you
stopped it. `nautile --install-completion` has your shell complete commands, stages and configurations.

**`--json`** prints one JSON value. Its fields are listed here for the commands that programs build upon. They are
version {VERSION} of the outputs, which `nautile --version` names: within a version fields are only added. The output of
a command without such a list is that of an artifact or a measurement, and may change."""


def document() -> str:
    """The whole page, as Markdown."""
    top: Any = typer.main.get_command(app)
    parts = [_INTRODUCTION]
    for panel, names in PANELS.items():
        parts.append(f"## {panel}")
        for name in names:
            inner = getattr(top.commands[name], "commands", {})
            commands = {f"{name} {key}": command for key, command in inner.items()} or {name: top.commands[name]}
            for title, command in commands.items():
                parts += _command(title, command)
    return "\n\n".join(parts) + "\n"


def _command(name: str, command: Any) -> Iterator[str]:
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    words = [parameter.metavar if parameter.required else f"[{parameter.metavar}]" for parameter in arguments]
    yield f"### `{' '.join(['nautile', name, *words])}`"
    yield " ".join(command.help.split())
    if rows := [_parameter(parameter) for parameter in command.params]:
        yield markdown_table(("argument or option", "default", "what"), rows)
    for title, output in OUTPUTS.items():
        if title == name or title.startswith(f"{name} "):
            schema = schema_of(output)
            yield "\n".join([f"`nautile {title} --json`: {_kind(schema)}", *_objects(schema)])


def _parameter(parameter: Any) -> tuple[str, str, str]:
    if parameter.param_type_name == "argument":
        name = parameter.metavar
    else:
        value = "" if parameter.is_flag else f" {parameter.metavar or parameter.name.upper()}"
        name = f"{', '.join(parameter.opts)}{value}"
    default = "" if parameter.default in (None, False, "") else f"`{parameter.default}`"
    return f"`{name}`", default, " ".join((parameter.help or "").split())


def schema_of(output: Any) -> dict[str, Any]:
    """The JSON schema of an output."""
    return TypeAdapter(output).json_schema()


def _objects(schema: dict[str, Any]) -> Iterator[str]:
    """A line for each kind of object in an output, the outermost first."""
    outermost = {schema["title"]: schema} if "properties" in schema else {}
    for name, place in {**outermost, **schema.get("$defs", {})}.items():
        if "properties" in place:
            fields = ", ".join(f"`{field}` {_kind(value)}" for field, value in place["properties"].items())
            yield f"- {name}: {fields}{'' if place.get('additionalProperties') is False else ', and more'}"


def _kind(place: dict[str, Any]) -> str:
    """A type in a few words."""
    if "$ref" in place:
        name = place["$ref"].rpartition("/")[2]
        return name if name != "JsonValue" else "any"
    if "anyOf" in place:
        return " or ".join(_kind(other) for other in place["anyOf"])
    if "enum" in place:
        return " / ".join(f'"{value}"' for value in place["enum"])
    if place.get("type") == "array":
        return f"list of {_kind(place['items'])}"
    if place.get("type") == "object" and "properties" not in place:
        values = place.get("additionalProperties")
        return f"object of {_kind(values)}" if isinstance(values, dict) else "object"
    return place["title"] if "properties" in place else str(place.get("type", "any"))
