"""The Python interface: what importing it changes (nothing), models, stores as data frames, runs as handles."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pydantic import BaseModel

import nautile
from nautile.flows.named import add_model
from nautile.model.decoding.scoring import continuation_logprobs
from nautile.model.weights.files import load_weights
from nautile.store.artifacts import Store
from tests.flows.cli.test_chat import checkpoint  # noqa: F401 - a fixture
from tests.flows.conftest import command_line, own_main  # noqa: F401 - fixtures
from tests.support.stages.toy_dag import TOY_DAG
from tests.support.stages.toy_stages import TOY

ROOT = Path(__file__).parents[1]

# What a process has before and after: threads, signals, handlers, filters, variables, streams.
WATCHED = """
import json, logging, os, signal, sys, threading, warnings
def state():
    signals = [str(signal.getsignal(number)) for number in signal.valid_signals()]
    loggers = [str(logging.root.handlers), logging.root.level, logging.raiseExceptions]
    streams = [id(sys.stdin), id(sys.stdout), id(sys.stderr), id(sys.excepthook)]
    return [threading.active_count(), signals, loggers, str(warnings.filters), dict(os.environ), streams]
before = state()
import nautile
nautile.load, nautile.open, nautile.run
print(json.dumps([before == state(), sorted(m for m in sys.modules if m.startswith("nautile"))]))
"""


def test_importing_it_changes_and_loads_nothing():
    done = subprocess.run([sys.executable, "-c", WATCHED], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [True, ["nautile"]]
    assert done.stderr == ""


@pytest.fixture(scope="module")
def model(checkpoint):  # noqa: F811
    return nautile.load(checkpoint)


@pytest.mark.slow
def test_a_text_has_its_result_alone_and_in_a_batch(model):
    prompts = ["2 + 2", "a longer prompt of some words", "x"]
    together = model.generate(prompts, max_tokens=8, temperature=0)
    assert [model.generate(prompt, max_tokens=8, temperature=0) for prompt in prompts] == together
    warm = {"max_tokens": 8, "temperature": 1.0, "seed": 3}
    first, _, again = model.generate(["x", "2 + 2", "x"], **warm)
    assert first == model.generate("x", **warm) != again
    answers = model.chat(["2 + 2", "x"], max_tokens=24, temperature=0, thinking_budget=4)
    assert answers[0] == model.chat(prompts[0], max_tokens=24, temperature=0, thinking_budget=4)
    streamed = "".join(model.stream(prompts[0], max_tokens=24, temperature=0, thinking_budget=4))
    assert streamed == answers[0].answer
    settings = {"max_tokens": 24, "temperature": 1.0, "thinking_budget": 4, "seed": 3}
    replies = ["".join(model.stream("2 + 2", **settings)) for _ in range(2)]
    assert replies == 2 * [model.chat("2 + 2", **settings).answer]


@pytest.mark.slow
def test_logprobs_are_those_of_whole_sequences(model, checkpoint):  # noqa: F811
    params, config, _ = load_weights(checkpoint)
    prompts, ends = ["ab", "abc", "ab"], [" d", "efg", "x"]
    encode = model.tokenizer.encode
    whole = [([*encode(begin), *encode(end)], len(encode(begin))) for begin, end in zip(prompts, ends, strict=True)]
    expected = continuation_logprobs(params, config, whole, 2)
    np.testing.assert_allclose(model.logprobs(prompts, ends), expected, atol=1e-4)
    assert model.logprobs("ab", ends).shape == (3,)
    assert model.logprobs("", ["a"])[0] < 0


class Item(BaseModel):
    n: int


@pytest.mark.slow
def test_labels_and_documents(model):
    rows = model.classify(["2", "cat"], ["sum", "animal"], instructions="?")
    assert [row["likeliest"] in ("sum", "animal") for row in rows] == [True, True]
    found = model.extract(["7"], Item, instructions="n")
    assert all(each is None or isinstance(each, Item) for each in found)
    assert [number for number, each in enumerate(found) if each is None] == sorted(model.refused)


def test_bad_input_is_one_exception(model, tmp_path, monkeypatch):
    monkeypatch.setenv("NAUTILE_STORE", str(tmp_path / "store"))
    for call, words in (
        (lambda: nautile.load("self_distil"), "did you mean"),
        (lambda: nautile.load(tmp_path), "is not a checkpoint folder"),
        (lambda: model.generate(["a", 3]), "text 1 is int, not str"),
        (lambda: model.generate("a", max_tokens=64), "leaves no room"),
        (lambda: model.generate("a" * 200, max_tokens=8), "text 0 has 200 tokens"),
        (lambda: model.logprobs(["a", "b"], ["c"]), "2 prompts and 1 continuations"),
        (lambda: nautile.run("local", set={"reason.policy.stepz": 3}), "stepz"),
        (lambda: nautile.run("nothing"), "nothing"),
        (lambda: nautile.open().metrics(run="x"), "no run 'x'"),
    ):
        with pytest.raises(nautile.ConfigError, match=words):
            call()


@pytest.mark.slow
def test_frames_are_what_the_commands_print(made, command_line, monkeypatch):  # noqa: F811
    store = made[0]
    monkeypatch.setenv("NAUTILE_STORE", str(store.root))
    opened = nautile.open(store.root)
    listed = json.loads(command_line("runs", "--json")[1])
    assert list(opened.runs()["run"]) == [row["id"] for row in listed]
    run = listed[0]["id"]
    assert set(opened.evaluations(run)["label"]) <= set(opened.steps(run[:8])["label"])
    artifacts = json.loads(command_line("artifacts", "--json")[1])
    assert list(opened.artifacts()["id"]) == [row["id"] for row in artifacts]
    report = next(row["id"] for row in artifacts if row["id"].startswith("report/"))
    assert (opened.path(report) / "report.md").is_file()
    assert set(opened.lineage(report)["id"]) >= {row["id"] for row in artifacts if row["id"].startswith("checkpoint/")}
    assert {"run", "name", "step", "value"} <= set(opened.metrics(run).columns)


@pytest.mark.slow
def test_a_run_is_a_process_with_progress_an_end_and_its_first_error(tmp_path, monkeypatch):
    for name, value in {**TOY_DAG, "PYTHONPATH": str(ROOT)}.items():
        monkeypatch.setenv(name, value)
    first = nautile.run(TOY, until="held_out", store=tmp_path / "store")
    second = nautile.run(TOY, set={"seed": 3}, store=tmp_path / "store", only="nothing")
    with pytest.raises(nautile.ConfigError, match="nothing"):
        second.wait(show=False)
    assert first.result() == {"held_out.questions": nautile.open(tmp_path / "store").artifacts("questions")["id"][0]}
    assert (first.state, second.state, first.error) == ("done", "failed", None)
    assert first.progress()["share"] == 1.0
    assert "held_out" in first.output()


@pytest.mark.heavy
def test_a_cancelled_run_ends_with_all_its_processes_and_goes_on(tmp_path, monkeypatch):
    for name, value in {**TOY_DAG, "PYTHONPATH": str(ROOT)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NAUTILE_TOY_FAULT", f"pretrain:wait={tmp_path}")
    run = nautile.run(TOY, until="pretrain", store=tmp_path / "store")
    while not (tmp_path / "reached").exists():
        assert run.state in ("starting", "running")
    run.cancel()
    with pytest.raises(nautile.RunFailed):
        run.wait(show=False)
    assert run.state == "interrupted"
    monkeypatch.delenv("NAUTILE_TOY_FAULT")
    assert "pretrain.checkpoint" in nautile.run(TOY, until="pretrain", store=tmp_path / "store").result()


@pytest.mark.heavy
def test_the_recipes_of_the_page_run(made, checkpoint, tmp_path, monkeypatch):  # noqa: F811
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    recipes = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(recipes) == 8
    store = Store(shutil.copytree(made[0].root, tmp_path / "store"))
    add_model(store, checkpoint, "checkpoint")  # the newest: those of the toy chain are no models
    for name, value in {**TOY_DAG, "PYTHONPATH": str(ROOT), "NAUTILE_STORE": str(store.root)}.items():
        monkeypatch.setenv(name, value)
    names = {}
    for recipe in recipes:
        exec(recipe.replace('"local"', repr(str(TOY))), names)
    assert names["scores"].shape[0] > 0
    assert names["run"].state == "done"
