"""The Python interface: what importing it changes (nothing), models, stores as data frames, runs as handles."""

import asyncio
import doctest
import json
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import matplotlib
import numpy as np
import pytest
from pydantic import BaseModel, field_validator

import nautile
from nautile import language_model, opened_store
from nautile.flows.named import add_model
from nautile.model.decoding.scoring import continuation_logprobs
from nautile.model.weights.files import load_weights
from nautile.store.artifacts import Store
from tests.flows.cli.test_chat import checkpoint  # noqa: F401 - a fixture
from tests.flows.conftest import command_line, own_main, two_runs  # noqa: F401 - fixtures
from tests.support.servers.fake_openai import FakeOpenAI
from tests.support.stages.toy_dag import TOY_DAG
from tests.support.stages.toy_stages import TOY
from tests.support.stages.two_runs import RUN

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
[getattr(nautile, name) for name in nautile.__all__ if name[0].islower()]
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
def test_the_examples_of_the_documentation_are_true(model, two_runs):  # noqa: F811
    names = {"model": model, "store": nautile.open(two_runs.root)}
    ran = [doctest.testmod(module, extraglobs=names) for module in (language_model, opened_store)]
    assert [(each.failed, each.attempted > 2) for each in ran] == 2 * [(0, True)]


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


class Small(BaseModel):
    n: Literal[1, 2]

    @field_validator("n")
    @classmethod
    def _none_will_do(cls, _: int) -> int:
        raise ValueError("no number will do")


@pytest.mark.slow
def test_labels_and_documents_without_a_second_look_at_the_weights(checkpoint, tmp_path):  # noqa: F811
    model = nautile.load(shutil.copytree(checkpoint, tmp_path / "model"))
    (tmp_path / "model" / "weights.safetensors").unlink()
    rows = model.classify(["2", "cat"], ["sum", "animal"], instructions="?")
    assert [row["likeliest"] in ("sum", "animal") for row in rows] == [True, True]
    assert rows == model.classify(["2", "cat"], ["sum", "animal"], instructions="?")
    found = model.extract(["7", "8"], Item, instructions="n")
    assert all(each is None or isinstance(each, Item) for each in found)
    assert [number for number, each in enumerate(found) if each is None] == sorted(model.refused)
    assert model.extract(["7", "8"], Item, instructions="n") == found
    assert model.extract("7", Small, instructions="n") is None
    assert "no number will do" in model.refused[0]


@pytest.mark.slow
def test_results_are_the_same_from_threads_and_in_a_running_loop(model):
    prompts = [f"{n} + 2" for n in range(8)]
    settings = {"max_tokens": 8, "temperature": 1.0, "seed": 3}

    def call(prompt):
        return (
            model.generate(prompt, **settings),
            "".join(model.stream(prompt, **settings)),
            model.logprobs(prompt, "4"),
        )

    expected = [call(prompt) for prompt in prompts]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(call, prompts)) == expected

    async def cell():
        return call(prompts[0])

    assert asyncio.run(cell()) == expected[0]


@pytest.mark.slow
def test_a_bar_is_shown_on_a_terminal_in_a_notebook_or_if_asked_for(model, capfd, monkeypatch):
    many = ["2"] * 20
    model.generate(many, max_tokens=2)
    assert capfd.readouterr() == ("", "")
    loud = nautile.load(model.folder, show=True)
    loud.logprobs("2", ["a", "b"])
    assert "logprobs: 2 of 2" in capfd.readouterr().err
    shown = []
    handle = SimpleNamespace(update=lambda data, raw: shown.append(data["text/plain"]))
    notebook = SimpleNamespace(display=lambda data, raw, display_id: handle)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=notebook))
    model.generate(many, max_tokens=2)
    assert shown[0].startswith("texts: 16 of 20 ████")
    assert shown[-2:] == ["texts: 20 of 20 ████████████████████ 100%", ""]
    assert capfd.readouterr() == ("", "")


def test_bad_input_is_one_exception(model, tmp_path, monkeypatch):
    monkeypatch.setenv("NAUTILE_STORE", str(tmp_path / "store"))
    newer = shutil.copytree(model.folder, tmp_path / "newer")
    config = json.loads((newer / "config.json").read_text())
    (newer / "config.json").write_text(json.dumps(config | {"format": 9}))
    (tmp_path / "file").touch()
    recursive = {"$ref": "#"}
    for call, words in (
        (lambda: nautile.load("self_distil"), "did you mean"),
        (lambda: nautile.load(tmp_path), "is not a checkpoint folder"),
        (lambda: nautile.load(tmp_path / "none"), "there is no such folder"),
        (lambda: nautile.load(newer), "format 9, and this version reads formats 1 and 2"),
        (lambda: nautile.load(store=tmp_path / "file" / "store"), "no checkpoint in"),
        (lambda: nautile.open(tmp_path / "file" / "store").runs(), "cannot be written"),
        (lambda: model.generate(3), "generate: needs a text or a list of texts, not int"),
        (lambda: model.chat(b"2"), "chat: needs a text or a list of texts, not bytes"),
        (lambda: list(model.stream(None)), "stream: needs a text"),
        (lambda: model.classify("2", ["a", None]), "classify: labels: text 1 is NoneType"),
        (lambda: model.classify("2", ["a", "a"]), "at least two different labels"),
        (lambda: model.classify("2", ["a", "b"], threshold=3), "classify: threshold: "),
        (lambda: model.classify("2"), "has no labels.json"),
        (lambda: model.extract("2", int), "schema is <class 'int'>: give a pydantic class"),
        (lambda: model.extract("2", {"const": {1}}), "cannot be written as JSON"),
        (lambda: model.extract("2", recursive), "extract.json_schema"),
        (lambda: model.extract("2", {"type": "nothing"}), "extract.json_schema"),
        (lambda: model.extract("2", Item, temperature=-1), "extract: temperature: "),
        (lambda: nautile.plan("local", topology="v9:1", device="rtx4090"), "leave out topology"),
        (lambda: nautile.plan("local", device="rtx"), "rtx"),
        (lambda: nautile.plan("lokal"), "lokal"),
        (lambda: nautile.rehearse("local", spend=-1), "spend -1"),
        (lambda: nautile.sweep(tmp_path / "none.toml"), "none.toml"),
        (lambda: nautile.compare("a"), "needs at least two"),
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
def test_a_name_that_is_unknown_lists_near_ones(two_runs, monkeypatch):  # noqa: F811
    opened = nautile.open(two_runs.root)
    some = opened.artifacts("evaluation")["id"][0]
    monkeypatch.setenv("NAUTILE_STORE", str(two_runs.root))
    for call, near in (
        (lambda: opened.steps("the toy rum"), "the toy run"),
        (lambda: opened.metrics(name="rewards"), "reward"),
        (lambda: opened.evaluations(benchmark="heldout"), "held_out"),
        (lambda: opened.samples(label="self_distil"), "self_distill"),
        (lambda: opened.artifacts("evaluations"), "evaluation"),
        (lambda: opened.path(f"evaluations/{some[-12:]}"), "evaluation"),
        (lambda: opened.path(f"{some[:-1]}z"), some),
        (lambda: nautile.compare("pretrain", "reson"), "reason"),
        (lambda: nautile.compare("toy", "the b0b rum"), "the b0b run"),
        (lambda: nautile.load("reson"), "reason"),
    ):
        with pytest.raises(nautile.ConfigError, match=f"did you mean '{near}'"):
            call()
    assert opened.metrics(run=RUN, name="loss").empty  # which another run has


@pytest.mark.slow
def test_comparisons_are_those_of_the_command(two_runs, command_line, monkeypatch):  # noqa: F811
    monkeypatch.setenv("NAUTILE_STORE", str(two_runs.root))
    runs = nautile.compare("toy", RUN)
    assert runs.data == {RUN: json.loads(command_line("compare", "toy", RUN, "--json")[1])}
    row = runs.scores.set_index("stage").loc["reason"]
    assert row["a"] + row["lead"] == pytest.approx(row["b"])
    assert row["low"] <= row["lead"] <= row["high"]
    assert runs.settings["field"].tolist() == ["reason.policy.steps"]
    assert runs.curves.set_index("metric").loc["reward", "b.best"] == 0.9
    assert runs.steps["label"].tolist() == [row["label"] for row in runs.data[RUN]["steps"]]
    assert len(runs.warnings) == 2
    assert runs.changed.empty
    assert {"other", "benchmark", "change", "prompt"} <= set(runs.changed.columns)
    stages = nautile.compare("pretrain", "align", "reason")
    assert stages.data["reason"] == json.loads(command_line("compare", "pretrain", "reason", "--json")[1])
    assert set(stages.scores["other"]) == {"align", "reason"}
    assert len(stages.changed) == sum(len(found["changed"]) for found in stages.data.values())


@pytest.mark.slow
def test_plans_are_those_of_the_command(command_line, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("NAUTILE_STORE", str(tmp_path / "store"))

    async def cell():  # whose loop is running when the endpoints are asked
        return nautile.plan(TOY, topology="v9:1", online=True)

    plan = asyncio.run(cell())
    assert "v9" in str(plan.error)
    out = command_line("plan", str(TOY), "--topology", "v9:1", "--online", "--json")[1]
    assert json.loads(json.dumps(plan.as_json())) == json.loads(out)
    device = nautile.plan(TOY, device="rtx4090")
    assert device.hours == json.loads(command_line("plan", str(TOY), "--device", "rtx4090", "--json")[1])["hours"]


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
    with pytest.raises(nautile.RunFailed, match=r"it was interrupted\. Continue with: nautile run"):
        run.wait(show=False)
    assert run.state == "interrupted"
    monkeypatch.delenv("NAUTILE_TOY_FAULT")
    assert "pretrain.checkpoint" in nautile.run(TOY, until="pretrain", store=tmp_path / "store").result()


@pytest.mark.heavy
@pytest.mark.timeout(1200)
def test_a_sweep_and_a_rehearsal_are_handles_too(made, tmp_path, monkeypatch, command_line):  # noqa: F811
    store = shutil.copytree(made[0].root, tmp_path / "store")
    for name, value in {**TOY_DAG, "PYTHONPATH": str(ROOT), "NAUTILE_STORE": str(store)}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "try.toml").write_text(
        f'config = "{TOY}"\nuntil = "evaluate:pretrain"\n[grid]\n"pretrain.log_every" = [1, 2]\n'
    )
    with pytest.raises(nautile.ConfigError, match="make the same artifacts"):
        nautile.sweep(tmp_path / "try.toml")
    (tmp_path / "try.toml").write_text(
        f'config = "{TOY}"\nseeds = [0, 1]\nuntil = "evaluate:pretrain"\n[[arms]]\nname = "it"\n'
    )
    sweep = nautile.sweep(tmp_path / "try.toml")
    report = sweep.result()
    assert (sweep.state, sweep.error) == ("done", None)
    assert sweep.progress()["share"] == 1.0
    assert report == json.loads(command_line("sweep", str(tmp_path / "try.toml"), "--report", "--json")[1])
    assert [arm["state"] for arm in report["arms"]] == ["done", "done"]

    monkeypatch.setenv("NAUTILE_TOY_FAULT", "pretrain:crash")
    rehearsal = nautile.rehearse("local")
    with pytest.raises((nautile.RunFailed, nautile.ConfigError)) as ending:
        rehearsal.result()
    assert (rehearsal.state, str(ending.value).removeprefix(f"{rehearsal.name}: ")) == ("failed", rehearsal.error)
    assert rehearsal.report()["stages"][0]["outcome"] == "done"
    monkeypatch.delenv("NAUTILE_TOY_FAULT")
    assert nautile.rehearse("local").result()["complete"]


@pytest.mark.slow
def test_the_example_s_notebook_runs_on_another_store(two_runs, monkeypatch):  # noqa: F811
    monkeypatch.setenv("NAUTILE_STORE", str(two_runs.root))
    matplotlib.use("agg")
    cells = json.loads((ROOT / "examples/results.ipynb").read_text(encoding="utf-8"))["cells"]
    executed = [cell for cell in cells if cell["cell_type"] == "code"]
    assert sum("image/png" in output.get("data", {}) for cell in executed for output in cell["outputs"]) == 3
    names = {}
    for cell in executed:
        exec("".join(cell["source"]), names)
    assert names["axes"].get_title().endswith(" + 1?")


@pytest.mark.heavy
@pytest.mark.timeout(1200)
def test_the_recipes_of_the_page_run(made, checkpoint, tmp_path, monkeypatch):  # noqa: F811
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    recipes = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(recipes) == 8
    store = Store(shutil.copytree(made[0].root, tmp_path / "store"))
    add_model(store, checkpoint, "checkpoint")  # the newest: those of the toy chain are no models
    for name, value in {**TOY_DAG, "PYTHONPATH": str(ROOT), "NAUTILE_STORE": str(store.root)}.items():
        monkeypatch.setenv(name, value)
    names = {}
    monkeypatch.chdir(tmp_path)
    with FakeOpenAI() as teacher:
        monkeypatch.setenv("TOY_KEY", "any")
        (tmp_path / "config.toml").write_text(
            f'extends = "{TOY}"\n[endpoints.local]\nurl = "{teacher.url}"\nmodel = "fake"\n'
        )
        for recipe in recipes:
            exec(recipe.replace('"local"', repr(str(tmp_path / "config.toml"))), names)
    assert names["scores"].shape[0] > 0
    assert names["run"].state == "done"
    assert {arm["state"] for arm in names["report"]["arms"]} == {"done"}
