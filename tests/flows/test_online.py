"""What `nautile plan --online` asks: the Hub for pinned datasets, endpoints for their models; nothing is paid."""

import asyncio
import json
import os
import subprocess
import sys

import pytest

from nautile.configs.endpoint import EndpointConfig
from nautile.configs.load import load
from nautile.configs.vendors import VENDORS
from nautile.data.endpoints import endpoint
from nautile.flows.dag import pipeline_steps
from nautile.flows.readiness import Answers, ask_endpoints, hub_datasets, remote_endpoints
from tests.support.plug_ins import add_plug_in
from tests.support.servers.fake_hub import FakeHub
from tests.support.servers.fake_openai import FakeOpenAI

COMMIT, OTHER = "0123456789" * 4, "f" * 40
CONFIG = """
extends = "local"
[[ingest.sources]]
name = "fineweb_edu"
reader = "hub"
form = "web"
path = "org/set"
subset = "main"
revision = "{commit}"
[[ingest.sources]]
name = "synth"
reader = "hub"
form = "synth"
path = "org/set"
subset = "other"
exemplars = 256
revision = "{commit}"
[evaluate]
benchmarks = [{{ name = "gsm8k", revision = "{other}" }}]
[reason]
problems = {{ count = 5, source = "gsm8k", revision = "{commit}" }}
"""
# The client reads HF_ENDPOINT when it is imported, so that it has a process of its own.
CHILD = """
import json, sys
from dataclasses import asdict
from nautile.configs.load import load
from nautile.flows.dag import pipeline_steps
from nautile.flows.readiness import ask_online
print(json.dumps(asdict(ask_online(pipeline_steps(load(sys.argv[1])), lambda line: None))))
"""


def test_every_pinned_dataset_and_endpoint_of_the_published_run_is_asked_for():
    steps = pipeline_steps(load("nautile_370m"))
    labels = {dataset.label.partition(" ")[0] for dataset in hub_datasets(steps)}
    # What the judge is calibrated on is what [reason] and [self_distill] train on: asked for once.
    assert labels - {"self_distill.problems"} == {
        "ingest.sources", "distill.prompt_sets", "evaluate.benchmarks", "align.answered"
    }  # fmt: skip
    assert all(len(dataset.revision) == 40 for dataset in hub_datasets(steps))
    assert set(remote_endpoints(steps)) >= {"endpoints.gpt_oss_20b", "endpoints.mistral_large"}
    local = pipeline_steps(load("local"))
    assert (hub_datasets(local), remote_endpoints(local)) == ([], {})


@pytest.mark.slow
def test_an_endpoint_counts_as_confirmed_only_if_it_takes_the_key_and_lists_the_model(monkeypatch):
    monkeypatch.setattr(endpoint, "CHECK_ATTEMPTS", 1)
    monkeypatch.setenv("RIGHT", "sk-right-1")
    monkeypatch.setenv("WRONG", "sk-wrong-1")
    with FakeOpenAI(key="sk-right-1") as closed, FakeOpenAI() as public, FakeOpenAI(models=()) as mute:
        silent = "http://127.0.0.1:1/v1"
        endpoints = {
            f"endpoints.{name}": EndpointConfig(kind="openai", model=model, url=url, key_variable=key)
            for name, url, model, key in (
                ("right", closed.url, "fake", "RIGHT"),
                ("free", public.url, "fake", ""),
                ("wrong", closed.url, "fake", "WRONG"),
                ("unset", closed.url, "fake", "UNSET_KEY"),
                ("other", public.url, "another", ""),
                ("silent", silent, "fake", ""),
                ("mute", mute.url, "fake", ""),
                ("open", public.url, "fake", "WRONG"),
            )
        }
        answers = Answers()
        asyncio.run(ask_endpoints(endpoints, answers))
        assert [closed.bodies, public.bodies, mute.bodies] == [[], [], []], "no completion was asked for"

    def names(lines):
        return sorted(line.partition(":")[0].removeprefix("endpoints.") for line in lines)

    assert names(answers.confirmed) == ["free", "right"]
    assert names(answers.refused) == ["other", "unset", "wrong"]
    assert names(answers.silent) == ["silent"]
    assert names(answers.unclear) == ["mute", "open"]
    assert "sk-wrong-1" not in str(answers)


@pytest.mark.slow
def test_an_endpoint_without_an_address_is_asked_at_its_vendors_own(monkeypatch, tmp_path):
    monkeypatch.setenv("RIGHT", "sk-right-1")
    with FakeOpenAI(key="sk-right-1", card={"type": "base"}) as server:
        source = f"""
from dataclasses import replace
from nautile.configs.vendors import VENDORS
m = replace(VENDORS["mistral"], url={server.url!r})
"""
        add_plug_in(monkeypatch, tmp_path, VENDORS, "m", source)
        config = EndpointConfig(kind="m", model="fake", key_variable="RIGHT")
        answers = Answers()
        asyncio.run(ask_endpoints({"endpoints.m": config}, answers))
    assert answers == Answers(confirmed=["endpoints.m: fake"])


@pytest.mark.slow
def test_the_hub_is_asked_for_each_commit_subset_and_file(tmp_path):
    folder = tmp_path / "repository"
    (folder / "main").mkdir(parents=True)
    (folder / "main" / "train.jsonl").write_text('{"text": "one"}\n')
    card = "---\nconfigs:\n- config_name: main\n  data_files:\n  - {split: train, path: main/train.jsonl}\n---\n"
    (folder / "README.md").write_text(card)
    (tmp_path / "run.toml").write_text(CONFIG.format(commit=COMMIT, other=OTHER))

    def ask(url, name):
        environment = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(tmp_path / name), "HF_TOKEN": ""}
        command = [sys.executable, "-c", CHILD, str(tmp_path / "run.toml")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return Answers(**json.loads(done.stdout.splitlines()[-1]))

    with FakeHub(folder, "org/set", COMMIT) as hub:
        answers = ask(hub.url, "home")
        assert ("HEAD", f"/datasets/org/set/resolve/{COMMIT}/main/train.jsonl") in hub.requests
    assert answers.confirmed == ["ingest.sources 'fineweb_edu': org/set at 012345678901"]
    refused = sorted(line.partition(":")[0] for line in answers.refused)
    assert refused == ["evaluate.benchmarks 'gsm8k'", "ingest.sources 'synth'", "reason.problems 'gsm8k'"]
    assert answers.silent == []
    nobody = ask("http://127.0.0.1:1", "elsewhere")
    assert (nobody.confirmed, nobody.refused, len(nobody.silent)) == ([], [], 4)
