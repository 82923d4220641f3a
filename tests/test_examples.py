"""The parts from outside in `examples/`, installed beside the wheel in a fresh environment as a stranger would."""

import json
import os
import re
import shutil
import subprocess
import tomllib
from collections import Counter
from dataclasses import dataclass
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


@dataclass
class Installed:
    """The command `nautile` of the fresh environment, in a folder and with a store of its own."""

    python: Path
    folder: Path

    def nautile(self, *arguments, **more):
        kept = {name: text for name, text in os.environ.items() if not name.startswith(("NAUTILE_", "PREFECT_"))}
        kept.pop("PYTHONPATH", None)
        own = {"NAUTILE_STORE": str(self.folder / "store"), "COLUMNS": "200"}
        command = [str(self.python.with_name("nautile")), *arguments]
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_vendor_is_asked(installed):
    with FakeOpenAI(key="sk-acme-0123456789") as server:
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
benchmarks = [{ name = "json_sums", items = 40 }]
[evaluate]
ways = ["generate"]
max_tokens = 12
benchmarks = [{ name = "json_sums", items = 40 }]
held_out = { count = 4 }
models = [{ endpoint = "acme" }]
[endpoints.acme]
kind = "acme"
model = "acme-small"
key_variable = "ACME_API_KEY"
"""


def sums(body):
    """The right object, but for a wrong one in every third, and for two of them in the one after it."""
    prompt = text_of(body["messages"][-1])
    if "JSON" not in prompt:
        return "7"
    numbers = [int(digits) for digits in re.findall("[0-9]+", prompt)]
    right = {"product": numbers[0] * numbers[-1], "sum": numbers[0] + numbers[-1]}
    wrong = {**right, "sum": 0}
    return json.dumps([wrong, [wrong, right], right][sum(numbers) % 3])


@pytest.fixture(scope="module")
def tiny(installed):
    """`tiny.toml`, and in the store a model of its form that knows nothing."""
    (installed.folder / "tiny.toml").write_text(TINY, encoding="utf-8")
    local = tomllib.loads((ROOT / "configs" / "local.toml").read_text(encoding="utf-8"))
    model = ModelConfig.model_validate(local["model"] | tomllib.loads(TINY)["model"])
    save_weights(installed.folder / "model", initialise(model, 0), model, TokenizerConfig(ranks=300))
    added = installed.nautile("store", "add", "model")
    assert added.returncode == 0, added.stdout + added.stderr
    return installed


@pytest.mark.slow
def test_the_benchmark_is_graded_by_its_own_grader(tiny):
    with FakeOpenAI(reply=sums, key="sk-acme-0123456789") as server:
        asked = tiny.nautile(
            "run", "tiny.toml", "--only", "evaluate:acme", "--set", f"endpoints.acme.url={server.url}",
            ACME_API_KEY="sk-acme-0123456789",
        )  # fmt: skip
        assert asked.returncode == 0, asked.stdout + asked.stderr
    given = Counter(sums(body)[0] + str(sums(body).count("sum")) for body in server.bodies if "JSON" in str(body))
    evaluations = tiny.folder.glob("store/artifacts/evaluation/*/scores.json")
    scores = [json.loads(path.read_text()) for path in evaluations]
    score = next(scores["benchmarks"]["json_sums"] for scores in scores if "json_sums" in scores["benchmarks"])
    assert score == given


@pytest.mark.slow
def test_the_reward_is_what_is_trained_on(tiny):
    ran = tiny.nautile("run", "tiny.toml", "--until", "evaluate:reason")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = next(tiny.folder.glob("store/artifacts/rollouts/*/rollouts.jsonl")).read_text().splitlines()
    print(lines)
    print(tiny.artifact("rollouts", "manifest.json"))
