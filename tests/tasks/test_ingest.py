"""The ingest stage on both offline readers and on bad files: artifacts, facts, metrics."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nautile.common.errors import ConfigError
from nautile.configs.model import TokenizerConfig
from nautile.data.sources.local_files import read_jsonl
from nautile.data.tokens.loader import Loader
from nautile.tasks.engine.job import Job
from nautile.tasks.ingest import ingest
from tests.support.stages.in_process import run_in_process


def work(job, **how):
    run_in_process(ingest, job, **how)


def job(staging, events, **source):
    section = {
        "tokenizer": {"ranks": 400},
        "ingest": {"row_length": 128, "source": {"name": "corpus", "records": 60, **source}},
    }
    return Job("ingest", "key", "execution", section, {}, staging, lambda kind, **fields: events.append((kind, fields)))


def facts(staging, kind):
    return json.loads((staging / "facts" / f"{kind}.json").read_text())


@pytest.mark.slow
def test_synth_gives_tokens_and_exemplars(tmp_path):
    events = []
    work(job(tmp_path, events, reader="reasoning", form="synth", tasks=[{"name": "gsm_symbolic"}], exemplars=7))
    described = facts(tmp_path, "tokens")
    assert described["records"] == described["documents"] == 60
    assert described["stand_in"] == "reasoning-gym problems with worked rationales, in place of SYNTH"
    assert len(described["samples"]) == 3
    assert "tokens_per_second" not in described  # a manifest holds nothing that differs from run to run
    exemplars = list(read_jsonl([tmp_path / "output" / "exemplars" / "exemplars.jsonl"], "synth"))
    assert len(exemplars) == facts(tmp_path, "exemplars")["records"] == 7
    measured = {fields["name"]: fields["value"] for kind, fields in events if kind == "metric"}
    assert measured["tokens"] == described["tokens"]
    assert measured["tokens_per_second"] > 0
    rows = Loader({"corpus": tmp_path / "output" / "tokens"}, (), 4, 0, TokenizerConfig(ranks=400))
    assert rows.row_length == 128


def test_web_gives_tokens_alone(tmp_path):
    work(job(tmp_path, [], reader="wikipedia", form="web", exemplars=7))
    assert sorted(path.name for path in (tmp_path / "output").iterdir()) == ["signatures", "tokens"]
    described = facts(tmp_path, "tokens")
    assert "CC BY-SA 4.0" in described["stand_in"]
    assert 2 < described["disk_bytes_per_token"] <= 2.1
    assert (described["cropped"], described["files"], described["files_skipped"]) == (0, 1, 0)


def state(staging):
    files = [path for folder in ("output", "facts") for path in sorted((staging / folder).rglob("*"))]
    return {str(path.relative_to(staging)): path.read_bytes() for path in files if path.is_file()}


def test_a_second_attempt_changes_nothing(tmp_path):
    fields = {"reader": "wikipedia", "form": "web", "rows_per_shard": 20}
    work(job(tmp_path, [], **fields))
    before = state(tmp_path)
    work(job(tmp_path, [], **fields))
    assert state(tmp_path) == before


@pytest.fixture
def parquet(tmp_path):
    """Five files of 40 documents; one document is in two of them."""
    folder = tmp_path / "files"
    folder.mkdir()
    for n in range(5):
        texts = [f"{n} {row} " + "foam and tide " * (row % 7) for row in range(40)]
        pq.write_table(pa.table({"text": [*texts[:39], "the same everywhere"]}), folder / f"{n}.parquet")
    return {"reader": "parquet", "form": "web", "path": str(folder / "*.parquet"), "records": None}


def test_any_order_of_units_gives_the_same_bytes(tmp_path, parquet):
    work(job(tmp_path / "one", [], **parquet))
    work(job(tmp_path / "two", [], **parquet), order=lambda units: units[::-1])
    assert state(tmp_path / "one") == state(tmp_path / "two")
    described = facts(tmp_path / "one", "tokens")
    assert (described["records"], described["documents"], described["rejected"]) == (200, 196, {"duplicate": 4})
    listed = [json.loads(line) for line in (tmp_path / "one/output/tokens/files.jsonl").read_text().splitlines()]
    assert [(row["rows_read"], row["documents"]) for row in listed] == [(40, 40)] * 5
    assert not list((tmp_path / "one" / "scratch").rglob("tokens.*"))  # nothing is kept twice


def test_a_file_that_stays_bad_is_skipped_up_to_the_share(tmp_path, parquet):
    bad = tmp_path / "files" / "2.parquet"
    bad.write_bytes(bad.read_bytes()[:-50])
    with pytest.raises(ConfigError, match=r"2\.parquet: is not a Parquet file"):
        work(job(tmp_path / "strict", [], **parquet))
    events = []
    work(job(tmp_path / "lenient", events, **parquet, bad_files_share=0.2))
    described = facts(tmp_path / "lenient", "tokens")
    assert (described["files"], described["files_skipped"], described["records"]) == (5, 1, 160)
    assert list(described["skipped"]) == [str(bad)]
    assert "is not a Parquet file" in described["skipped"][str(bad)]
    listed = [json.loads(line) for line in (tmp_path / "lenient/output/tokens/files.jsonl").read_text().splitlines()]
    outcomes = [("skipped" in row, "rows_read" in row) for row in listed]
    assert outcomes == [(n == 2, n != 2) for n in range(5)]
    assert ("metric", {"name": "files_skipped", "step": 0, "value": 1}) in events


def test_what_is_lost_is_said_in_the_last_line_and_in_the_facts(tmp_path):
    """Whatever cannot be read: files and rows, with the reason and the path."""
    folder = tmp_path / "files"
    folder.mkdir()
    good = "".join(json.dumps({"text": f"document {n} of the corpus"}) + "\n" for n in range(40))
    (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + good.encode())
    (folder / "b.jsonl").write_bytes(b'{"text": "whole"}\n{"text": \n{"text": "zw\xf6lf"}\n')
    (folder / "c.jsonl").write_text('{\n  "text": "pretty"\n}\n')
    events = []
    config = {"reader": "jsonl", "form": "web", "path": f"{folder}/*.jsonl", "records": None}
    work(job(tmp_path / "staging", events, **config, bad_files_share=0.5))
    described = facts(tmp_path / "staging", "tokens")
    assert described["records"] == 43
    assert described["documents"] == 41
    line = (
        f"lost: 1 of 3 files ({folder}/c.jsonl: none of its 3 rows can be read (3 not_json): each line has to be one "
        "JSON object; `jq -c . FILE` writes one that is spread over lines so); "
        f"2 of 43 rows (1 invalid_utf8, 1 not_json; in {folder}/b.jsonl)"
    )
    assert described["lost"] == line
    assert [fields for kind, fields in events if kind == "progress"][-1]["note"] == line
    with pytest.raises(ConfigError, match=r"c\.jsonl: none of its 3 rows can be read"):
        work(job(tmp_path / "strict", [], **config))


@pytest.mark.parametrize("content", [b"", b"\x00\x01\x02", b'{"text": ""}\n'])
def test_a_bad_file_is_refused_by_name_or_reason(tmp_path, content):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad\.jsonl|no usable record for training in the source \(1 no_text\)"):
        work(job(tmp_path / "staging", [], reader="jsonl", form="web", path=str(path)))


def test_realistic_documents_take_2_1_bytes_a_token_or_4_1(tmp_path):
    """Everything in the artifact but the exemplars counts: shards, index with its digests, the list of files."""
    for ranks, most in ((2048, 2.1), (100_256, 4.1)):
        result = job(tmp_path / str(ranks), [], reader="wikipedia", form="web", records=600)
        result.section["tokenizer"]["ranks"] = ranks
        result.section["ingest"]["row_length"] = 1024
        work(result)
        files = [path for path in result.output("tokens").rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in files) <= most * facts(result.staging, "tokens")["tokens"]


@pytest.mark.slow
def test_planted_mistakes_are_shown_with_what_a_perfect_learner_solves(tmp_path):
    events = []
    slips = {"misconceived": 0.3, "seed": 1}
    work(job(tmp_path, events, reader="reasoning", form="synth", tasks=[{"name": "chain_sum", "slips": slips}]))
    described = facts(tmp_path, "tokens")
    bound = described["slips"]["chain_sum"]["greedy_accuracy"]
    assert 0 < bound < 1
    learner = f"a model that learns the mistakes perfectly solves {bound:.0%} of chain_sum greedily"
    assert described["stand_in"].endswith(f"in place of a corpus with gaps in knowledge; {learner}")
    assert [fields["note"] for kind, fields in events if kind == "progress"][-1] == learner
