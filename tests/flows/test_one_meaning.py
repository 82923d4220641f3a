"""The time of a run and its gain are the same in `nautile runs`, `nautile status`, the dashboard and the report."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from nautile.common.files import read_json
from nautile.common.text import duration
from nautile.store.catalog import Catalog
from nautile.store.events import EventWriter
from nautile.store.manifest import host
from nautile.tasks.engine.attempt_log import write_attempt_row, write_row
from nautile.tasks.report import opening
from nautile.tasks.reporting.data import Input, collect
from nautile.tasks.reporting.render import Paragraph
from tests.support.pages.parts import shown_page
from tests.support.samples.stage_store import key_of, published

BEGUN = datetime(2026, 11, 22, 12, tzinfo=UTC)
LABELS = ("pretrain", "evaluate:pretrain", "align", "evaluate:align")
SHARES = {"evaluate:pretrain": 0.25, "evaluate:align": 0.5}


def at(minutes):
    return (BEGUN + timedelta(minutes=minutes)).isoformat()


def evaluation(store, made, label, share):
    """An evaluation of 20 problems, in the form of those that the toy chain makes."""
    folder = made[0].get(made[1]["evaluate:pretrain"]["evaluation"]).path
    scores = read_json(folder / "scores.json")
    scores["benchmarks"]["held_out"] |= {"accuracy": share, "correct": round(20 * share)}
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    lines = [json.dumps(row | {"strict": row["index"] < 20 * share}) + "\n" for row in rows]
    files = {"scores.json": json.dumps(scores), "rows.jsonl": "".join(lines)}
    execution = f"e-{label.partition(':')[2]}"
    fields = {"execution": execution, "stage": "evaluate", "label": label, "facts": {"samples": 20, "left_out": 0}}
    artifact = published(store, "evaluation", label, files, **fields)
    emit = EventWriter(store.root / "events" / f"{execution}.jsonl", execution, stage="evaluate")
    emit("metric", name="evaluate/held_out/accuracy", step=0, value=share)
    emit.close()
    return artifact


@pytest.fixture
def inputs(store, made):
    """The evaluations of a run that was killed after pretraining and started again 50 minutes later."""
    steps = [{"label": label, "stage": label.partition(":")[0], "key": key_of(label), "after": []} for label in LABELS]
    row = {"run": "r1", "config": "toy", "name": "twice", "steps": steps, "host": host(), "resume": ""}
    write_row(store, "plan", row | {"id": "1", "state": "interrupted", "started": at(0), "ended": at(10)})
    write_row(store, "plan", row | {"id": "2", "state": "done", "started": at(60), "ended": at(90)})
    made_here = {label: evaluation(store, made, label, share) for label, share in SHARES.items()}
    for minutes, label in zip((1, 62, 64, 66), LABELS, strict=True):
        artifact = made_here.get(label)
        attempt = {"run": "r1", "id": f"r1-{label}", "stage": label.partition(":")[0], "label": label, "attempt": 1}
        attempt |= {"key": key_of(label), "execution": artifact.execution if artifact else f"x-{label}"}
        attempt |= {"outputs": {"evaluation": artifact.id} if artifact else {}, "state": "done", "host": host()}
        attempt |= {"started": at(minutes), "ended": at(minutes + 1), "seconds": 60.0}
        write_attempt_row(store, attempt)
    Catalog(store).ingest()
    return [Input(label, artifact) for label, artifact in made_here.items()]


@pytest.mark.slow
def test_one_run_has_one_time_and_one_gain_everywhere(store, inputs, command_line, monkeypatch):
    monkeypatch.setenv("NAUTILE_STORE", str(store.root))
    (listed,) = json.loads(command_line("runs", "--json")[1])
    shown = json.loads(command_line("status", "twice", "--json")[1])[0]["run"]
    gain = {"after": "align", "benchmark": "held_out", "accuracy": 0.5, "over": "pretrain", "gain": 0.25}
    assert (listed["seconds"], listed["score"]) == (shown["seconds"], shown["score"]) == (90 * 60.0, gain)
    assert "+25.0 points over pretrain" in command_line("status", "twice")[1]

    page = shown_page(store, "overview", monkeypatch)
    figures = {metric.label: (metric.value, metric.delta) for metric in page.metric}
    assert figures["time"][0] == duration(90 * 60.0)
    assert figures["score, after align"] == ("50.0 %", "+25.0 points over pretrain")
    table = next(table.value for table in page.dataframe if "show" in table.value)
    assert (list(table["minutes"]), list(table["gain"])) == ([90.0], [25.0])

    data = collect(store, inputs, 1)
    assert (data["cost"]["run_seconds"], data["cost"]["run_ended"]) == (90 * 60.0, True)
    (align,) = [entry for entry in data["ladder"]["stages"] if entry["stage"] == "align"]
    assert (align["over"], align["test"]["lead"]) == ("pretrain", 0.25)
    texts = [block.text for section in opening(data) for block in section.blocks if isinstance(block, Paragraph)]
    assert any(f"{duration(90 * 60.0)} from the run's first start to its end" in text for text in texts)
