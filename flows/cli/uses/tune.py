"""`nautile tune`: fine-tune a checkpoint of the store on labelled rows, as a step by itself, and print its scores."""

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from common.errors import ConfigError
from common.files import read_json
from configs.tune import TuneRun
from evals.labelling.titles import arm_rows
from flows.cli.tables import query_table
from flows.cli.uses.step import run_step
from flows.starts import checkpoint_named
from store.artifacts import Store
from tasks.tune import tune


def run_tune(store: Store, run: TuneRun, command: str, force: bool, as_json: bool) -> dict[str, Any]:
    """Tune, or reuse what the same section made; the ids of what was made, and the report.

    Raises as `run_step`.
    """
    config = run.tune
    try:
        checkpoint = checkpoint_named(store, config.start or "newest", made_here=("tune",))
    except ConfigError as error:
        raise ConfigError(f"tune.start: {error}") from None
    inputs = {"checkpoint": checkpoint.id}
    update: dict[str, Any] = {"start": checkpoint.full_id}
    if config.data.reader == "labels":
        labels = store.get(config.data.path)
        inputs["labels"] = labels.id
        update["data"] = config.data.model_copy(update={"path": labels.full_id})
    section = {"tune": config.model_copy(update=update).model_dump(mode="json")}
    made = run_step(tune, section, inputs, store, command=command, force=force, as_json=as_json)
    report = read_json(made["tuning"].path / "tuning.json") or {}
    return {"checkpoint": made["checkpoint"].id, "tuning": made["tuning"].id, "start": checkpoint.id, "report": report}


def tuning_view(result: dict[str, Any]) -> RenderableType:
    """The table of the scores with what was left out, the leads, and the commands that come next."""
    report = result["report"]
    columns, rows = arm_rows(report)
    counts, data = report["rows"], report["data"]
    lines = [
        f"{counts['train']:,} rows to learn from, {counts['validation']:,} for calibration, {counts['test']:,} to test "
        f"on; {data['duplicates']:,} copies and {data['contradictory']:,} rows with several labels left out"
    ]
    if data["leaked"]:
        shared = ", ".join(f"{count:,} with {name}" for name, count in data["leaked"].items())
        lines.append(f"left out because two splits had them: {shared}")
    lines += [
        f"{100 * lead['lead']:+.1f} points [{100 * lead['low']:+.1f}, {100 * lead['high']:+.1f}] over {lead['over']}, "
        f"p = {lead['p']:.2g}"
        for lead in report.get("leads", [])
    ]
    lines += report["notes"]
    ending = f"{result['checkpoint']}: the tuned model; {result['tuning']}: its scores and card.md"
    return Group(query_table(columns, rows), *map(Text, lines), Text(ending))
