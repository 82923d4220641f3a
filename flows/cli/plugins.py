"""`nautile plugins`: the parts from outside that this installation has, and what is wrong with them."""

from typing import Any

import typer

from nautile.flows.cli.terminal import Json, console_for, show_as

NONE = (
    "no plug-ins: a package adds one by an entry point of a group nautile.stages, .vendors, .readers, .benchmarks or "
    ".rewards, and a module on the path by NAUTILE_PLUGINS=REGISTRY=module:attribute,... (examples/README.md)"
)


def plugins(as_json: Json = False) -> None:
    """List the plug-ins: stages, vendors, readers, benchmarks, rewards from outside. Exit code 2 if one is broken."""
    from rich.table import Table

    found = listed()
    if not found and not as_json:
        console_for().print(NONE, soft_wrap=True)
        return

    def table(rows: list[dict[str, Any]]) -> Table:
        shown = Table("registry", "name", "reference", "origin", "version", box=None)
        for row in rows:
            shown.add_row(*(str(row[name]) for name in ("registry", "name", "reference", "origin")), row["version"])
        return shown

    show_as(found, as_json, table)
    broken = [row for row in found if row["fault"]]
    for row in broken:
        console_for(stderr=True).print(row["fault"], style="red", soft_wrap=True)
    if broken:
        raise typer.Exit(2)


def listed() -> list[dict[str, Any]]:
    """The plug-ins in the order of their registries, each with its version and what is wrong with it."""
    import nautile.flows.dag  # noqa: F401  (imports all registries)
    from nautile.common.errors import ConfigError
    from nautile.configs.plugins import known_plug_ins, version_of

    rows = []
    for plug_in in known_plug_ins():
        version = fault = ""
        try:
            version = str(version_of(plug_in))
        except ConfigError as error:
            fault = str(error)
        row = {name: getattr(plug_in, name) for name in ("registry", "name", "reference", "origin")}
        rows.append(row | {"version": version, "fault": fault})
    return rows
