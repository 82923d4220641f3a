"""`nautile store …`: check it, free space, send and fetch, rebuild and export the catalog."""

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.terminal import Json, show_as, the_store

store_app = typer.Typer(no_args_is_help=True, help="Look after the store: check, free space, mirror, rebuild, export.")

IdArgument = Annotated[
    str, typer.Argument(metavar="ID", help="kind/digits, or as many digits of the key as are unique")
]


@store_app.command()
def verify(
    artifact: Annotated[str | None, typer.Argument(metavar="[ID]", help="one artifact; all if none is named")] = None,
    local: Annotated[bool, typer.Option("--local", help="leave out what lies at the remote")] = False,
    as_json: Json = False,
) -> None:
    """Read every byte, at the remote too, and compare it with its digest. Exit code 2 if anything is damaged."""
    from flows.cli import inspect as inspection
    from flows.cli.tables import verify_table

    found = inspection.verify(the_store(), artifact, remote=not local)
    show_as(found, as_json, verify_table)
    if found["damaged"]:
        raise typer.Exit(2)


@store_app.command()
def rebuild(as_json: Json = False) -> None:
    """Empty the catalog and fill it from manifests and event files, those of the remote too."""
    from flows.cli.tables import count_table
    from store.catalog import Catalog

    store = the_store()
    store.refresh(events=True)
    show_as(Catalog(store).rebuild(), as_json, count_table)


@store_app.command()
def gc(
    days: Annotated[float, typer.Option(help="how long unfinished work may lie untouched before it goes")] = 7.0,
    config: Annotated[
        str | None, typer.Option("--config", metavar="CONFIG", help="take the rules of its [retention]")
    ] = None,
    keep_newest: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="retire all but the latest N of each stage and use")
    ] = None,
    keep_days: Annotated[
        float | None, typer.Option(min=0.0, metavar="DAYS", help="retire what is older, unless it is among those")
    ] = None,
    keep_kind: Annotated[list[str] | None, typer.Option(metavar="KIND", help="never retire this kind")] = None,
    pin: Annotated[list[str] | None, typer.Option(metavar="ID", help="never retire this artifact")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what would go")] = False,
    as_json: Json = False,
) -> None:
    """Remove what nothing rests on: replaced artifacts, stale work, and what the rules retire, at the remote too.

    Without --keep-newest, --keep-days or a [retention] with them, no live artifact goes. What a kept one was made from
    never goes.
    """
    from configs.operation import RetentionConfig
    from flows.cli import inspect as inspection
    from flows.cli.tables import garbage_table

    rules = RetentionConfig()
    if config is not None:
        from configs.load import load

        rules = load(config).retention
    rules = RetentionConfig(
        newest=rules.newest if keep_newest is None else keep_newest,
        days=rules.days if keep_days is None else keep_days,
        kinds=(*rules.kinds, *(keep_kind or ())),
        pins=(*rules.pins, *(pin or ())),
    )
    rows = inspection.garbage(the_store(), days, dry_run, rules)
    show_as(rows, as_json, lambda found: garbage_table(found, dry_run))


@store_app.command()
def push(
    artifact: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="send all files of this one again, which mends the remote")
    ] = None,
    as_json: Json = False,
) -> None:
    """Send to the remote what it lacks. Runs do this by themselves; this is for what a dead machine left."""
    from flows.cli import inspect as inspection
    from flows.cli.tables import artifact_table

    show_as(inspection.push(the_store(), artifact), as_json, artifact_table)


@store_app.command()
def fetch(artifact: IdArgument, as_json: Json = False) -> None:
    """Bring the files of an artifact here from the remote, verified; also mends a damaged copy."""
    from flows.cli import inspect as inspection
    from flows.cli.tables import artifact_table

    show_as([inspection.fetch(the_store(), artifact)], as_json, artifact_table)


@store_app.command()
def export(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="one of the catalog's, or all")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="a Parquet file; with all: a folder for one of each")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace what is there")] = False,
    as_json: Json = False,
) -> None:
    """Write a table of the catalog to a Parquet file, or all of them."""
    from flows.cli import inspect as inspection
    from flows.cli.tables import count_table

    show_as(inspection.export(the_store(), table, out, overwrite), as_json, count_table)
