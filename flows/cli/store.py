"""`nautile store ...`: verify, free space, add a checkpoint, mirror, rebuild and export the catalog."""

from pathlib import Path
from typing import Annotated

import typer

from nautile.common.processes import ExitCode
from nautile.flows.cli.terminal import ConfigArgument, IdArgument, Json, SetOption, show_as, the_store

store_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Maintain the store: verify, add, free space, mirror, rebuild the catalog, export its tables.",
)


@store_app.command()
def verify(
    artifact: Annotated[str | None, typer.Argument(metavar="ID", help="One artifact. Default: all of them.")] = None,
    local: Annotated[bool, typer.Option("--local", help="Do not check the remote copies.")] = False,
    as_json: Json = False,
) -> None:
    """Compare every file with its recorded digest. Exit code 2 if a file is damaged."""
    from nautile.flows.cli import inspect
    from nautile.flows.cli.tables import verify_table

    result = inspect.verify(the_store(), artifact, remote=not local)
    show_as(result, as_json, verify_table)
    if result["damaged"]:
        # The same code as for other things that an operator must mend, so that a nightly script notices.
        raise typer.Exit(ExitCode.BAD_INPUT)


@store_app.command()
def rebuild(as_json: Json = False) -> None:
    """Rebuild the catalog from the manifests and event files, including remote ones."""
    from nautile.flows.cli.tables import count_table
    from nautile.store.catalog import Catalog

    store = the_store()
    store.refresh(events=True)
    show_as(Catalog(store).rebuild(), as_json, count_table)


@store_app.command()
def gc(
    days: Annotated[float, typer.Option(help="Remove unfinished work that is unchanged for this many days.")] = 7.0,
    config: Annotated[
        str | None,
        typer.Option("--config", metavar="CONFIG", help="Apply this configuration's retention rules."),
    ] = None,
    keep_newest: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Remove all but the newest N artifacts of each step."),
    ] = None,
    keep_days: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="DAYS", help="Remove older artifacts, except those kept by --keep-newest."),
    ] = None,
    keep_kind: Annotated[
        list[str] | None, typer.Option(metavar="KIND", help="Never remove artifacts of this kind. Repeatable.")
    ] = None,
    pin: Annotated[list[str] | None, typer.Option(metavar="ID", help="Never remove this artifact. Repeatable.")] = None,
    unfinished: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY", help="Remove this unfinished work, including its checkpoints and replies. Repeatable."
        ),
    ] = None,
    replies: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL", help="Remove the stored replies of this endpoint model. Repeatable."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be removed.")] = False,
    as_json: Json = False,
) -> None:
    """Remove files that are not needed: replaced artifacts, old unfinished work, and expired artifacts.

    Remote copies are removed as well.
    Without --keep-newest, --keep-days or retention rules that set them, no current artifact expires.
    Artifacts that a kept artifact was made from are always kept. Unfinished work with checkpoints, replies or open
    batch jobs is kept until --unfinished names it (`nautile reconcile` lists it). Paid replies are kept until
    --replies names their model.
    """
    from nautile.configs.operation import RetentionConfig
    from nautile.flows.cli import inspect
    from nautile.flows.cli.tables import garbage_table

    rules = RetentionConfig()
    if config is not None:
        from nautile.configs.load import load

        rules = load(config).retention
    # An option adds to the configuration's kinds and pins: what that protects stays protected.
    rules = RetentionConfig(
        newest=rules.newest if keep_newest is None else keep_newest,
        days=rules.days if keep_days is None else keep_days,
        kinds=(*rules.kinds, *(keep_kind or ())),
        pins=(*rules.pins, *(pin or ())),
    )
    rows = inspect.garbage(the_store(), days, dry_run, rules, unfinished or (), replies or ())
    show_as(rows, as_json, lambda rows: garbage_table(rows, dry_run))


@store_app.command()
def add(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="The folder of a checkpoint (`nautile import`) or of an ONNX export."),
    ],
    kind: Annotated[str, typer.Option(metavar="KIND", help="checkpoint or export.")] = "checkpoint",
    as_json: Json = False,
) -> None:
    """Add a checkpoint or an export that was made elsewhere to the store, as an artifact with a manifest."""
    from nautile.flows.cli import inspect
    from nautile.flows.cli.tables import artifact_table
    from nautile.flows.named import add_model

    show_as([inspect.row_of(add_model(the_store(), folder, kind))], as_json, artifact_table)


@store_app.command()
def snapshot(
    config: ConfigArgument,
    step: Annotated[int | None, typer.Option(metavar="N", help="A saved step. Default: the newest.")] = None,
    settings: SetOption = None,
    as_json: Json = False,
) -> None:
    """Publish a saved step of an unfinished pretraining as a checkpoint: to chat while it trains, or to branch from."""
    from nautile.configs.load import load
    from nautile.flows.cli import inspect
    from nautile.flows.cli.tables import artifact_table

    artifact = inspect.publish_snapshot(the_store(), load(config, settings), config, step)
    show_as([inspect.row_of(artifact)], as_json, artifact_table)


@store_app.command()
def push(
    artifact: Annotated[
        str | None,
        typer.Argument(metavar="ID", help="Send all files of this artifact again, which repairs its remote copy."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Send missing artifacts to the remote. Runs do this automatically; use it after a machine has crashed."""
    from nautile.flows.cli import inspect
    from nautile.flows.cli.tables import artifact_table

    show_as(inspect.push(the_store(), artifact), as_json, artifact_table)


@store_app.command()
def fetch(artifact: IdArgument, as_json: Json = False) -> None:
    """Download an artifact's files from the remote and verify them. Also repairs a damaged local copy."""
    from nautile.flows.cli import inspect
    from nautile.flows.cli.tables import artifact_table

    show_as([inspect.fetch(the_store(), artifact)], as_json, artifact_table)


@store_app.command()
def export(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="A table or view of the catalog, or all.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A Parquet file; with all: a folder of such files.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
    as_json: Json = False,
) -> None:
    """Write one table or view of the catalog, or all of them, as Parquet."""
    from nautile.flows.cli import inspect
    from nautile.flows.cli.tables import count_table

    show_as(inspect.export(the_store(), table, out, overwrite), as_json, count_table)
