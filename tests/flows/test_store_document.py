"""docs/store.md: each of its queries is asked of a store that the toy chain was run in, with two failures added."""

import re
import shutil
import uuid
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nautile.flows.cli import inspect
from nautile.flows.cli.main import app
from nautile.store.artifacts import Store
from nautile.store.events import EventWriter
from nautile.store.manifest import now
from tests.support.samples.stage_store import filled

TEXT = (Path(__file__).parents[2] / "docs" / "store.md").read_text(encoding="utf-8")
QUERIES = re.findall(r"\*\*(\d+)\. ([^*]+)\*\*\n\n```sql\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture(scope="module")
def store(made, tmp_path_factory):
    """The made store, with a plan, an attempt that failed and an artifact that was made again."""
    store = Store(shutil.copytree(made[0].root, tmp_path_factory.mktemp("asked") / "store"))
    row = {"run": "toy", "stage": "align", "label": "align", "reused": False, "seconds": 1.0, "started": now()}
    write = EventWriter(store.root / "events" / "failed.jsonl", execution="")
    write("run", **row | {"id": uuid.uuid4().hex, "state": "failed", "attempt": 1, "exit_code": 2, "error": "no judge"})
    steps = [{"label": label, "after": []} for label in made[1]]
    write("plan", id="toy-1", run="toy", config="toy", state="failed", steps=steps, started=now())
    old = store.list("evaluation")[0]
    again = filled(store.root / "staging" / "again", {"scores.json": "{}"})
    fields = {name: old.manifest[name] for name in ("stage", "version", "config", "facts", "label")}
    inputs = {name: store.get(full_id) for name, full_id in old.manifest["inputs"].items()}
    store.publish("evaluation", old.key, again, inputs=inputs, supersede=True, **fields)
    return store


def answer(store, query):
    """The rows of a query of the page, with ids of this store in place of the page's."""
    for kind in ("evaluation", "tokens"):
        newest = [artifact for artifact in store.list(kind)][-1].id
        query = query.replace(f"{kind}/0123456789ab", newest)
    columns, rows = inspect.sql(store, query)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def test_there_are_ten():
    assert [int(number) for number, _, _ in QUERIES] == list(range(1, 11))
    assert TEXT.count("```sql") == 10


@pytest.mark.parametrize(("number", "question", "query"), QUERIES, ids=[number for number, _, _ in QUERIES])
def test_each_question_has_an_answer(store, number, question, query):
    rows = answer(store, query)
    assert rows, question
    if number != "4":
        empty = {name for name in rows[0] if all(row[name] is None for row in rows)}
        assert empty <= {"host", "commit"}, question


def test_what_the_answers_say(store, made):
    answers = {int(number): answer(store, query) for number, _, query in QUERIES}
    ids = made[1]
    assert {row["label"] for row in answers[1]} == {label for label in ids if label.startswith("evaluate")}
    assert ids["distill"]["tokens"] in {row["artifact"] for row in answers[2]}
    assert [(row["purpose"], row["calls"], row["dollars"]) for row in answers[3]] == [("teacher", 2, 0.02)]
    assert next(row for row in answers[4] if row["label"] == "align")["state"] in ("done", "failed")
    assert [row["why"] for row in answers[5]] == ["no judge"]
    assert [(row["endpoint"], row["attempts"], row["failed"], row["median_s"]) for row in answers[6]] == [
        ("local", 2, 0, 0.5)
    ]
    assert [row["step"] for row in answers[7]] == list(range(2, 21, 2))
    assert answers[8][0]["reward"] == 1.0
    assert {row["kind"] for row in answers[9]} == {artifact.kind for artifact in store.list()}
    below = {row["id"].partition("/")[0] for row in answers[10]}
    assert below >= {"tokens", "checkpoint", "evaluation", "report"}


@pytest.mark.parametrize(
    "line", sorted({line.strip() for line in TEXT.splitlines() if re.match(r" +nautile store", line)})
)
def test_the_page_names_commands_and_options_that_there_are(line):
    words = line.partition("#")[0].split()
    output = CliRunner().invoke(app, [words[1], words[2], "--help"], env={"COLUMNS": "200"}).output
    assert "Usage" in output
    for option in (word for word in words if word.startswith("--")):
        assert option in output
