"""Generator of docs/commands.md: every command with its arguments and options, and the fields of its `--json` output.

Run it with `python -m nautile.flows.cli.document > docs/commands.md`.
"""

from collections.abc import Iterator
from typing import Any

import typer
from pydantic import TypeAdapter

from nautile.common.text import markdown_table
from nautile.flows.cli.document.outputs import OUTPUTS, VERSION
from nautile.flows.cli.main import PANELS, app

_INTRODUCTION = f"""# The commands of `nautile`

Generated from the code by `python -m nautile.flows.cli.document > docs/commands.md`; a test compares the two. `nautile
COMMAND --help` prints the same texts. Exit codes: 0 success, 1 a stage crashed, 2 invalid input (one line explains how
to fix it), 130 stopped by you. `nautile --install-completion` adds shell completion of commands, stages and
configurations.

**`--json`** prints one JSON value. For commands that other programs may rely on, its fields are listed here. They are
version {VERSION} of the outputs, which `nautile --version` prints; within a version fields are only added. Commands
without such a list print the content of an artifact or a measurement, which may change."""


def document() -> str:
    """The page as Markdown."""
    top: Any = typer.main.get_command(app)
    parts = [_INTRODUCTION]
    # The order of the page is that of `nautile --help`. A group such as `store` is listed as its commands.
    for panel, names in PANELS.items():
        parts.append(f"## {panel}")
        for name in names:
            inner = getattr(top.commands[name], "commands", {})
            commands = {f"{name} {key}": command for key, command in inner.items()} or {name: top.commands[name]}
            for title, command in commands.items():
                parts += _command(title, command)
    return "\n\n".join(parts) + "\n"


def _command(name: str, command: Any) -> Iterator[str]:
    """The paragraphs of a command: usage, help, table of parameters, JSON outputs."""
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    words = [parameter.metavar if parameter.required else f"[{parameter.metavar}]" for parameter in arguments]
    yield f"### `{' '.join(['nautile', name, *words])}`"
    yield " ".join(command.help.split())
    if rows := [_parameter(parameter) for parameter in command.params]:
        yield markdown_table(("argument or option", "default", "what"), rows)
    # A command may have several outputs, such as `status`, `status RUN` and `status --why`: all whose title begins with
    # its name.
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
    # A flag that is off by default, and an option without a default, have an empty cell.
    default = "" if parameter.default in (None, False, "") else f"`{parameter.default}`"
    return f"`{name}`", default, " ".join((parameter.help or "").split())


def schema_of(output: Any) -> dict[str, Any]:
    """The JSON schema of an output."""
    return TypeAdapter(output).json_schema()


def _objects(schema: dict[str, Any]) -> Iterator[str]:
    """A line for each type of object in an output, the outermost first."""
    # pydantic puts the objects inside an output under `$defs`, and the output itself, if it is an object, at the top.
    outermost = {schema["title"]: schema} if "properties" in schema else {}
    for name, definition in {**outermost, **schema.get("$defs", {})}.items():
        if "properties" in definition:
            fields = ", ".join(f"`{field}` {_kind(value)}" for field, value in definition["properties"].items())
            yield f"- {name}: {fields}{'' if definition.get('additionalProperties') is False else ', and more'}"


def _kind(schema: dict[str, Any]) -> str:
    """The type of a JSON schema in a few words, such as `list of string` or `number or null`."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return name if name != "JsonValue" else "any"
    if "anyOf" in schema:
        return " or ".join(_kind(option) for option in schema["anyOf"])
    if "enum" in schema:
        return " / ".join(f'"{value}"' for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema['items'])}"
    if schema.get("type") == "object" and "properties" not in schema:
        values = schema.get("additionalProperties")
        return f"object of {_kind(values)}" if isinstance(values, dict) else "object"
    return schema["title"] if "properties" in schema else str(schema.get("type", "any"))
