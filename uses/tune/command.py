"""`nautile tune`: fine-tune a checkpoint of the store on labelled rows, as a single step, and print its scores."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from nautile.common.commands import config_words
from nautile.common.errors import ConfigError
from nautile.common.files import read_json
from nautile.flows.cli.terminal import Json, SetOption, show_as, the_store

if TYPE_CHECKING:
    from rich.console import RenderableType

    from nautile.store.artifacts import Store
    from nautile.uses.labelled.config import TuneRun


def tune(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A TOML file with the table [tune]; other tables are ignored.")
    ],
    force: Annotated[bool, typer.Option("--force", help="Tune again; the old artifacts are kept.")] = False,
    settings: SetOption = None,
    as_json: Json = False,
) -> None:
    """Fine-tune a checkpoint on labelled rows, and compare it with baselines trained on the same rows."""
    from nautile.configs.load import load_part
    from nautile.uses.labelled.config import TuneRun

    section = load_part(config, TuneRun, settings)
    command = f"nautile tune {config_words(config, settings)}" + " --force" * force
    result = run_tune(the_store(), section, command, force, as_json)
    show_as(result, as_json, tuning_view)


def run_tune(store: "Store", run: "TuneRun", command: str, force: bool, as_json: bool) -> dict[str, Any]:
    """Tune, or reuse an equal tuning; returns the ids of the artifacts, and the report. Raises like `run_step`."""
    from nautile.flows.dag import checkpoint_named
    from nautile.uses.step import run_step
    from nautile.uses.tune.stage import tune as stage

    config = run.tune
    try:
        checkpoint = checkpoint_named(store, config.start or "newest", own_labels=("tune",))
    except ConfigError as error:
        raise ConfigError(f"tune.start: {error}") from None
    inputs = {"checkpoint": checkpoint.id}
    # The section that goes into the key has the full id, not the word "newest" that the operator wrote: otherwise a new
    # checkpoint would not make a new tuning.
    update: dict[str, Any] = {"start": checkpoint.full_id}
    if config.data.reader == "labels":
        labels = store.get(config.data.path)
        inputs["labels"] = labels.id
        update["data"] = config.data.model_copy(update={"path": labels.full_id})
    section = {"tune": config.model_copy(update=update).model_dump(mode="json")}
    artifacts = run_step(stage, section, inputs, store, command=command, force=force, as_json=as_json)
    report = read_json(artifacts["tuning"].path / "tuning.json") or {}
    ids = {kind: artifacts[kind].id for kind in ("checkpoint", "tuning")}
    return {**ids, "start": checkpoint.id, "report": report}


def tuning_view(result: dict[str, Any]) -> "RenderableType":
    """The number of rows used and left out, the table of scores, the leads, and the ids of the artifacts."""
    from rich.console import Group
    from rich.text import Text

    from nautile.flows.render import query_table
    from nautile.uses.labelled.scores import arm_rows, recall_rows

    report = result["report"]
    columns, rows = arm_rows(report)
    counts, data = report["rows"], report["data"]
    lines = [
        f"{counts['train']:,} rows for training, {counts['validation']:,} for calibration, {counts['test']:,} for "
        f"testing; left out: {data['duplicates']:,} duplicates and {data['contradictory']:,} rows with several labels"
        if not report.get("multi_label")
        else f"{counts['train']:,} rows for training, {counts['validation']:,} for calibration, {counts['test']:,} for "
        f"testing; copies put together: {data['duplicates']:,}"
    ]
    if data["leaked"]:
        shared = ", ".join(f"{count:,} with {name}" for name, count in data["leaked"].items())
        lines.append(f"left out because two splits had them: {shared}")
    lines += [
        f"{100 * lead['lead']:+.1f} points [{100 * lead['low']:+.1f}, {100 * lead['high']:+.1f}] over {lead['over']}, "
        f"p = {lead['p']:.2g}"
        for lead in report.get("leads", [])
    ]
    lines += [
        f"{label}: {right} of {rows} test rows are given this label, recall {recall} %; {given} are given it in all, "
        f"precision {precision} %"
        for label, rows, right, recall, given, precision in recall_rows(report)
    ]
    lines += [*data["found"], *report["notes"]]
    ending = f"{result['checkpoint']}: the tuned model; {result['tuning']}: its scores and card.md"
    return Group(query_table(columns, rows), *map(Text, lines), Text(ending))
