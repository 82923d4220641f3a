"""Extraction as a stage: documents that meet the schema, refusals by reason, a run that was killed, the command."""

import json

import jsonschema
import pytest

from nautile.common.errors import ConfigError
from nautile.common.events import silent
from nautile.configs.keys import with_local_files
from nautile.data.table import read_table
from nautile.model.decoding.engine import Engine
from nautile.tasks.engine.job import Job
from nautile.uses.extract import stage
from nautile.uses.extract.stage import ROWS, Extractor, extract
from nautile.uses.labelled.config import ExtractConfig
from tests.flows.cli.test_chat import nautile  # noqa: F401 - a fixture
from tests.support.processes.serving import save_checkpoint

SCHEMA = {
    "type": "object",
    "properties": {"pet": {"enum": ["cat", "dog"], "x-span": True}, "sure": {"type": "boolean"}},
    "required": ["pet", "sure"],
    "additionalProperties": False,
}
TEXTS = ["a cat", "a dog", "", "cat and dog", "no pet", "x" * 100, "dog, cat", "dog dog"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("model") / "checkpoint")


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(TEXTS)))
    return path


def job(checkpoint, table, staging, emit=silent, **changes):
    config = ExtractConfig(
        texts={"reader": "jsonl", "path": str(table)}, json_schema=json.dumps(SCHEMA), instructions="pets",
        temperature=2.0, slots=4, **changes,
    )  # fmt: skip
    section = with_local_files({"extract": config.model_dump(mode="json")})
    return Job("extract", "k" * 64, "e", section, {"checkpoint": checkpoint}, staging, emit)


class Killed(Exception):
    pass


@pytest.mark.slow
def test_every_row_has_a_document_that_holds_or_a_reason(checkpoint, table, tmp_path, monkeypatch):
    """And a killed run goes on where it was: no row is asked twice, and the rows are those of one that was not."""
    whole = job(checkpoint, table, tmp_path / "whole")
    extract.work(whole)
    rows = read_table(whole.output("extracted") / ROWS).rows
    assert [row["number"] for row in rows] == list(range(1, len(TEXTS) + 1))
    for row, text in zip(rows, TEXTS, strict=True):
        if row["reason"] is None:
            value = json.loads(row["json"])
            jsonschema.validate(value, SCHEMA)
            [span] = json.loads(row["spans"])
            assert text[span["start"] : span["end"]] == value["pet"]
    reasons = [row["reason"] for row in rows]
    assert (reasons[2], reasons[5]) == ("no_text", "too_long")
    assert rows[2]["cut"] is None
    assert [number for number, row in enumerate(rows) if row["cut"]] == [5]
    assert "span" in reasons  # "no pet", at least
    assert None in reasons
    summary = json.loads((whole.output("extracted") / "summary.json").read_text())
    assert summary["extracted"] + sum(summary["refused"].values()) == summary["rows"] == len(TEXTS)
    refused = [json.loads(line) for line in (whole.output("extracted") / "refused.jsonl").read_text().splitlines()]
    assert [row["number"] for row in refused] == [row["number"] for row in rows if row["reason"]]

    def kill(kind, **fields):
        if kind == "progress" and fields["done"] >= 4:
            raise Killed

    asked = []
    submit = Engine.submit
    monkeypatch.setattr(Engine, "submit", lambda self, requests: asked.extend(requests) or submit(self, requests))
    monkeypatch.setattr(stage, "WRITE_EVERY_S", 0.0)
    with pytest.raises(Killed):
        extract.work(job(checkpoint, table, tmp_path / "parts", kill))
    kept = len((tmp_path / "parts" / "scratch" / "rows.jsonl").read_text().splitlines())
    asked.clear()
    again = job(checkpoint, table, tmp_path / "parts")
    extract.work(again)
    assert len(asked) == len(TEXTS) - kept
    assert (again.output("extracted") / ROWS).read_bytes() == (whole.output("extracted") / ROWS).read_bytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 10}, "extract.max_tokens 10: the shortest reply takes"),
        ({"json_schema": '{"type": "string", "minLength": 200}'}, "the instructions leave"),
        ({"json_schema": "false"}, "allows no document"),
        ({"json_schema": '{"minimum": 5, "maximum": 3, "type": "integer"}'}, "is greater than maximum"),
    ],
)
def test_a_schema_that_cannot_be_met_is_refused_before_anything_runs(checkpoint, table, changes, message):
    config = ExtractConfig(
        **{"texts": {"reader": "jsonl", "path": str(table)}, "json_schema": json.dumps(SCHEMA), **changes},
        instructions="pets",
    )
    with pytest.raises(ConfigError, match=message):
        Extractor(checkpoint, config, json.loads(config.json_schema))


def test_a_table_that_changes_is_refused(checkpoint, table, tmp_path):
    begun = job(checkpoint, table, tmp_path / "staging")
    table.write_text('{"text": "another"}\n')
    with pytest.raises(ConfigError, match="has changed since its digest was taken"):
        extract.work(begun)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--schema", "{folder}/none.json"), "none.json: cannot be read"),
        (("--schema", "{folder}/word.json"), "word.json: not a JSON schema: type"),
        (("--schema", "{folder}/false.json"), "allows no document"),
        (("--schema", "{folder}/endless.json"), "must contain itself"),
        ((), "--schema: required"),
        (("--schema", "{folder}/any.json", "--text", "body"), "no column 'body'"),
        (("--schema", "{folder}/any.json", "--out", "{folder}/rows.xlsx"), "tables are written as"),
        (("--schema", "{folder}/any.json", "--out", "{folder}/texts.jsonl"), "is the table of texts itself"),
    ],
)
def test_bad_input_is_one_message_and_leaves_nothing(nautile, checkpoint, table, tmp_path, arguments, message):  # noqa: F811
    for name, schema in {
        "word": {"type": "word"}, "false": False, "any": {},
        "endless": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    }.items():  # fmt: skip
        (tmp_path / f"{name}.json").write_text(json.dumps(schema))
    code, out, err = nautile("store", "add", checkpoint, "--json")
    assert code == 0, err
    [added] = json.loads(out)
    code, out, err = nautile(
        "extract", added["id"], table, *(argument.format(folder=tmp_path) for argument in arguments)
    )
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not list((tmp_path / "store" / "artifacts").glob("extracted/*"))


@pytest.mark.slow
def test_the_command_writes_the_table_with_the_documents(nautile, checkpoint, table, tmp_path):  # noqa: F811
    """A folder outside of the store is refused with the command that brings it in; the second run reuses the first."""
    schema, out_file = tmp_path / "pets.json", tmp_path / "out.jsonl"
    schema.write_text(json.dumps(SCHEMA))
    options = ("--schema", schema, "--instructions", "pets", "--slots", 4, "--out", out_file, "--json")
    code, _, err = nautile("extract", checkpoint, table, *options)
    assert code == 2
    assert f"nautile store add {checkpoint}" in err
    [added] = json.loads(nautile("store", "add", checkpoint, "--json")[1])
    code, out, err = nautile("extract", added["id"], table, *options)
    assert code == 0, err
    facts = json.loads(out)
    rows = [json.loads(line) for line in out_file.read_text().splitlines()]
    assert [row["id"] for row in rows] == list(range(len(TEXTS)))
    assert sum(row["refused"] is None for row in rows) == facts["extracted"]
    assert all(row["document"]["pet"] in row["text"] for row in rows if row["refused"] is None)
    out_file.unlink()
    code, again, err = nautile("extract", added["id"], table, *options)
    assert code == 0, err
    assert json.loads(again) == facts
    assert out_file.is_file()


@pytest.mark.slow
def test_a_schema_that_fills_the_context_names_the_way_out(checkpoint, table):
    """It is the default prompt; as a constraint it holds with any."""
    wide = {**SCHEMA, "description": "what is in the text " * 20}
    config = ExtractConfig(texts={"reader": "jsonl", "path": str(table)}, json_schema=json.dumps(wide))
    with pytest.raises(ConfigError, match=r"the whole schema .* leave 0 tokens of a context of 128.* --instructions"):
        Extractor(checkpoint, config, wide)
    Extractor(checkpoint, config.model_copy(update={"instructions": "pets"}), wide)
