"""Parquet and JSON lines: positions hold, bad rows are counted, unusable files are refused by name."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.section import ConfigError
from data import files
from data.files import matching, parquet_rows, read_jsonl, read_parquet
from data.records import Rejected, WebRecord


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


@given(skip=st.integers(0, 12))
def test_skipping_is_the_same_as_reading_past(tmp_path_factory, skip):
    folder = tmp_path_factory.mktemp("files")
    paths = []
    for name in ("a", "b"):
        path = folder / f"{name}.jsonl"
        path.write_text("\n".join([json.dumps({"text": f"{name}{n}"}) for n in range(4)] + ["{bad"]))
        paths.append(path)
    assert list(read_jsonl(paths, "web", skip)) == list(read_jsonl(paths, "web"))[skip:]


def test_compressed_lines_and_a_file_cut_short(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(b'{"text": "line %d %d"}\n' % (n, n * n) for n in range(5000))))
    assert len(list(read_jsonl([path], "web"))) == 5000
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(ConfigError, match=r"a\.jsonl\.gz: the compressed file ends too early"):
        list(read_jsonl([path], "web"))
    path.write_bytes(b"no gzip at all")
    with pytest.raises(ConfigError, match=r"a\.jsonl\.gz: cannot be read"):
        list(read_jsonl([path], "web"))


def test_a_line_of_ten_megabytes_is_counted_and_not_held(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "%s"}\n{"text": "after"}\n' % (b"x" * 10_000_000))
    assert texts(read_jsonl([path], "web")) == ["too_long", "after"]
    monkeypatch.setattr(files, "MAX_LINE", 1_000_000)
    assert texts(read_jsonl([path], "web")) == ["too_long", "after"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty"), (b" \n\n", "is empty"), (b"\x7fELF\x00\x00", "is binary, not JSON lines")],
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
        matching(str(tmp_path / "*.parquet"))
    with pytest.raises(ConfigError, match="is a folder; give a glob"):
        matching(str(tmp_path))


@pytest.fixture
def parquet(tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [f"text {n}" if n % 4 else None for n in range(20)], "id": [str(n) for n in range(20)]})
    pq.write_table(table, path, row_group_size=6)
    return path


@pytest.mark.parametrize("skip", [0, 1, 5, 6, 7, 13, 19, 20, 25])
def test_parquet_rows_from_any_position(parquet, skip):
    whole = list(read_parquet(parquet, None, "web"))
    assert len(whole) == parquet_rows(parquet) == 20
    assert whole[1] == WebRecord("text 1", id="1")
    assert whole[4] == Rejected("no_text")
    assert list(read_parquet(parquet, None, "web", skip)) == whole[skip:]


def test_parquet_text_that_is_no_utf8_is_counted(tmp_path):
    column = pa.array([b"good", b"\xff\xfe", b"fine"]).cast(pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    assert texts(read_parquet(tmp_path / "a.parquet", None, "web")) == ["good", "invalid_utf8", "fine"]


def test_unusable_parquet(tmp_path, parquet):
    with pytest.raises(ConfigError, match=r"a\.parquet: no column 'query'; there are text, id"):
        list(read_parquet(parquet, None, "synth"))
    content = parquet.read_bytes()
    for damage in (b"", b"PAR1", content[:-7], b"\x00" * 500):
        parquet.write_bytes(damage)
        with pytest.raises(ConfigError, match=r"a\.parquet: is not a Parquet file"):
            list(read_parquet(parquet, None, "web"))
    parquet.write_bytes(content[:4] + b"\xff" * 60 + content[64:])
    with pytest.raises(ConfigError, match=r"a\.parquet: row group 0 is damaged"):
        list(read_parquet(parquet, None, "web"))
    with pytest.raises(ConfigError, match=r"gone\.parquet: cannot be read"):
        list(read_parquet(tmp_path / "gone.parquet", None, "web"))


def test_lines_of_json_survive_unicode_line_breaks(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "a\u2028b\x85c"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert texts(read_jsonl([path], "web")) == ["a\u2028b\x85c"]
