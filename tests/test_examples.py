"""The parts from outside in `examples/`, installed beside the wheel in a fresh environment as a stranger would."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from nautile.configs.model import ModelConfig, TokenizerConfig
from nautile.model.nautile import initialise
from nautile.model.weights.files import save_weights
from tests.support.servers.fake_batches import text_of
from tests.support.servers.fake_openai import FakeOpenAI
from tests.support.wheel import ROOT, built, checkout, fresh_environment

EXAMPLES = ROOT / "examples"
LINES = 40
LETTERS = [f"Dear reader,\n\nthis is letter {number}, of the {number}th of May, about ships." for number in range(60)]


@pytest.mark.parametrize("path", sorted((EXAMPLES / "nautile_examples").glob("[a-z]*.py")), ids=lambda path: path.stem)
def test_an_example_is_one_short_file(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LINES


def test_the_mailbox_of_the_readme_is_one_for_the_reader(tmp_path, monkeypatch):
    """Its commands are copied as they are: the run reads a file that the repository does not have."""
    (command,) = re.findall(r"^python -c .*$", (EXAMPLES / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    words, _, file = command.removeprefix("python").rpartition(" > ")
    made = subprocess.run(f"{sys.executable} {words}", shell=True, capture_output=True, text=True, check=True).stdout
    assert file == tomllib.loads((EXAMPLES / "run.toml").read_text(encoding="utf-8"))["ingest"]["sources"][0]["path"]
    (tmp_path / file).write_text(made, encoding="utf-8")
    monkeypatch.syspath_prepend(EXAMPLES)
    rows = list(importlib.import_module("nautile_examples.reader").rows(str(tmp_path / file)))
    assert len(rows) == 60
    assert all("about ships" in row["body"] for row in rows)


@dataclass
class Installed:
    """The command `nautile` of the fresh environment, in a folder and with a store of its own."""

    python: Path
    folder: Path

    def nautile(self, *arguments, **more):
        kept = {name: text for name, text in os.environ.items() if not name.startswith(("NAUTILE_", "PREFECT_"))}
        kept.pop("PYTHONPATH", None)
        own = {"NAUTILE_STORE": str(self.folder / "store"), "COLUMNS": "200"}
        # As fast as other programs: a stage that gives way to them waits for ever on a busy machine.
        quick = (
            ["--set", "launch.niceness=0", "--set", "operation.evaluate.niceness=0"] if arguments[0] == "run" else []
        )
        command = [str(self.python.with_name("nautile")), *arguments, *quick]
        return subprocess.run(
            command, cwd=self.folder, env=kept | own | more, capture_output=True, text=True, timeout=240
        )

    def artifact(self, kind, name):
        (folder,) = (self.folder / "store" / "artifacts" / kind).iterdir()
        return json.loads((folder / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    shutil.copytree(EXAMPLES, folder / "examples", ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    (folder / "wheels").mkdir()
    (folder / "work").mkdir()
    wheels = [built(checkout(folder / "checkout"), folder / "wheels" / "nautile")]
    wheels.append(built(folder / "examples", folder / "wheels" / "examples"))
    shutil.copy(EXAMPLES / "run.toml", folder / "work")
    yield Installed(python=fresh_environment(folder / "environment", *wheels), folder=folder / "work")
    shutil.rmtree(folder)


@pytest.mark.heavy
def test_each_example_is_found_and_has_no_fault(installed):
    listed = installed.nautile("plugins", "--json")
    assert listed.returncode == 0, listed.stderr
    rows = json.loads(listed.stdout)
    assert {(row["registry"], row["name"]) for row in rows} >= {
        ("stages", "lengths"),
        ("vendors", "acme"),
        ("readers", "mbox"),
    }
    assert {row["origin"] for row in rows} == {"the package nautile-examples 1.0"}
    assert all(row["version"] and not row["fault"] for row in rows)


@pytest.mark.heavy
def test_the_reader_and_the_stage_run_in_the_pipeline(installed):
    messages = [f"From a@b.example\nMessage-ID: <{n}>\n\n{text}\n" for n, text in enumerate(LETTERS)]
    (installed.folder / "letters.mbox").write_text("\n".join(messages), encoding="utf-8")
    dag = {"NAUTILE_DAG": "nautile_examples.stage:steps"}
    ran = installed.nautile("run", "run.toml", "--until", "lengths", **dag)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    facts = installed.artifact("tokens", "manifest.json")["facts"]
    assert (facts["records"], facts["source"]) == (len(LETTERS), "letters")
    (length,) = installed.artifact("lengths", "lengths.json").values()
    assert length == round(facts["tokens"] / facts["documents"], 1)


@pytest.mark.heavy
def test_the_vendor_is_asked(installed):
    with FakeOpenAI(key="sk-acme-0123456789", models=("acme-small",)) as server:
        asked = installed.nautile(
            "run", "run.toml", "--only", "evaluate:acme", "--set", f"endpoints.acme.url={server.url}",
            ACME_API_KEY="sk-acme-0123456789",
        )  # fmt: skip
        assert asked.returncode == 0, asked.stdout + asked.stderr
        assert all("random_seed" in body for body in server.bodies)
        assert server.bodies


TINY = """
extends = "local"
name = "tiny"
distill = false
self_distill = false
[launch]
niceness = 0
[operation.evaluate]
niceness = 0
[tokenizer]
ranks = 300
[model]
vocabulary = 305
width = 32
memory_heads = 2
query_heads = 2
attention_heads = 2
kv_heads = 1
feed_forward = 40
[pretrain]
phases = [{ name = "synth", tokens = 10_240, mixture = { synth = 1.0 } }]
[reason]
start = "newest:add"
reward = "brief"
rollout = { prompts = 2, group = 2, prompt_length = 96, max_tokens = 12 }
policy = { steps = 2, micro_rows = 4 }
problems = { count = 8 }
[held_out]
benchmarks = [{ name = "json_sums", items = 12 }]
[evaluate]
ways = ["generate"]
max_tokens = 12
benchmarks = [{ name = "json_sums", items = 12 }]
held_out = { count = 4 }
models = [{ endpoint = "acme" }]
[endpoints.acme]
kind = "acme"
model = "acme-small"
key_variable = "ACME_API_KEY"
"""


def kind_of(body):
    """0: a wrong answer, 1: the right one after it, 2: the right one alone."""
    return sum(map(int, re.findall("[0-9]+", text_of(body["messages"][-1])))) % 3


def sums(body):
    """An answer of its kind to a question of the example; any to another."""
    numbers = [int(digits) for digits in re.findall("[0-9]+", text_of(body["messages"][-1]))] or [0]
    right = {"product": numbers[0] * numbers[-1], "sum": numbers[0] + numbers[-1]}
    wrong = {**right, "sum": 0}
    return json.dumps([[wrong], [wrong, right], [right]][kind_of(body)])


@pytest.mark.heavy
@pytest.mark.timeout(1200)
def test_the_benchmark_grades_by_itself_and_the_reward_is_what_is_trained_on(installed, tmp_path):
    """Through a model that knows nothing: its answers are wrong, and cost what they are long; then another's."""
    installed = replace(installed, folder=tmp_path)
    (installed.folder / "tiny.toml").write_text(TINY, encoding="utf-8")
    local = tomllib.loads((ROOT / "configs" / "local.toml").read_text(encoding="utf-8"))
    model = ModelConfig.model_validate(local["model"] | tomllib.loads(TINY)["model"])
    save_weights(installed.folder / "model", initialise(model, 0), model, TokenizerConfig(ranks=300))
    added = installed.nautile("store", "add", "model")
    assert added.returncode == 0, added.stdout + added.stderr
    with FakeOpenAI(reply=sums, models=("acme-small",), key="sk-acme-0123456789") as server:
        ran = installed.nautile(
            "run", "tiny.toml", "--set", f"endpoints.acme.url={server.url}", ACME_API_KEY="sk-acme-0123456789"
        )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    artifacts = installed.folder / "store" / "artifacts"
    # The reward.
    (rollouts,) = (artifacts / "rollouts").glob("*/rollouts.jsonl")
    rows = [json.loads(line) for line in rollouts.read_text(encoding="utf-8").splitlines()]
    assert [row["reward"] for row in rows] == [row["parts"]["correct"] - 0.001 * row["length"] for row in rows]
    manifest = json.loads(rollouts.with_name("manifest.json").read_text(encoding="utf-8"))
    assert (manifest["facts"]["reward"], list(manifest["config"]["versions"])) == ("brief", ["brief"])
    # The benchmark: held out, and asked of the model and of the endpoint.
    questions = installed.artifact("questions", "manifest.json")["facts"]
    assert questions["benchmarks"] == {"json_sums": 12}
    by_model = {}
    for path in (artifacts / "evaluation").glob("*/scores.json"):
        scores = json.loads(path.read_text(encoding="utf-8"))
        by_model[scores["model"].partition(" ")[0]] = scores["benchmarks"].get("json_sums")
    assert by_model["checkpoint"]["correct_lenient"] == 0
    asked = [kind_of(body) for body in server.bodies if "JSON" in text_of(body["messages"][-1])]
    score = by_model["endpoint"]
    assert (score["n"], score["correct"], score["correct_lenient"], score["many_answers"]) == (
        12, asked.count(2), 12 - asked.count(0), asked.count(1),
    )  # fmt: skip
    report = next((artifacts / "report").glob("*/report.md")).read_text(encoding="utf-8")
    assert "the reward is brief" in report
    assert "JSON sums" in report
