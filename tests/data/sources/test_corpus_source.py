"""One interface over all readers: the same files and the same rows each time, and a limit that is exact."""

import itertools
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nautile.common.errors import ConfigError
from nautile.configs.base import TaskConfig
from nautile.configs.ingest import SourceConfig, TextTaskConfig
from nautile.configs.keys import with_local_files
from nautile.configs.readers import READERS, reader_versions
from nautile.data.records import SynthRecord, WebRecord
from nautile.data.sources import corpus_source as sources
from nautile.data.sources.corpus_source import list_files, read_file
from nautile.data.sources.hub import SourceFile, read_file_list, write_file_list
from nautile.data.sources.reasoning_gym import derived_seed, problem_split, problems
from nautile.data.sources.wikipedia import articles, web_record
from tests.support.plug_ins import add_plug_in

FRENCH = "Le Rhône prend sa source dans un glacier des Alpes et se jette dans la mer Méditerranée."
TASKS = ({"name": "gsm_symbolic"},)


def source(**fields):
    return SourceConfig(**{"name": "x", "form": "web", **fields})


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def batches_of(config, folder=None):
    files = list_files(config, folder)
    return [batch for file in files for batch in read_file(config, file, folder)]


def records_of(config):
    return [batch.record(i) for batch in batches_of(config) for i in range(len(batch))]


def texts_of(config):
    return [text for batch in batches_of(config) for text in batch.texts()]


@pytest.mark.slow
def test_wikipedia_in_fineweb_edus_form(monkeypatch):
    config = source(reader="wikipedia", records=40)
    records = records_of(config)
    assert len(records) == 40
    first = records[0]
    title, _, text = first.text.partition("\n\n")
    assert text
    assert first.id == f"wikipedia/{title}"
    assert first.url.startswith("https://en.wikipedia.org/wiki/")
    assert (first.language, first.dump, first.score, first.int_score, first.token_count) == (
        "en",
        None,
        None,
        None,
        None,
    )
    whole = list_files(source(reader="wikipedia"), None)
    assert sum(file.rows for file in whole) == len(articles()) > 10_000
    assert len(whole) > 1  # two workers can share it
    monkeypatch.setattr(sources, "ARTICLES_PER_FILE", 15)
    assert [file.rows for file in list_files(config, None)] == [15, 15, 10]
    assert records_of(config) == records


def test_the_first_articles_have_every_topic():
    everything = articles(3)
    assert {a.topic for a in everything[:500]} == {a.topic for a in everything}
    assert len({web_record(a).id for a in everything}) == len(everything)


def test_reasoning_problems_in_synths_form(monkeypatch):
    config = source(reader="reasoning", form="synth", tasks=TASKS, records=12, seed=5)
    records = records_of(config)
    assert len({record.query for record in records}) == 12
    for record, problem in zip(
        records, problems([TaskConfig(**TASKS[0])], derived_seed(5, "x"), "train"), strict=False
    ):
        assert isinstance(record, SynthRecord)
        assert (record.query, record.synthetic_answer) == (problem.question, problem.answer)
        assert (record.synthetic_reasoning, record.exercise) == (problem.rationale, "gsm_symbolic")
    monkeypatch.setattr(sources, "PROBLEMS_PER_FILE", 5)
    assert len(list_files(config, None)) == 3
    assert records_of(config) == records
    with pytest.raises(ConfigError, match="problems without end; set `records`"):
        list_files(source(reader="reasoning", form="synth", tasks=TASKS), None)


def test_training_problems_are_disjoint_from_the_other_splits():
    tasks = [TaskConfig(**task) for task in TASKS]
    splits = {
        split: {p.question for p in itertools.islice(problems(tasks, 0, split), 30)}
        for split in ("train", "reinforce", "guard", "held_out")
    }
    for split, questions in splits.items():
        assert {problem_split(question) for question in questions} == {split}
    trained = {r.query for r in records_of(source(reader="reasoning", form="synth", tasks=TASKS, records=60, seed=9))}
    assert not trained & (splits["reinforce"] | splits["guard"] | splits["held_out"])


def three_files(folder, kind):
    for n in range(3):
        rows = [{"text": f"{n} {i}"} for i in range(4)]
        if kind == "jsonl":
            lines(folder / f"{n}.jsonl", rows)
        else:
            pq.write_table(pa.Table.from_pylist(rows), folder / f"{n}.parquet")
    return source(reader=kind, path=str(folder / f"*.{kind}"))


ALL = [f"{n} {i}" for n in range(3) for i in range(4)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_local_files_are_read_in_name_order(tmp_path, kind):
    config = three_files(tmp_path, kind)
    assert texts_of(config) == ALL
    assert all(isinstance(record, WebRecord) for record in records_of(config))
    files = list_files(config, tmp_path)
    assert [(file.number, file.item, file.rows) for file in files] == [(n, f"0000{n}", None) for n in range(3)]
    assert [file.bytes for file in files] == [(tmp_path / f"{n}.{kind}").stat().st_size for n in range(3)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@given(records=st.integers(1, 14))
def test_a_limit_is_exact_over_files(tmp_path_factory, kind, records):
    config = three_files(tmp_path_factory.mktemp("files"), kind).model_copy(update={"records": records})
    assert texts_of(config) == ALL[:records]
    assert len(list_files(config, None)) == min(3, -(-records // 4))
    assert sum(batch.rows for batch in batches_of(config)) == min(12, records)


def test_a_file_whose_rows_cannot_be_counted_stays_in_the_list(tmp_path):
    config = three_files(tmp_path, "parquet").model_copy(update={"records": 6})
    (tmp_path / "1.parquet").write_bytes(b"cut")
    files = list_files(config, None)
    assert [file.rows for file in files] == [4, 2, 2]
    with pytest.raises(ConfigError, match=r"1\.parquet: is not a Parquet file"):
        list(read_file(config, files[1], None))


def test_a_file_that_changed_since_it_was_listed_is_refused(tmp_path):
    config = three_files(tmp_path, "jsonl")
    files = list_files(config, None)
    lines(tmp_path / "2.jsonl", [{"text": "longer than it was"}] * 9)
    with pytest.raises(ConfigError, match=r"2\.jsonl: has changed since it was listed"):
        list(read_file(config, files[2], None))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_filters_count_what_they_drop(tmp_path, kind):
    rows = [
        {"text": "a", "language": "en", "score": 3.5},
        {"text": "b", "language": "fr", "score": 3.5},
        {"text": FRENCH, "language": None, "score": 3.5},
        {"text": "c", "language": None, "score": 3.5},  # too short to be certain: kept
        {"text": "d", "language": "en", "score": 2.0},
        {"text": "e", "language": "en", "score": None},
        {"text": "", "language": "en", "score": 4.0},
    ]
    if kind == "jsonl":
        lines(tmp_path / "a.jsonl", rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    config = source(reader=kind, path=str(tmp_path / "a.*"), languages=["en"], minimum_score=3.0)
    (batch,) = batches_of(config)
    assert (batch.texts(), batch.rows) == (["a", "c"], 7)
    assert batch.rejected == {"no_text": 1, "language": 2, "score": 2}
    assert batch.record(1).text == "c"


def test_the_language_of_an_exercise_is_not_that_of_its_reasoning(tmp_path):
    """Its column is believed; without one, what was asked and answered tells."""
    thought = {"synthetic_reasoning": "The user wants to know where the river rises, so I recall its source."}
    french = {"query": FRENCH, "synthetic_answer": FRENCH, **thought}
    english = {"query": "Where does the Rhone rise?", "synthetic_answer": "In a glacier of the Alps.", **thought}
    lines(tmp_path / "a.jsonl", [french, english, {**french, "language": "en"}, {**english, "language": "fr"}])
    config = source(reader="jsonl", form="synth", path=str(tmp_path / "a.jsonl"), languages=["en"])
    (batch,) = batches_of(config)
    assert batch.columns["query"] == [english["query"], FRENCH]
    assert batch.rejected == {"language": 2}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_score_that_is_no_number_is_unknown_and_ends_no_file(tmp_path, kind):
    rows = [{"text": f"text {score}", "score": score} for score in ("4.1", "high")]
    if kind == "jsonl":
        lines(tmp_path / "a.jsonl", [*rows, {"text": "text 4", "score": 4}, {"text": "yes", "score": True}])
    else:
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    config = source(reader=kind, path=str(tmp_path / "a.*"), minimum_score=3.0)
    [batch] = batches_of(config)
    assert batch.texts() == (["text 4"] if kind == "jsonl" else [])
    assert batch.rejected["score"] == batch.rows - len(batch)


def test_a_file_with_brackets_in_its_name_is_that_file(tmp_path):
    lines(tmp_path / "part[1].jsonl", [{"text": "one"}])
    lines(tmp_path / "part1.jsonl", [{"text": "other"}])
    assert texts_of(source(reader="jsonl", path=str(tmp_path / "part[1].jsonl"))) == ["one"]


def test_a_file_list_is_read_back_as_it_was_written(tmp_path):
    files = [SourceFile(0, "a/\u2028.parquet", 12, "sha256:00", 0, 7), SourceFile(1, "wikipedia[0:9]", None, "", 0, 9)]
    write_file_list(tmp_path / "files.jsonl", files)
    assert read_file_list(tmp_path / "files.jsonl") == files


def test_a_reader_of_the_other_form_is_refused():
    with pytest.raises(ConfigError, match="reader 'wikipedia' gives form 'web', not 'synth'"):
        list_files(source(reader="wikipedia", form="synth"), None)


def test_generated_problems_differ_by_seed_and_by_source(tmp_path):
    source = SourceConfig(
        name="s",
        reader="reasoning",
        form="synth",
        records=400,
        tasks=(TextTaskConfig(name="chain_sum", parameters={"min_terms": 4, "max_terms": 4}),),
    )
    (file,) = list_files(source, tmp_path)
    (batch,) = read_file(source, file, tmp_path)
    assert {text.count(" = ") for text in batch.columns["synthetic_reasoning"]} == {3}
    assert all(batch.columns["synthetic_answer"])
    for change in ({"seed": 1}, {"name": "t"}):  # another seed, and another source of the same generators
        (others,) = read_file(source.model_copy(update=change), file, tmp_path)
        assert len(set(others.columns["query"]) & set(batch.columns["query"])) < 40


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{\n  "text": "one"\n}\n{\n  "text": "two"\n}\n', r"none of its 6 rows can be read \(6 not_json\): .*jq -c"),
        (b'[{"text": "one"}, {"text": "two"}]\n', r"none of its 1 rows can be read \(1 not_an_object\)"),
        (b'{"text": "one"}\r{"text": "two"}\r', r"none of its 1 rows can be read \(1 not_json\)"),
        ('{"text": "zw\u00f6lf"}\n'.encode("cp1252"), r"\(1 invalid_utf8\): .*iconv -f WINDOWS-1252"),
        (b'{"text": 1}\n{"text": ""}\n', r"\(1 wrong_type, 1 no_text\): the columns of texts"),
    ],
)
def test_a_file_without_a_single_readable_row_is_refused_and_does_not_vanish(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n')
    (tmp_path / "b.jsonl").write_bytes(content)
    config = source(reader="jsonl", path=f"{tmp_path}/*.jsonl")
    good, bad = list_files(config, tmp_path / "fetching")
    assert [text for batch in read_file(config, good, tmp_path) for text in batch.texts()] == ["good"]
    with pytest.raises(ConfigError, match=rf"b\.jsonl: .*{message}"):
        list(read_file(config, bad, tmp_path))


def test_rows_without_a_text_are_only_counted(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"id": "7"}\n')
    config = source(reader="jsonl", path=f"{tmp_path}/a.jsonl")
    (batch,) = read_file(config, list_files(config, tmp_path / "fetching")[0], tmp_path)
    assert (len(batch), batch.rejected) == (0, {"no_text": 2})


@pytest.mark.parametrize("change", ["grows", "vanishes"])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, change):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n' * 2000)
    config = source(reader="jsonl", path=str(path))
    batches = read_file(config, list_files(config, tmp_path / "fetching")[0], tmp_path)
    next(batches)
    if change == "grows":
        with path.open("a") as file:
            file.write('{"text": "more"}\n')
    else:
        path.unlink()
    with pytest.raises(ConfigError, match=r"a\.jsonl: changed while it was read"):
        list(batches)


@pytest.mark.parametrize("reader", ["jsonl", "parquet"])
def test_a_field_is_read_from_the_column_that_the_source_names(tmp_path, reader):
    rows = [{"body": "eins", "text": "another", "lang": "de"}, {"body": "one", "text": "another", "lang": "en"}]
    path = tmp_path / f"a.{reader}"
    lines(path, rows) if reader == "jsonl" else pq.write_table(pa.Table.from_pylist(rows), path)
    named = {"reader": reader, "path": str(path), "languages": ("de",)}
    config = source(columns={"text": "body", "language": "lang"}, **named)
    assert [(record.text, record.language) for record in records_of(config)] == [("eins", "de")]
    with pytest.raises(ConfigError, match=r"columns: form 'web' has no field 'texts', but text, id,"):
        list_files(source(columns={"texts": "body"}, **named), tmp_path)
    with pytest.raises(ConfigError, match=r"two of the texts are read from the column 'query'"):
        list_files(source(form="synth", columns={"synthetic_answer": "query"}, reader=reader, path=str(path)), tmp_path)
    with pytest.raises(ValueError, match=r"reader 'wikipedia' has no columns to name"):
        source(reader="wikipedia", columns={"text": "body"})


PLUGGED = """
from nautile.configs.readers import Reader
from nautile.data.records import Rejected


def rows(path):
    for line in open(path):
        if line == "broken\\n":
            raise KeyError(path)
        yield Rejected("not_json") if line == "?\\n" else {"body": line.strip(), "id": path}


lines = Reader(rows=rows)
letters = Reader(rows=lambda name: [{"body": name}, name], files=lambda path: path.split("+"))
"""


def test_a_plug_ins_reader_has_row_numbers_a_limit_and_reasons_as_the_others(monkeypatch, tmp_path):
    entry = add_plug_in(monkeypatch, tmp_path, READERS, "lines", PLUGGED)
    (tmp_path / "a.txt").write_text("one\n?\n\nfour\n")
    (tmp_path / "b.txt").write_text("five\nsix\n")
    config = source(reader="lines", path=f"{tmp_path}/*.txt", columns={"text": "body"})
    batches = batches_of(config, tmp_path)
    assert [(batch.rows, batch.texts(), dict(batch.rejected)) for batch in batches] == [
        (4, ["one", "four"], {"not_json": 1, "no_text": 1}),
        (2, ["five", "six"], {}),
    ]
    assert texts_of(config.model_copy(update={"records": 5})) == ["one", "four", "five"]
    assert reader_versions("lines") == {"lines": entry.digest}
    section = {"ingest": {"row_length": 8, "source": config.model_dump(mode="json")}}
    assert len(with_local_files(section)["local_files"][config.path]) == 2
    (tmp_path / "c.txt").write_text("broken\n")
    with pytest.raises(ConfigError, match=r"c\.txt: cannot be read by reader 'lines' \(KeyError: "):
        batches_of(config, tmp_path)


def test_a_plug_ins_reader_may_list_names_that_are_no_files(monkeypatch, tmp_path):
    add_plug_in(monkeypatch, tmp_path, READERS, "letters", PLUGGED)
    config = source(reader="letters", path="a+b", columns={"text": "body"})
    assert texts_of(config) == ["a", "b"]
    assert [dict(batch.rejected) for batch in batches_of(config)] == [{"not_an_object": 1}] * 2
    section = {"ingest": {"row_length": 8, "source": config.model_dump(mode="json")}}
    assert with_local_files(section) == section
