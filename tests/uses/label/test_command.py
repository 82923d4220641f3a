"""`nautile distill --label`: paid for once, its agreement first, and bad input."""

import json

import pytest

from nautile.store.artifacts import Store
from tests.support.servers.fake_openai import FakeOpenAI

GOLD = [("a fine day", "good"), ("a poor day", "bad"), ("a fine meal", "good"), ("a poor meal", "bad")]
TEXTS = ["a fine walk", "a poor walk", "no answer", "a fine book", "a poor book", "a fine day"]
CONFIG = """
[label]
data = "texts.jsonl"
gold = "gold.csv"
labels = ["good", "bad"]
teacher = "t"

[endpoints.t]
kind = "openai"
model = "fake"
url = "{url}"
concurrency = 1
dollars_per_million_out = 1000.0
"""


def answer(body):
    text = body["messages"][-1]["content"]
    return "I would rather not." if "no answer" in text else json.dumps({"label": "good" if "fine" in text else "bad"})


@pytest.fixture
def nautile(tmp_path, monkeypatch, command_line):
    """Run a command in a folder with the two files; returns exit code, standard output, standard error."""
    (tmp_path / "gold.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in GOLD))
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NAUTILE_STORE", str(tmp_path / "store"))

    return command_line


@pytest.mark.heavy
def test_texts_are_labelled_once_and_paid_for_once(nautile, tmp_path):
    with FakeOpenAI(answer, per_million=(0.0, 1000.0)) as server:
        (tmp_path / "label.toml").write_text(CONFIG.format(url=server.url))
        for more in ((), ("--force",)):
            code, out, err = nautile("distill", "label.toml", "--label", "--json", *more)
            assert code == 0, err
            # The five texts that are not among the gold rows, and no more.
            assert server.answered == len(GOLD) + 5
    facts = json.loads(out)
    assert (facts["labelled"], facts["rejected"], facts["in_gold"]) == (4, {"unparsable": 1}, 1)
    assert facts["agreement"]["kappa"]["value"] == 1
    artifact = Store(tmp_path / "store").list("labels")[-1]
    rows = [json.loads(line) for line in (artifact.path / "labels.jsonl").read_text().splitlines()]
    assert [(row["text"], row["label"]) for row in rows] == [
        (text, "good" if "fine" in text else "bad") for text in TEXTS if text not in ("no answer", GOLD[0][0])
    ]
    assert "Cohen's kappa 1.00" in (artifact.path / "card.md").read_text()


@pytest.mark.slow
def test_a_teacher_that_disagrees_with_people_labels_nothing(nautile, tmp_path):
    with FakeOpenAI(lambda body: "bad") as server:
        (tmp_path / "label.toml").write_text(CONFIG.format(url=server.url))
        code, _, err = nautile("distill", "label.toml", "--label", "--set", "label.least_kappa=0.4")
    assert code == 2
    assert "agrees with people by a kappa of 0.00 [0.00, 0.00], so no text is labelled" in err
    assert server.answered == len(GOLD)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "label.gold=missing.csv"], "missing.csv"),
        (
            ["--set", "label.labels=['good', 'fair']"],
            "labelled data 'gold.csv': row 2 has the label 'bad', which is not in label.labels",
        ),
        (["--set", "label.datum=1"], "unknown key `label.datum`"),
        (["--set", "labels=1"], "unknown key `labels`"),
    ],
    ids=["no file", "a label that is not asked about", "unknown key", "unknown table"],
)
def test_bad_input_is_a_message(nautile, tmp_path, words, message):
    (tmp_path / "label.toml").write_text(CONFIG.format(url="http://127.0.0.1:9/v1"))
    code, out, err = nautile("distill", "label.toml", "--label", *words)
    assert (code, message in err) == (2, True), err
    assert out == ""  # no step has begun


def test_without_label_the_command_names_the_other(nautile):
    assert "nautile run local --only distill" in nautile("distill", "local")[2]
