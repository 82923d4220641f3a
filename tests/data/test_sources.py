"""One interface over all readers: the same order each time, from any position."""

import itertools
import json

import pytest

from configs.schema import SourceConfig, TaskConfig
from configs.section import ConfigError
from data.chat import turn_of
from data.hub import read_hub
from data.reasoning import problems, split_of
from data.records import SynthRecord, WebRecord
from data.sources import read, rows_in, scan
from data.wikipedia import articles, web_record

TASKS = ({"name": "gsm_symbolic"},)


def source(**fields):
    return SourceConfig(**{"name": "x", "form": "web", **fields})


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_wikipedia_in_fineweb_edus_form():
    config = source(reader="wikipedia", records=40)
    records = list(read(config, 0))
    assert len(records) == rows_in(config, 0) == 40
    one = records[0]
    title, _, text = one.text.partition("\n\n")
    assert text
    assert one.id == f"wikipedia/{title}"
    assert one.url.startswith("https://en.wikipedia.org/wiki/")
    assert (one.language, one.dump, one.score, one.int_score, one.token_count) == ("en", None, None, None, None)
    assert rows_in(source(reader="wikipedia"), 0) == len(articles()) > 10_000
    assert [r.text for r in read(config, 1)] != [r.text for r in records]
    assert list(itertools.islice(scan(config, 0, 25), 15)) == records[25:]


def test_every_topic_is_in_a_beginning_of_the_articles():
    everything = articles(3)
    assert {a.topic for a in everything[:500]} == {a.topic for a in everything}
    assert len({web_record(a).id for a in everything}) == len(everything)


def test_reasoning_problems_in_synths_form():
    config = source(reader="reasoning", form="synth", tasks=TASKS, records=12)
    records = list(read(config, 5))
    assert len({record.query for record in records}) == rows_in(config, 5) == 12
    for record, problem in zip(records, problems([TaskConfig(**TASKS[0])], 5, "train"), strict=False):
        assert isinstance(record, SynthRecord)
        assert (record.query, record.synthetic_answer) == (problem.question, problem.answer)
        assert (record.synthetic_reasoning, record.exercise) == (problem.rationale, "gsm_symbolic")
        assert turn_of(record).answer == problem.answer
    assert list(itertools.islice(scan(config, 5, 7), 5)) == records[7:]


def test_training_problems_are_disjoint_from_the_other_splits():
    tasks = [TaskConfig(**task) for task in TASKS]
    splits = {
        split: {p.question for p in itertools.islice(problems(tasks, 0, split), 30)}
        for split in ("train", "guard", "held_out")
    }
    for split, questions in splits.items():
        assert {split_of(question) for question in questions} == {split}
    trained = {r.query for r in read(source(reader="reasoning", form="synth", tasks=TASKS, records=60), 9)}
    assert not trained & (splits["guard"] | splits["held_out"])


def test_local_files_are_read_in_name_order(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    for n in range(3):
        lines(tmp_path / f"{n}.jsonl", [{"text": f"{n} {i}"} for i in range(4)])
        pq.write_table(pa.table({"text": [f"{n} {i}" for i in range(4)]}), tmp_path / f"{n}.parquet")
    for reader, kind in (("jsonl", "jsonl"), ("parquet", "parquet")):
        config = source(reader=reader, path=str(tmp_path / f"*.{kind}"), records=10)
        records = list(read(config, 0))
        assert [r.text for r in records] == [f"{n} {i}" for n in range(3) for i in range(4)][:10]
        assert [r.text for r in scan(config, 0, 6)] == [f"{n} {i}" for n in range(3) for i in range(4)][6:]
        assert all(isinstance(r, WebRecord) for r in records)
    assert rows_in(source(reader="parquet", path=str(tmp_path / "*.parquet")), 0) == 12
    assert rows_in(source(reader="jsonl", path=str(tmp_path / "*.jsonl")), 0) is None


def test_a_reader_of_the_other_form_is_refused():
    with pytest.raises(ConfigError, match="reader 'wikipedia' gives form 'web', not 'synth'"):
        scan(source(reader="wikipedia", form="synth"), 0)


def test_a_branch_name_is_no_pinned_revision():
    with pytest.raises(ConfigError, match="revision 'main' is not a full commit hash"):
        next(read_hub(source(reader="hub", path="org/set", revision="main")))
