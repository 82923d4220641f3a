"""`nautile rehearse` against the Hub and vendors on loopback: all is reached, and a fault is named before it costs."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from nautile.configs.load import load_own, locate
from nautile.configs.sweep import SweepConfig
from nautile.flows.cli.document import OUTPUTS
from tests.support.servers.fake_hub import ACCEPTED
from tests.support.servers.fake_openai import FakeOpenAI
from tests.support.servers.public_hub import PublicHub

OWN = ("openai/gpt-oss-20b", "openai/gpt-oss-120b", "mistralai/Mistral-Small-3.2-24B-Instruct-2506")
PRICES = (0.5, 1.5)
JUDGE_CALLS = 1200 * 8 * 4 + 32 + 80
SHORT = """
extends = "local"
name = "short"
align = false
reason = false
self_distill = false
[endpoints.teacher]
kind = "openai"
model = "fake"
url = "{url}"
dollars_per_million_in = 0.5
dollars_per_million_out = 1.5
[[ingest.sources]]
name = "fineweb_edu"
reader = "jsonl"
form = "web"
path = "{folder}/one.jsonl"
validation_share = 0.0
[[ingest.sources]]
name = "synth"
reader = "reasoning"
form = "synth"
records = 4000
exemplars = 32
tasks = [{{ name = "chain_sum", parameters = {{ min_terms = 2, max_terms = 4, min_digits = 1, max_digits = 1 }} }}]
[distill]
prompts = 2000
teachers = [{{ endpoint = "teacher" }}]
"""


pytestmark = pytest.mark.timeout(3600)
# On one worker: what the first has rehearsed the others reuse.
SHARED = pytest.mark.xdist_group("rehearsal")


@dataclass
class Ended:
    code: int
    out: str
    err: str

    def result(self) -> dict:
        """What --json has printed, of the documented form."""
        TypeAdapter(OUTPUTS["rehearse"]).validate_json(self.out)
        return json.loads(self.out)


def rehearse(folder: Path, *words: str, **variables: str) -> Ended:
    environment = {
        **{name: value for name, value in os.environ.items() if name != "HF_TOKEN"},
        **{"NAUTILE_STORE": str(folder / "store"), "HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"},
        **variables,
    }
    command = [sys.executable, "-m", "nautile.flows.cli.main", "rehearse", *words, "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder, check=False)
    return Ended(done.returncode, done.stdout, done.stderr)


@pytest.mark.heavy
def test_a_small_configuration_is_rehearsed_within_its_limit_also_with_a_source_of_one_row(tmp_path):
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": "The only text that there is. " * 40}) + "\n")
    with FakeOpenAI(per_million=PRICES) as server:
        (tmp_path / "short.toml").write_text(SHORT.format(url=server.url, folder=tmp_path))
        ended = rehearse(tmp_path, "short.toml", "--spend", "0.02")
        assert ended.code == 0, ended.err + ended.out
        result = ended.result()
        assert 0 < server.dollars <= result["dollars"] + 1e-9 <= 0.02
    assert (result["complete"], result["faults"], result["skipped"]) == (True, [], "")
    assert {stage["outcome"] for stage in result["stages"]} == {"done"}
    (teacher,) = result["whole_run"]
    assert (teacher["requests"], teacher["measured"]) == (2000, 4)
    (reached,) = (row for row in result["reached"] if row["label"] == "endpoints.teacher")
    assert (reached["serves"], reached["dollars_per_million"]) == ("fake", [0.5, 1.5])
    (record,) = (tmp_path / "store" / "rehearsals").glob("*.json")
    assert json.loads(record.read_text())["complete"]
    assert not (tmp_path / "store" / "artifacts").exists() or not list((tmp_path / "store" / "artifacts").iterdir())


@contextmanager
def world(folder: Path, *, own: dict | None = None, vendor: dict | None = None, **hub: object) -> Iterator[tuple]:
    """The public Hub, the servers of the teachers and the vendor; and the words that point a configuration at them."""
    settings = {"models": ("mistral-large-2512",), "key": "right", "card": {"type": "base"}, **(vendor or {})}
    with (
        PublicHub(folder / "hub", **hub) as served,
        FakeOpenAI(models=OWN, per_million=PRICES, **(own or {})) as teachers,
        FakeOpenAI(per_million=PRICES, **settings) as mistral,
    ):
        urls = {name: teachers.url for name in ("gpt_oss_20b", "gpt_oss_120b", "mistral_small")}
        urls["mistral_large"] = mistral.url
        words = [word for name, url in urls.items() for word in ("--set", f"endpoints.{name}.url={url}")]
        variables = {
            "HF_ENDPOINT": served.url,
            "GPT_OSS_API_KEY": "x",
            "MISTRAL_API_KEY": "right",
            "HF_TOKEN": ACCEPTED,
        }
        yield teachers, mistral, words, variables


@pytest.fixture(scope="module")
def rehearsed_once(tmp_path_factory):
    """The folder of a rehearsal of the published configuration, and how it ended: later ones make only what differs."""
    folder = tmp_path_factory.mktemp("rehearsal")
    with world(folder) as (teachers, mistral, words, variables):
        return folder, rehearse(folder, "nautile_370m", *words, "--spend", "1.00", **variables), teachers, mistral


@pytest.mark.heavy
@SHARED
def test_the_published_run_is_rehearsed_end_to_end(rehearsed_once):
    _, ended, teachers, mistral = rehearsed_once
    assert ended.code == 0, ended.err + ended.out
    result = ended.result()
    assert result["dollars"] <= 1.0
    assert teachers.answered
    assert mistral.answered
    assert all(not row["fault"] for row in result["reached"])
    (judge,) = (row for row in result["whole_run"] if row["label"] == "align")
    assert (judge["requests"], judge["requests_per_minute"], judge["hours"]) == (JUDGE_CALLS, None, None)
    assert judge["measured"]
    assert result["pretrain_days"] > 1


@pytest.mark.heavy
@SHARED
def test_the_run_of_one_host_is_rehearsed_end_to_end(rehearsed_once):
    folder, *_ = rehearsed_once
    with world(folder / "spark") as (_, _, words, variables):
        ended = rehearse(folder, "spark", *words, "--yes", **variables)
    assert ended.code == 0, ended.err + ended.out


@pytest.mark.heavy
@SHARED
@pytest.mark.parametrize("name", ["balanced over the group", "self-distillation", "supervised"])
def test_each_kind_of_arm_of_the_study_is_rehearsed(rehearsed_once, name):
    """From weights that the rehearsal trains itself: the author's are in the store of whoever runs the study."""
    folder, *_ = rehearsed_once
    study = load_own(locate("study_370m", sweeps=True), SweepConfig)
    (arm,) = (arm for arm in study.arms if arm.name == name)
    own = [text for text in (*study.set, *arm.set) if ".start=newest" not in text]
    own = [text.replace('start="newest:add", ', "") for text in own]
    with world(folder / name.replace(" ", "_")) as (_, _, words, variables):
        more = [word for text in own for word in ("--set", text)]
        ended = rehearse(folder, study.config, *more, *words, "--spend", "1.00", **variables)
    assert ended.code == 0, ended.err + ended.out
    result = ended.result()
    assert result["complete"]
    assert (arm.after or "reason") in {stage["label"] for stage in result["stages"]}


@pytest.mark.heavy
@SHARED
def test_the_run_of_one_gpu_is_rehearsed_for_nothing(tmp_path):
    with PublicHub(tmp_path / "hub") as served:
        variables = {"HF_ENDPOINT": served.url, "HF_TOKEN": ACCEPTED}
        ended = rehearse(tmp_path, "nautile_100m", "--spend", "0", **variables)
    assert ended.code == 0, ended.err + ended.out
    result = ended.result()
    assert (result["complete"], result["dollars"]) == (True, 0.0)
    assert {"tokenizer", "supervise", "reason"} <= {stage["label"] for stage in result["stages"]}


UNKNOWN = "f" * 40
FAULTS = {
    "wrong commit": ({}, ["--set", f"ingest.sources.0.revision={UNKNOWN}"], {}, "ingest.sources 'fineweb_edu'"),
    "gated": ({}, [], {"HF_TOKEN": ""}, "gated: accept its terms on the Hub and set HF_TOKEN"),
    "column of a source": (
        {"renamed": {"PleIAs/SYNTH": ("synthetic_answer", "reply")}}, [], {}, "no column synthetic_answer"
    ),
    "column of prompts": (
        {"renamed": {"allenai/WildChat-1M": ("conversation", "talk")}}, [], {}, "no prompt in its rows"
    ),
    "another model": ({"vendor": {"models": ("mistral-tiny",)}}, [], {}, "no model 'mistral-large-2512'"),
    "bad key": ({}, [], {"MISTRAL_API_KEY": "wrong-1"}, "endpoints.mistral_large"),
}  # fmt: skip


@pytest.mark.heavy
@SHARED
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_and_nobody_is_paid(rehearsed_once, tmp_path, fault):
    folder, *_ = rehearsed_once
    faults, words, variables, named = FAULTS[fault]
    with world(tmp_path, **faults) as (teachers, mistral, urls, usual):
        ended = rehearse(folder, "nautile_370m", *urls, *words, "--spend", "1.00", **{**usual, **variables})
        assert teachers.bodies + mistral.bodies == []
    result = ended.result()
    assert ended.code == 2
    assert any(named in line for line in result["faults"]), result["faults"]
    assert result["skipped"] == "a fault was found before anything was paid"
    assert "wrong-1" not in ended.out + ended.err


@pytest.mark.heavy
@SHARED
def test_a_low_quota_and_other_languages_are_named_before_anything_is_paid(rehearsed_once, tmp_path):
    folder, *_ = rehearsed_once
    quota = {"limit": (0.25, 6), "states": "mistral"}
    with world(tmp_path, vendor=quota, french=5) as (teachers, mistral, urls, usual):
        ended = rehearse(folder, "nautile_370m", *urls, "--spend", "0", **usual)
        assert teachers.bodies + mistral.bodies == []
    result = ended.result()
    assert (ended.code, result["faults"], result["skipped"]) == (2, [], "--spend 0")
    notes = " ".join(result["notes"])
    assert "38,512 requests (judge) to mistral_large take 43 h at 15 a minute" in notes
    assert "20% of the rows read are in other languages (80% en, 20% fr), and `languages` is not set" in notes
