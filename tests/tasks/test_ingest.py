"""The ingest stage on both offline readers and on bad files: artifacts, facts, metrics."""

import json

import pytest

from configs.schema import TokenizerConfig
from configs.section import ConfigError
from data.files import read_jsonl
from data.loader import Loader
from tasks.ingest import ingest
from tasks.job import Job


def job(staging, events, **source):
    section = {
        "seed": 1,
        "tokenizer": {"ranks": 400},
        "ingest": {"row_length": 128, "source": {"name": "corpus", "records": 60, **source}},
    }
    return Job("ingest", "key", "execution", section, {}, staging, lambda kind, **fields: events.append((kind, fields)))


def facts(staging, kind):
    return json.loads((staging / "facts" / f"{kind}.json").read_text())


def test_synth_gives_tokens_and_exemplars(tmp_path):
    events = []
    ingest.work(job(tmp_path, events, reader="reasoning", form="synth", tasks=[{"name": "gsm_symbolic"}], exemplars=7))
    told = facts(tmp_path, "tokens")
    assert told["records"] == told["documents"] == 60
    assert told["stand_in"] == "reasoning-gym problems with worked rationales, in place of SYNTH"
    assert len(told["samples"]) == 3
    assert "tokens_per_second" not in told  # a manifest holds nothing that another run would measure otherwise
    exemplars = list(read_jsonl([tmp_path / "output" / "exemplars" / "exemplars.jsonl"], "synth"))
    assert len(exemplars) == facts(tmp_path, "exemplars")["records"] == 7
    measured = {fields["name"]: fields["value"] for kind, fields in events if kind == "metric"}
    assert measured["tokens"] == told["tokens"]
    assert measured["tokens_per_second"] > 0
    assert {"kind": "progress", "done": 60} in [{"kind": k, "done": f.get("done")} for k, f in events]
    rows = Loader({"corpus": tmp_path / "output" / "tokens"}, (), 4, 0, TokenizerConfig(ranks=400))
    assert rows.row_length == 128


def test_web_gives_tokens_alone(tmp_path):
    ingest.work(job(tmp_path, [], reader="wikipedia", form="web", exemplars=7))
    assert [path.name for path in (tmp_path / "output").iterdir()] == ["tokens"]
    told = facts(tmp_path, "tokens")
    assert "CC BY-SA 4.0" in told["stand_in"]
    assert 2 < told["disk_bytes_per_token"] <= 2.1
    assert told["cropped"] == 0


def test_a_second_attempt_changes_nothing(tmp_path):
    fields = {"reader": "wikipedia", "form": "web", "rows_per_shard": 20}
    ingest.work(job(tmp_path, [], **fields))

    def state():
        files = [path for folder in ("output", "facts") for path in sorted((tmp_path / folder).rglob("*"))]
        return {path: path.read_bytes() for path in files if path.is_file()}

    before = state()
    events = []
    ingest.work(job(tmp_path, events, **fields))
    assert state() == before
    assert "tokens_per_second" not in {fields["name"] for kind, fields in events if kind == "metric"}


@pytest.mark.parametrize("content", [b"", b"\x00\x01\x02", b'{"text": ""}\n'])
def test_a_bad_file_is_refused_by_name_or_reason(tmp_path, content):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad\.jsonl|no usable record for training in the source \(1 no_text\)"):
        ingest.work(job(tmp_path / "staging", [], reader="jsonl", form="web", path=str(path)))
