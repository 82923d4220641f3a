"""The tokenizer stage: what it reads of each source, what it measures, and what it refuses."""

import json

import pytest

from nautile.common.errors import ConfigError
from nautile.data.bpe_training import bytes_per_token_rows
from nautile.tasks.engine.job import Job
from nautile.tasks.tokenizer import tokenizer, tokenizer_of

ENGLISH = "The tide comes in twice a day, and the fishermen know it well."
RECORDS = [{"text": f"{ENGLISH} Day {n} of {7 * n}.", "language": "en"} for n in range(200)]


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def work(staging, sources, megabytes, ranks=290, digits=1):
    named = {name: {"name": name, "reader": "jsonl", "form": "web", **fields} for name, fields in sources.items()}
    section = {"tokenizer": {"ranks": ranks, "train": {"megabytes": megabytes, "digits": digits}}, "sources": named}
    tokenizer.work(Job("tokenizer", "key", "e", section, {}, staging, lambda kind, **fields: None))
    return json.loads((staging / "facts" / "tokenizer.json").read_text())


def test_the_first_rows_of_each_source_are_read_as_ingestion_reads_them(tmp_path):
    path = lines(tmp_path / "web.jsonl", [*RECORDS, {"text": ENGLISH * 999, "language": "en"}])
    french = [{"text": "La mer monte.", "language": "fr"}, {"text": ENGLISH, "language": "en"}] * 4
    asked = {"query": "When is high tide?", "synthetic_reasoning": "Twice a day.", "synthetic_answer": "At noon."}
    sources = {
        "web": {"path": path},
        "few": {"path": lines(tmp_path / "few.jsonl", french), "languages": ["en"]},
        "synth": {"path": lines(tmp_path / "synth.jsonl", [asked]), "form": "synth"},
    }
    facts = work(tmp_path / "one", sources, {"web": 0.01, "few": 1, "synth": 1})
    assert 10_000 <= facts["sample"]["web"]["bytes"] < 10_200  # the long row is behind the limit
    assert facts["sample"]["few"] == {"documents": 4, "bytes": 4 * len(ENGLISH), "rejected": {"language": 4}}
    assert facts["sample"]["synth"]["bytes"] == sum(map(len, asked.values()))
    columns, rows = bytes_per_token_rows(facts)
    assert columns == ("Source", "290 trained ranks", "cl100k_base's first 290", "cl100k_base, whole")
    measured = {source: values for source, *values in rows}
    assert measured["few"] == measured["synth"] == ["not measured"] * 3  # too few documents to set any aside
    assert float(measured["web"][0]) > float(measured["web"][1]) > 1
    again = work(tmp_path / "two", sources, {"web": 0.01, "few": 1, "synth": 1})
    assert again == facts


def test_ingestion_has_it_from_its_input_and_else_from_its_section(tmp_path):
    facts = work(tmp_path, {"web": {"path": lines(tmp_path / "web.jsonl", RECORDS)}}, {"web": 1})
    own = Job("ingest", "key", "e", {}, {"tokenizer": tmp_path / "output" / "tokenizer"}, tmp_path, [].append)
    assert tokenizer_of(own).fields == {"ranks": 290, "trained": facts["trained"]}
    usual = Job("ingest", "key", "e", {"tokenizer": {"ranks": 400}}, {}, tmp_path, [].append)
    assert tokenizer_of(usual).fields == {"ranks": 400}


def test_a_source_without_text_and_a_sample_without_enough_are_refused(tmp_path):
    web = {"path": lines(tmp_path / "web.jsonl", RECORDS)}
    with pytest.raises(ConfigError, match=r"source 'web' has no usable text \(200 language\)"):
        work(tmp_path / "one", {"web": {**web, "languages": ["de"]}}, {"web": 1})
    with pytest.raises(ConfigError, match=r"the sample is enough for 300 ranks, not 9,000: raise `megabytes`"):
        work(tmp_path / "two", {"web": web}, {"web": 1}, ranks=9000)
