"""Parquet and JSON lines: positions hold, bad rows are counted, unusable files are refused by name."""

import bz2
import gzip
import json
from collections import Counter, deque
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nautile.common.errors import ConfigError
from nautile.configs.ingest import SourceConfig
from nautile.data.records import BATCH_ROWS, TEXT_COLUMNS, Rejected, SynthRecord, WebRecord, from_dict, to_batch
from nautile.data.sources import local_files as files
from nautile.data.sources.corpus_source import list_files, read_file
from nautile.data.sources.local_files import (
    count_jsonl_rows,
    count_parquet_rows,
    is_parquet,
    matching_files,
    read_json_values,
    read_jsonl,
    read_parquet_batches,
    read_parquet_values,
)


def texts(rows):
    return [row.text if isinstance(row, WebRecord) else row.reason for row in rows]


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [b'{"text": "one"}', b"", b"{broken", b'{"text": "\xff\xfe"}', b"[1]", b'{"text": "two"}']
    path.write_bytes(b"\n".join(lines))
    return path


def test_jsonl_rows_and_reasons(jsonl):
    assert texts(read_jsonl([jsonl], "web")) == ["one", "not_json", "invalid_utf8", "not_an_object", "two"]
    assert count_jsonl_rows(jsonl) == 5


@given(skip=st.integers(0, 12))
def test_skipping_is_the_same_as_reading_past(tmp_path_factory, skip):
    folder = tmp_path_factory.mktemp("files")
    paths = []
    for name in ("a", "b"):
        path = folder / f"{name}.jsonl"
        path.write_text("\n".join([json.dumps({"text": f"{name}{n}"}) for n in range(4)] + ["{bad"]))
        paths.append(path)
    assert list(read_jsonl(paths, "web", skip)) == list(read_jsonl(paths, "web"))[skip:]


def test_a_line_of_ten_megabytes_is_counted_without_being_held_in_memory(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "%s"}\n{"text": "after"}\n' % (b"x" * 10_000_000))
    assert texts(read_jsonl([path], "web")) == ["too_long", "after"]
    monkeypatch.setattr(files, "MAX_LINE", 1_000_000)
    assert texts(read_jsonl([path], "web")) == ["too_long", "after"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"\n" * 100_000, "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"\x7fELF\x00\x00", "is binary, not JSON lines"),
        ('{"text": "one"}'.encode("utf-16"), "is UTF-16, not UTF-8: `iconv"),
        ('{"text": "one"}'.encode("utf-16-le"), "is binary, not JSON lines"),
        (b'[\n{"text": "one"},\n{"text": "two"}\n]', "is one JSON array, which cannot be read line by line"),
    ],
)
def test_unusable_lines_files(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"a\.jsonl: {message}"):
        list(read_jsonl([path], "web"))


def test_missing_files_and_folders(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.jsonl: cannot be read \(No such file"):
        list(read_jsonl([tmp_path / "gone.jsonl"], "web"))
    with pytest.raises(ConfigError, match=r"no file matches '.*\*\.parquet'"):
        matching_files(str(tmp_path / "*.parquet"))
    with pytest.raises(ConfigError, match="is a folder; give a glob"):
        matching_files(str(tmp_path))


@pytest.fixture
def parquet(tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [f"text {n}" if n % 4 else None for n in range(20)], "id": [str(n) for n in range(20)]})
    pq.write_table(table, path, row_group_size=6)
    return path


@pytest.mark.parametrize("rows", [None, 0, 6, 13, 25])
def test_the_first_rows_of_a_parquet_file(parquet, rows):
    batches = list(read_parquet_batches(parquet, "web", record_columns=["id"], rows=rows))
    first = range(20 if rows is None else min(rows, 20))
    assert sum(batch.rows for batch in batches) == len(first)
    assert all(batch.total == len(first) for batch in batches)
    assert [text for batch in batches for text in batch.texts()] == [f"text {n}" for n in first if n % 4]
    assert sum((batch.rejected for batch in batches), Counter()) == Counter(
        {"no_text": len([n for n in first if n % 4 == 0])}
    )
    records = [batch.record(i) for batch in batches for i in range(len(batch))]
    assert records == [WebRecord(f"text {n}", id=str(n)) for n in first if n % 4]
    assert count_parquet_rows(parquet) == 20


def test_parquet_text_that_is_not_utf8_is_counted(tmp_path):
    column = pa.array([b"good", b"\xff\xfe", b"fine"]).cast(pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    (batch,) = read_parquet_batches(tmp_path / "a.parquet", "web")
    assert (batch.texts(), batch.rejected, batch.rows) == (["good", "fine"], {"invalid_utf8": 1}, 3)


VALUES = st.one_of(st.none(), st.just(" \n"), st.just("x" * 12), st.text(max_size=6))


@pytest.mark.slow
@given(rows=st.lists(st.tuples(VALUES, VALUES, VALUES, VALUES), max_size=8))
def test_columns_are_checked_by_the_rules_of_rows(tmp_path_factory, rows):
    """A batch of a Parquet file and the same rows one by one: the same records, the same reasons."""
    names = ("query", "synthetic_reasoning", "synthetic_answer", "exercise")
    plain = [dict(zip(names, row, strict=True)) for row in rows]
    path = tmp_path_factory.mktemp("parquet") / "a.parquet"
    pq.write_table(pa.Table.from_pylist(plain, pa.schema([(name, pa.string()) for name in names])), path)
    expected = to_batch([from_dict(row, "synth") for row in plain], "synth")
    batches = list(read_parquet_batches(path, "synth"))
    assert sum(batch.rows for batch in batches) == len(rows)
    for batch in batches:
        assert batch.rejected == expected.rejected
        assert batch.texts() == expected.texts()
        assert [batch.record(i) for i in range(len(batch))] == [expected.record(i) for i in range(len(expected))]
        assert [batch.columns["exercise"], batch.columns["constraints"]] == [
            expected.columns["exercise"],
            expected.columns["constraints"],
        ]


def test_ten_megabytes_in_one_row_and_a_column_of_numbers(tmp_path):
    pq.write_table(pa.table({"text": ["before", "x" * 10_000_000, "after"]}), tmp_path / "a.parquet")
    (batch,) = read_parquet_batches(tmp_path / "a.parquet", "web")
    assert (batch.texts(), batch.rejected) == (["before", "after"], {"too_long": 1})
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "b.parquet")
    (batch,) = read_parquet_batches(tmp_path / "b.parquet", "web")
    assert (len(batch), batch.rejected) == (0, {"wrong_type": 2})


def test_only_the_needed_columns_are_read(tmp_path):
    rows = {"query": ["q"], "synthetic_answer": ["a"], "language": ["en"], "seed_license": ["CC"], "extra": ["x"]}
    pq.write_table(pa.table(rows), tmp_path / "a.parquet")
    (batch,) = read_parquet_batches(
        tmp_path / "a.parquet", "synth", filter_columns=["language", "score"], record_columns=["seed_license"]
    )
    assert set(batch.columns) == {*TEXT_COLUMNS["synth"], "language", "score"}
    assert (batch.columns["language"], batch.columns["score"], batch.columns["exercise"]) == (["en"], [None], [None])
    assert batch.record(0) == SynthRecord("q", "", "a", language="en", seed_license="CC")


def test_unusable_parquet(tmp_path, parquet):
    with pytest.raises(ConfigError, match=r"a\.parquet: no column 'query'; there are text, id"):
        list(read_parquet_batches(parquet, "synth"))
    content = parquet.read_bytes()
    for damage in (b"", b"PAR1", content[:-7], b"\x00" * 500):
        parquet.write_bytes(damage)
        with pytest.raises(ConfigError, match=r"a\.parquet: is not a Parquet file"):
            list(read_parquet_batches(parquet, "web"))
    parquet.write_bytes(content[:4] + b"\xff" * 60 + content[64:])
    with pytest.raises(ConfigError, match=r"a\.parquet: row group 0 is damaged"):
        list(read_parquet_batches(parquet, "web"))
    with pytest.raises(ConfigError, match=r"gone\.parquet: cannot be read"):
        list(read_parquet_batches(tmp_path / "gone.parquet", "web"))


def test_lines_of_json_survive_unicode_line_breaks(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "a\u2028b\x85c"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert texts(read_jsonl([path], "web")) == ["a\u2028b\x85c"]


def test_a_row_group_of_any_size_is_read_page_by_page(tmp_path):
    """Peak memory of Arrow while batches are read in turn; the whole column would be 25 MB."""
    rng = np.random.default_rng(0)
    rows = ["".join(map(chr, rng.integers(32, 126, 1000))) for _ in range(250)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": rows * 100}), path, row_group_size=25_000, use_dictionary=False)
    before, most = pa.total_allocated_bytes(), 0
    for batch in read_parquet_batches(path, "web"):
        most = max(most, pa.total_allocated_bytes() - before)
        assert len(batch) <= BATCH_ROWS
    assert most < 6_000_000


def test_a_byte_order_mark_costs_no_row(tmp_path):
    """Before the first row, in a file of one row, and amid a file that was put together from several."""
    mark = b"\xef\xbb\xbf"
    (tmp_path / "a.jsonl").write_bytes(mark + b'{"text": "one"}\n' + mark + b'{"text": "two"}\n' + mark + b"\n")
    (tmp_path / "b.jsonl").write_bytes(mark + b'{"text": "three"}')
    assert texts(read_jsonl([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], "web")) == ["one", "two", "three"]
    assert count_jsonl_rows(tmp_path / "a.jsonl") == 2
    assert list(read_json_values(tmp_path / "b.jsonl")) == [{"text": "three"}]


@pytest.mark.parametrize(
    ("suffix", "pack"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".zst", pa.Codec("zstd").compress)]
)
def test_lines_packed_by_any_program(tmp_path, suffix, pack):
    path = tmp_path / f"a.jsonl{suffix}"
    packed = bytes(pack(b"".join(b'{"text": "line %d %d"}\n' % (n, n * n) for n in range(5000))))
    path.write_bytes(packed * 2)  # several of them one after the other are one file
    assert texts(read_jsonl([path], "web"))[4999:5001] == ["line 4999 24990001", "line 0 0"]
    assert count_jsonl_rows(path) == 10_000
    assert not is_parquet(path.name)
    changed = [packed[:200] + b"\xff" * 300 + packed[500:]] if suffix != ".zst" else []  # which may have no checksum
    for damage in (packed[:-2000], b"no such thing", *changed):
        path.write_bytes(damage)
        with pytest.raises(ConfigError, match=rf"a\.jsonl\{suffix}: (cannot be read|the compressed file)"):
            count_jsonl_rows(path)


@pytest.mark.parametrize("line", [b"", b'{"text": "one"}\n'])
def test_a_packed_file_without_end_is_refused(tmp_path, monkeypatch, line):
    monkeypatch.setattr("nautile.data.sources.local_files.unpacked_limit", lambda size: 2**20)
    monkeypatch.setattr("nautile.data.sources.local_files.MAX_LINE", 2**17)
    path = tmp_path / "bomb.jsonl.bz2"
    path.write_bytes(bz2.compress((line or b"0") * (3 * 2**20 // (len(line) or 1))))
    assert path.stat().st_size < 10_000
    with pytest.raises(ConfigError, match=r"bomb\.jsonl\.bz2: unpacks to over 1,048,576 bytes"):
        count_jsonl_rows(path)


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        b'{"text": ' * 100_000,
        b'{"text": "a", "n": ' + b"9" * 100_000 + b"}",
        b'{"text": "a"}\r' * 3,
        b'{"text": "a", "text": "b"}',
    ],
)
def test_hostile_lines_are_counted(tmp_path, line):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n' + line + b'\n{"text": "two"}\n')
    assert texts(read_jsonl([tmp_path / "a.jsonl"], "web")) == ["one", "not_json", "two"]


def test_a_text_repeated_by_the_million_takes_the_memory_of_a_few(tmp_path, monkeypatch):
    """A dictionary of one entry: some bytes of Parquet that unpack to any amount of text."""
    monkeypatch.setattr("nautile.data.sources.local_files.LONGEST_BATCH", 5_000_000)
    monkeypatch.setattr("nautile.data.sources.local_files.unpacked_limit", lambda size: 50_000_000)
    path, text = tmp_path / "a.parquet", "x" * 1_000_000
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 500, pa.int32()), [text])
    for table in (pa.table({"text": column}), pa.table({"text": pa.array([text] * 40), "url": ["u"] * 40})):
        pq.write_table(table, path, compression="zstd")
        assert path.stat().st_size < 5000
        assert [len(batch) for batch in islice(read_parquet_batches(path, "web"), 3)] == [5, 5, 5]
    assert sum(batch.rows for batch in read_parquet_batches(path, "web", record_columns=["url"])) == 40
    pq.write_table(pa.table({"text": column}), path, compression="zstd")
    before = pa.total_allocated_bytes()
    for rows in (read_parquet_batches(path, "web"), read_parquet_values(path, ("text",))):
        with pytest.raises(ConfigError, match=r"a\.parquet: unpacks to over 50,000,000 bytes, far more than its size"):
            deque(rows, 0)
    assert pa.total_allocated_bytes() - before < 10_000_000


def test_texts_inside_lists_are_bounded_too(tmp_path, monkeypatch):
    monkeypatch.setattr("nautile.data.sources.local_files.unpacked_limit", lambda size: 50_000_000)
    path, text = tmp_path / "a.parquet", "x" * 1_000_000
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int32()), [text])
    turns = pa.StructArray.from_arrays([column], names=["content"])
    offsets = pa.array(range(0, 1001, 10), pa.int32())
    pq.write_table(pa.table({"messages": pa.ListArray.from_arrays(offsets, turns)}), path, compression="zstd")
    assert path.stat().st_size < 5000
    with pytest.raises(ConfigError, match=r"a\.parquet: unpacks to over 50,000,000 bytes"):
        deque(read_parquet_values(path, ("messages",)), 0)
    pq.write_table(
        pa.table({"messages": [[{"content": "a"}, {"content": "b"}], None, []], "a.b": ["x", "y", "z"]}), path
    )
    rows = list(read_parquet_values(path, ("messages", "a.b")))
    assert rows[0] == {"messages": [{"content": "a"}, {"content": "b"}], "a.b": "x"}


def test_rows_without_content_are_bounded(tmp_path):
    """Sixty million of them in some hundred kilobytes."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": pa.nulls(60_000_000, pa.int8())}), path)
    assert path.stat().st_size < 200_000
    with pytest.raises(ConfigError, match=r"a\.parquet: unpacks to over"):
        next(read_parquet_batches(path, "web"))


def test_texts_written_as_bytes_are_texts(tmp_path):
    """Some programs leave out that the bytes are UTF-8."""
    rows = ["eins", "zwölf", "drei"]
    for kind in (pa.binary(), pa.large_binary(), pa.dictionary(pa.int32(), pa.binary())):
        pq.write_table(pa.table({"text": pa.array([row.encode() for row in rows], kind)}), tmp_path / "a.parquet")
        (batch,) = read_parquet_batches(tmp_path / "a.parquet", "web")
        assert (batch.texts(), batch.rejected) == (rows, {})
        assert batch.record(1) == WebRecord("zwölf")
    pq.write_table(pa.table({"text": [b"good", b"\xff\xfe", None]}), tmp_path / "a.parquet")
    (batch,) = read_parquet_batches(tmp_path / "a.parquet", "web")
    assert (batch.texts(), batch.rejected) == (["good"], {"invalid_utf8": 1, "no_text": 1})


@pytest.mark.parametrize(
    "ids",
    [
        pa.array([b"\xff", b"b"]).view(pa.string()),
        pa.array([2**60, None], pa.timestamp("us")),
        pa.array([2**31 - 1, None], pa.date32()),
        pa.array([0, None], pa.timestamp("s", "Mars/Phobos")),
    ],
    ids=["not UTF-8", "far time", "far day", "unknown zone"],
)
def test_an_id_that_cannot_be_read_costs_no_row(tmp_path, ids):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["one", "two"], "id": ids}), path)
    (batch,) = read_parquet_batches(path, "web", record_columns=["id"])
    assert (batch.texts(), batch.rejected, batch.record(0)) == (["one", "two"], {}, WebRecord("one"))
    first, second = read_parquet_values(path, ("text", "id"))
    assert isinstance(first, Rejected)
    assert second["text"] == "two"


def test_filters_read_bytes_as_texts(tmp_path):
    texts = [b"one", b"Aucune langue n'est dite ici, et tout le monde la reconnait."]
    pq.write_table(pa.table({"text": texts, "language": [b"en", b"\xff"]}), tmp_path / "a.parquet")
    source = SourceConfig(name="web", reader="parquet", form="web", path=f"{tmp_path}/a.parquet", languages=("en",))
    (file,) = list_files(source, tmp_path)
    (batch,) = read_file(source, file, tmp_path)
    assert (batch.texts(), batch.rejected) == (["one"], {"language": 1})


def test_two_columns_of_one_name_are_refused(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), path)
    for read in (lambda: list(read_parquet_batches(path, "web")), lambda: list(read_parquet_values(path, ("text",)))):
        with pytest.raises(ConfigError, match=r"a\.parquet: two columns are called 'text'"):
            read()
    with pytest.raises(ConfigError, match="two columns are called"):
        count_parquet_rows(path)
