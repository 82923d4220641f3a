"""`nautile tune`: from a checkpoint of the store to a tuned one, reused the second time, and bad input."""

import json

import pytest

from nautile.data.label_set import read_label_set
from nautile.store.artifacts import Store
from tests.support.samples.labelled import labelled_records, write_checkpoint, write_records
from tests.support.samples.stage_store import published

CONFIG = """
[tune]
data = "rows.jsonl"
longest = 12
shots = [2, 0]
seeds = 2
baselines = ["majority"]
"""


@pytest.fixture
def nautile(tmp_path, monkeypatch, command_line):
    """Run a command in a folder with the configuration and its rows; exit code, standard output, standard error."""
    (tmp_path / "tune.toml").write_text(CONFIG)
    write_records(tmp_path / "rows.jsonl", labelled_records(60))
    (tmp_path / "once.csv").write_text("text,label\n1,a\n2,a\n3,b\n4,b\n5,c\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NAUTILE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("COLUMNS", "200")

    return command_line


@pytest.fixture
def start(tmp_path):
    """A store with a checkpoint in it."""
    store = Store(tmp_path / "store")
    store.prepare()
    folder = write_checkpoint(store.staging("a" * 64))
    made = {"stage": "toy", "version": 1, "config": {}, "inputs": {}, "facts": {}, "label": "toy"}
    return store.publish("checkpoint", "a" * 64, folder, **made)


@pytest.mark.heavy
def test_a_checkpoint_is_tuned_once_and_has_its_card_and_lineage(nautile, start, tmp_path):
    code, out, err = nautile("tune", "tune.toml")
    assert code == 0, err
    assert "this model: head on the frozen model" in out
    assert "points" in out
    code, out, _ = nautile("tune", "tune.toml", "--json")
    result = json.loads(out)
    store = Store(tmp_path / "store")
    tuned = store.get(result["checkpoint"])
    assert read_label_set(tuned.path).labels == ("animal", "plant")
    assert "TF-IDF" not in (store.get(result["tuning"]).path / "card.md").read_text()
    assert tuned.manifest["inputs"]["checkpoint"].startswith(start.id)
    assert tuned.manifest["facts"]["method"] == "head"
    assert len(store.list("checkpoint")) == 2  # the second command reused the first's


@pytest.mark.heavy
def test_labels_of_a_teacher_are_learnt_from_by_their_id(nautile, start, tmp_path):
    rows = "".join(json.dumps({**row, "request": "0" * 64}) + "\n" for row in labelled_records(60))
    labels = published(Store(tmp_path / "store"), "labels", "labels", {"labels.jsonl": rows})
    code, out, err = nautile("tune", "tune.toml", "--json", "--set", f"tune.data={labels.id}", "--set", "tune.seeds=1")
    assert code == 0, err
    made = Store(tmp_path / "store").get(json.loads(out)["tuning"])
    assert made.manifest["inputs"]["labels"] == labels.full_id
    code, _, err = nautile("tune", "tune.toml", "--set", "tune.data=labels/0123456789ab")
    assert (code, "no artifact 'labels/0123456789ab'" in err) == (2, True), err


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("tune.shot=[1]", "unknown key `tune.shot`"),
        ("tune.data=none.csv", "none.csv"),
        ("tune.data=OWNER/NAME", "needs as `revision` a full commit hash"),
        ("tune.form=chat", "'head' is for labels; form 'chat' needs 'full' or 'lora'"),
        ("tune.start=checkpoint/0123", "tune.start: "),
        pytest.param("tune.data=once.csv", "1 label(s) occur once, such as 'c' in row 5", marks=pytest.mark.slow),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(nautile, start, setting, message):
    code, out, err = nautile("tune", "tune.toml", "--set", setting)
    assert (code, len(err.strip().splitlines())) == (2, 1)
    assert message in err
    assert message not in out


def test_a_store_without_a_checkpoint(nautile):
    code, _, err = nautile("tune", "tune.toml")
    assert code == 2
    assert "tune.start: no checkpoint, other than of tune" in err
