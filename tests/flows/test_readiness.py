"""What only the operator can give before a run: listed, without a request to any endpoint."""

import json
import socket

import pytest

from nautile.common.errors import ConfigError, Retryable
from nautile.configs.load import load
from nautile.configs.operation import OperationConfig
from nautile.configs.schema import RunConfig
from nautile.flows import readiness
from nautile.flows.dag import pipeline_steps
from nautile.flows.readiness import (
    has_prompt_files,
    missing_settings,
    missing_webhook,
    price_differences,
    refuse_missing_rows,
)

CONFIG = load("nautile_370m")
VARIABLES = ("GPT_OSS_API_KEY", "MISTRAL_API_KEY", "HF_TOKEN")


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setattr(readiness, "getproxies", dict)


@pytest.fixture
def nothing_answers(monkeypatch):
    def refuse(address, timeout):
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(socket, "create_connection", refuse)


def test_an_address_for_messages_that_is_not_there_is_named(monkeypatch):
    monkeypatch.delenv("CHAT", raising=False)
    assert missing_webhook(OperationConfig()) == []
    (line,) = missing_webhook(OperationConfig(notify="CHAT"))
    assert line.startswith("CHAT is not set in the environment: operation.notify")
    monkeypatch.setenv("CHAT", "http://127.0.0.1:9/x")
    assert missing_webhook(OperationConfig(notify="CHAT")) == []


def changed(section, update, config=CONFIG):
    plain = config.model_dump(mode="json")
    plain[section] = {**plain[section], **update}
    return pipeline_steps(RunConfig.model_validate(plain))


def with_sets(*sets, prompts=20):
    return changed("distill", {"prompts": prompts, "prompt_sets": sets})


def test_the_papers_run_lacks_keys_and_servers_and_nothing_else(monkeypatch, nothing_answers):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    steps = pipeline_steps(CONFIG)
    lines = missing_settings(steps)
    assert lines[0] == "HF_TOKEN is not set: gpqa_diamond is gated, accept its terms on the Hub first"
    assert lines[1:3] == [
        "GPT_OSS_API_KEY is not set in the environment: the key of endpoints.gpt_oss_120b, endpoints.gpt_oss_20b",
        "MISTRAL_API_KEY is not set in the environment: the key of endpoints.mistral_large",
    ]
    assert [line.partition(" (")[0] for line in sorted(lines[3:])] == [
        f"nothing answers at http://127.0.0.1:{port}/v1" for port in (8001, 8002, 8003)
    ]
    assert sorted(lines[3:])[0].endswith("serve openai/gpt-oss-20b there, or set endpoints.gpt_oss_20b.url")
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "x")
    monkeypatch.setattr(socket, "create_connection", lambda address, timeout: socket.socket())
    assert missing_settings(steps) == []


def test_what_was_left_open_in_the_sections_is_named(nothing_answers):
    plain = CONFIG.model_dump(mode="json")
    plain["ingest"]["sources"][0]["revision"] = ""
    plain["distill"]["prompt_sets"][0]["revision"] = "main"
    lines = missing_settings(pipeline_steps(RunConfig.model_validate(plain)))
    assert "source 'fineweb_edu': set `revision` to a commit of HuggingFaceFW/fineweb-edu" in lines
    assert any(
        line.startswith("prompt set 'instruction': `revision` 'main' is not a full commit hash") for line in lines
    )


def test_a_local_file_that_is_not_there_is_named_with_what_reads_it(tmp_path):
    """`nautile plan` makes no keys, for which the files are read: it would say that nothing is missing."""
    here = tmp_path / "here.jsonl"
    here.write_text("{}\n")
    source = {"name": "own", "reader": "jsonl", "form": "web", "path": f"{tmp_path}/*.parquet"}
    mixture = {"phases": [{"name": "own", "tokens": 102_400, "mixture": {"own": 1.0}}]}
    benchmarks = [{"name": "gsm8k", "path": str(tmp_path / "gone.jsonl")}, {"name": "piqa", "path": str(here)}]
    plain = load("local").model_dump(mode="json")
    plain |= {"distill": None, "index": None, "ingest": plain["ingest"] | {"sources": [source]}}
    plain["pretrain"] |= mixture
    plain["evaluate"] |= {"benchmarks": benchmarks}
    plain["held_out"] = {"benchmarks": benchmarks[:1]}
    plain["reason"]["problems"] = {"source": "jsonl", "path": "/no/such/file.jsonl", "count": 8}
    assert missing_settings(pipeline_steps(RunConfig.model_validate(plain))) == [
        f"no file matches '{tmp_path}/gone.jsonl' here, a path of held_out, evaluate",
        f"no file matches '{tmp_path}/*.parquet' here, a path of ingest",
        "no file matches '/no/such/file.jsonl' here, a path of reason",
    ]


def test_a_price_that_the_vendor_does_not_list_is_named():
    assert price_differences(pipeline_steps(CONFIG)) == [], "of one's own servers there is no list"
    endpoints = CONFIG.model_dump(mode="json")["endpoints"]
    endpoints["mistral_large"]["dollars_per_million_in"] = 0.4
    endpoints["gpt_oss_20b"]["url"] = "https://api.groq.com/openai/v1"
    lines = price_differences(changed("endpoints", endpoints))
    assert len(lines) == 2
    assert any(
        line.startswith(
            "endpoints.mistral_large: $0.4 and $1.5 a million tokens in and out are configured for mistral-large-2512, "
            "Mistral lists $0.5 and $1.5"
        )
        for line in lines
    )


def test_shares_that_the_sets_cannot_give_are_refused(tmp_path):
    path = tmp_path / "few.jsonl"
    path.write_text("".join(json.dumps({"query": f"{n}?"}) + "\n" for n in range(7)))
    own = {"name": "own", "source": "jsonl", "path": str(path)}
    with pytest.raises(ConfigError, match="prompt set 'own' has 7 rows, 20 asked"):
        refuse_missing_rows(with_sets(own))
    assert refuse_missing_rows(with_sets(own, prompts=7)) == []


def test_a_hub_that_does_not_answer_is_no_reason_to_refuse(monkeypatch, nothing_answers):
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    monkeypatch.setattr(readiness, "count_prompt_rows", lambda *arguments: pytest.fail("it was asked"))
    steps = pipeline_steps(CONFIG)
    (line,) = refuse_missing_rows(steps)
    assert line == "rows of the prompt sets not counted: https://huggingface.co does not answer (refused)"
    assert [step.label for step in steps if has_prompt_files(step)] == ["distill"]
    assert not any(map(has_prompt_files, pipeline_steps(load("local"))))


def test_a_set_of_the_hub_that_is_too_small_is_refused(monkeypatch):
    counts = {"instruction": 939_343, "conversation": 837_989, "creative_writing": 60_000}

    def count(source, work):
        if source.name not in counts:
            raise Retryable("the Hub did not answer")
        return counts[source.name]

    monkeypatch.setattr(readiness, "connection_error", lambda url: None)
    monkeypatch.setattr(readiness, "count_prompt_rows", count)
    steps = pipeline_steps(CONFIG)
    with pytest.raises(ConfigError, match="cannot be met: prompt set 'creative_writing' has 60,000 rows, 67,000 asked"):
        refuse_missing_rows(steps)
    counts["creative_writing"] = 272_600
    assert refuse_missing_rows(steps) == ["rows not counted: the Hub did not answer"] * 2


def test_a_login_at_the_hub_is_a_token_too(monkeypatch, nothing_answers, tmp_path):
    """`hf auth login` stores a token in a file, which the Hub's client reads where HF_TOKEN is not set."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    lines = [line for line in missing_settings(pipeline_steps(CONFIG)) if "gated" in line]
    assert len(lines) == 1
    (tmp_path / "token").write_text("hf_stored")
    assert not [line for line in missing_settings(pipeline_steps(CONFIG)) if "gated" in line]
