"""`nautile simulate` from the command line: bad input is one message before anything runs, and a survey is answered."""

import json

import pyarrow.parquet as pq
import pytest

from nautile.common.errors import ConfigError
from nautile.store.artifacts import Store
from nautile.uses.simulate.tables import NOTHING_TO_COMPARE
from tests.evals.running.conftest import checkpoint  # noqa: F401 - a fixture
from tests.flows.cli.test_chat import nautile  # noqa: F401 - a fixture

SURVEY = """
name = "parks"
title = "Parks"
persona = "I am {age}."
bands = { age = [40] }
[[questions]]
name = "more"
text = "More parks?"
options = ["no", "yes"]
"""


@pytest.fixture
def survey(tmp_path):
    path = tmp_path / "SURVEY.toml"
    path.write_text(SURVEY, encoding="utf-8")
    return path


@pytest.fixture
def people(tmp_path):
    path = tmp_path / "people.csv"
    path.write_text("age\n" + "".join(f"{age}\n" for age in range(25, 55)), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--answer", "digit"), "--answer: Input should be 'letter' or 'text'"),
        (("--by", "age,age"), "names a field twice"),
        (("--personas", "people.doc"), "--personas 'people.doc' is neither a file"),
        (("--out", "rows.csv"), "must be a .parquet file"),
        (("--training", "rows.txt"), "must be a .jsonl file"),
        (("--training", "rows.jsonl"), "has no human answers by group"),
    ],
)
def test_bad_options_are_one_message(nautile, survey, options, message):  # noqa: F811
    code, _, err = nautile("simulate", survey, "nowhere", *options)
    assert code == 2
    assert message in err
    assert not survey.with_name("store").exists()


def test_human_answers_are_written_for_tuning(nautile, tmp_path):  # noqa: F811
    path = tmp_path / "rows.jsonl"
    code, out, err = nautile("simulate", "anes96", "--training", path, "--by", "college")
    assert code == 0, err
    assert "2,360 rows of human shares" in out
    assert set(json.loads(path.read_text().splitlines()[0])) == {"prompt", "options", "shares", "source"}


@pytest.mark.heavy
def test_without_humans_there_is_uniform_alone(nautile, survey, people, checkpoint, tmp_path, monkeypatch):  # noqa: F811
    options = ("--personas", people, "--by", "age", "-n", 20, "--rows-at-once", 4, "--out", tmp_path / "rows.parquet")
    code, out, err = nautile("simulate", survey, checkpoint, *options)
    assert code == 0, err
    assert NOTHING_TO_COMPARE[:40] in out
    assert "| model | uniform |" in out
    assert "It is no poll" in out
    rows = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    assert len(rows) == 20
    assert {row["by_age"] for row in rows} == {"under 40", "40 and over"}
    code, again, err = nautile("simulate", survey, checkpoint, *options, "--json")
    assert code == 0, err
    summary = json.loads(again)
    assert summary["artifact"] in out  # the same artifact, reused
    assert summary["personas"] == 20
    assert nautile("show", summary["model"])[0] == 0  # it is called by its id
    keys = []

    def run_stage(stage, section, inputs, context):
        store = Store(context.store_root)
        keys.append(stage.key(section, {name: store.get(artifact).full_id for name, artifact in inputs.items()}))
        raise ConfigError("this is as far as it goes")

    with monkeypatch.context() as patch:
        patch.setattr("nautile.uses.step.run_stage", run_stage)
        assert nautile("simulate", survey, checkpoint, *options)[0] == 2
        people.write_text("age\n" + "30\n" * 25, encoding="utf-8")
        assert nautile("simulate", survey, checkpoint, *options)[0] == 2
    same, other = (key.startswith(summary["artifact"].partition("/")[2]) for key in keys)
    assert (same, other) == (True, False)  # the file is in the key by content
    people.write_text("year\n30\n", encoding="utf-8")
    code, _, err = nautile("simulate", survey, checkpoint, "--personas", people)
    assert code == 2
    assert "no field 'age', which the template of survey parks names; they have year" in err


def test_the_resume_command_has_the_output_file_and_force(nautile, survey, people, monkeypatch):  # noqa: F811
    """What an interrupted command was asked to write, and to make again, is done by the one that continues it."""
    commands = []

    def run_step(*_, command, **__):
        commands.append(command)
        raise ConfigError("stopped")

    monkeypatch.setattr("nautile.uses.step.run_step", run_step)
    monkeypatch.setattr("nautile.flows.named.checkpoint_id", lambda store, name: "checkpoint/1")
    out = survey.with_name("rows.parquet")
    nautile("simulate", survey, "checkpoint/1", "--personas", people, "--out", out, "--force")
    assert commands == [f"nautile simulate {survey} checkpoint/1 --personas {people} --out {out} --force"]
