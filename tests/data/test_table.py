"""Tables are read strictly: what is wrong is named with its row, and a file that changes is refused."""

import hashlib
import io
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nautile.common.errors import ConfigError
from nautile.data import table as table_module
from nautile.data.table import read_table


def written(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_csv_with_quotes_line_breaks_and_a_byte_order_mark(tmp_path):
    path = written(tmp_path, "a.csv", '\ufefftext,label\n"two\nlines, ""quoted""",x\n\n\ufeffplain,y\n')
    table = read_table(path)
    assert table.columns == ["text", "label"]
    assert table.rows == [{"text": 'two\nlines, "quoted"', "label": "x"}, {"text": "plain", "label": "y"}]
    assert table.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_tabs_and_a_table_without_a_row_of_names(tmp_path):
    path = written(tmp_path, "a.tsv", "1\t2.1\tgood\n2\t-1.0\tbad\n")
    assert read_table(path, header=("id", "mean", "text")).rows[1] == {"id": "2", "mean": "-1.0", "text": "bad"}


def test_json_lines_have_the_columns_of_all_rows(tmp_path):
    table = read_table(written(tmp_path, "a.jsonl", '{"text": "a", "n": 1}\n\n{"text": "b", "more": [1]}\n'))
    assert table.columns == ["text", "n", "more"]
    assert table.rows[1] == {"text": "b", "n": None, "more": [1]}


def test_parquet_with_the_names_of_classes_that_datasets_writes(tmp_path):
    features = {
        "label": {"names": ["neg", "pos"], "_type": "ClassLabel"},
        "tags": {"feature": {"names": ["O", "B-PER"], "_type": "ClassLabel"}, "_type": "List"},
        "older": [{"names": ["x"], "_type": "ClassLabel"}],
        "text": {"dtype": "string", "_type": "Value"},
    }
    metadata = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    rows = pa.table({"label": [1], "tags": [[0, 1]], "older": [[0]], "text": ["a b"]}).replace_schema_metadata(metadata)
    pq.write_table(rows, tmp_path / "a.parquet")
    table = read_table(tmp_path / "a.parquet")
    assert table.rows == [{"label": 1, "tags": [0, 1], "older": [0], "text": "a b"}]
    pq.write_table(
        rows.replace_schema_metadata({b"huggingface": b'{"info": {"features": {"a": 1}}}'}), tmp_path / "b.parquet"
    )
    assert read_table(tmp_path / "b.parquet").classes == {}
    assert table.classes == {"label": ["neg", "pos"], "tags": ["O", "B-PER"], "older": ["x"]}


def parquet_of(column):
    file = io.BytesIO()
    pq.write_table(pa.table({"a": column}), file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "text,label\na,x\nb\n", r"row 2 \(line 3\) has 1 values for 2 columns"),
        ("a.csv", 'text,label\n"a,x\n', r"row 1 \(line 2\) is not CSV"),
        ("a.csv", "text,text\na,x\n", "two columns are called 'text'"),
        ("a.csv", "text,\na,x\n", "column 2 has no name"),
        ("a.csv", "text,label\n", "columns text, label and no row"),
        ("a.csv", b"text,label\n\xff,x\n", "line 2 is not UTF-8"),
        ("a.csv", b"text\n\x00\x01\n", "is binary"),
        ("a.csv", "", "is empty"),
        ("a.jsonl", '{"a": 1}\n[1]\n', "row 2 is not a JSON object"),
        ("a.jsonl", '{"a": NaN}\n', "row 1 is not JSON"),
        ("a.jsonl", '{"a": \n', "row 1 is not JSON"),
        ("a.parquet", "nothing", "cannot be read as Parquet"),
        ("a.parquet", parquet_of(pa.array([2**60], pa.timestamp("us"))), "row 1 has a value that cannot be read"),
        ("a.parquet", parquet_of(pa.array([2**31 - 1], pa.date32())), "row 1 has a value that cannot be read"),
        ("a.parquet", parquet_of(pa.array([0], pa.timestamp("s", "Mars/Phobos"))), "row 1 has a value.*Mars"),
        ("a.xlsx", "nothing", "is none of .csv"),
        ("a.csv", "text,label\na,x\n".encode("utf-16-le"), "is binary.*set `encoding` to utf-16-le or utf-16-be"),
        (
            "a.csv",
            "text,label\na,x\n".encode("utf-16")[:-1],
            "line 2, byte 31 of the file .* is nothing in utf-16; set another `encoding`",
        ),
        (
            "a.csv",
            "text,label\nz\u00e9,x\n".encode("cp1252"),
            r"line 2 is not UTF-8 \(byte 2 of it\); set `encoding` .*with cp1252, of Windows, it is 'z\u00e9,x'",
        ),
        (
            "a.csv",
            "id;text\n1\n",
            r"one column, 'id;text': if ; separates .*`--delimiter ';'`\), else to ,$",
        ),
        ("a.csv", "id|text\n1\n", r"if \| separates its columns"),
        ("a.csv", "id\ttext\n1\n", r"if tab separates its columns.*`--delimiter tab`"),
        ("a.tsv", "id,text\n1\n", r"if , separates its columns.*, else to tab"),
        ("a.jsonl", "[" * 100_000, "row 1 is not JSON"),
        ("a.jsonl", '{"a": 1, "a": 2}', r"row 1 is not JSON \(an object has two members of the same name"),
        ("a.csv", "id;a|b\n1;2|3\n", "may be separated by ; and |: set `delimiter`"),
        ("a.jsonl", '{"a": ' + "9" * 10_000 + "}", "row 1 is not JSON"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, name, content, message):
    with pytest.raises(ConfigError, match=message):
        read_table(written(tmp_path, name, content))


def test_a_line_over_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(table_module, "LONGEST_LINE", 20)
    with pytest.raises(ConfigError, match="line 2 has 31 bytes; 20 are the most"):
        read_table(written(tmp_path, "a.csv", f"text\n{'x' * 30}\n"))


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_table(tmp_path / "none.csv")


def test_a_file_that_changes_while_it_is_read(tmp_path, monkeypatch):
    path = written(tmp_path, "a.csv", "text\na\n")
    real = table_module.os.fstat

    def grown(descriptor):
        status = real(descriptor)
        path.write_text("text\na\nb\n")  # another program writes once the file is open
        return status

    monkeypatch.setattr(table_module.os, "fstat", grown)
    with pytest.raises(ConfigError, match="changed while it was read"):
        read_table(path)


def test_a_file_that_is_no_longer_what_was_digested(tmp_path):
    path = written(tmp_path, "a.csv", "text\na\n")
    digest = read_table(path).sha256
    path.write_text("text\nb\n")
    with pytest.raises(ConfigError, match="has changed since its digest"):
        read_table(path, sha256=digest)


def test_another_delimiter_and_the_line_ends_of_old_macs(tmp_path):
    path = written(tmp_path, "a.csv", "id;text\r1;help, please\r")
    assert read_table(path, delimiter=";").rows == [{"id": "1", "text": "help, please"}]
    # A delimiter that is named is believed: there is one column.
    assert read_table(written(tmp_path, "b.csv", "a;b\nc\n"), delimiter=",").rows == [{"a;b": "c"}]
    assert len(read_table(written(tmp_path, "c.jsonl", '{"a": 1}\r{"a": 2}\r')).rows) == 2


def test_a_few_bytes_of_parquet_do_not_take_any_memory(tmp_path):
    """Texts repeated by the million, also inside lists, and rows and values without content."""
    path, text = tmp_path / "a.parquet", "x" * 900_000
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 2000, pa.int32()), [text])
    tables = {
        "its texts take over": [
            pa.table({"text": column}),
            pa.table({"tags": pa.ListArray.from_arrays(pa.array(range(0, 2001, 100), pa.int32()), column)}),
            pa.table({"s": pa.StructArray.from_arrays([column], names=["t"])}),
        ],
        "rows take over": [pa.table({"n": pa.nulls(40_000_000, pa.int8())})],
    }
    for message, hostile in tables.items():
        for table in hostile:
            pq.write_table(table, path, compression="zstd")
            assert path.stat().st_size < 100_000
            before = pa.total_allocated_bytes()
            with pytest.raises(
                ConfigError, match=rf"a\.parquet: its .*{message.removeprefix('its ')}.* it is not read"
            ):
                read_table(path)
            assert pa.total_allocated_bytes() - before < 50_000_000


def test_a_text_repeated_in_moderation_is_read(tmp_path):
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 0], pa.int32()), ["a" * 1000, "b"])
    pq.write_table(pa.table({"text": column, "tags": [["x", "y"], [], None, ["x"]]}), tmp_path / "a.parquet")
    table = read_table(tmp_path / "a.parquet")
    assert [row["text"] for row in table.rows] == ["a" * 1000, "b", None, "a" * 1000]
    assert [row["tags"] for row in table.rows] == [["x", "y"], [], None, ["x"]]


def test_two_columns_of_one_name_in_parquet(tmp_path):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="two columns are called 'text'"):
        read_table(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "a.jsonl"])
def test_only_regular_files_are_tables(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match="is a FIFO, not a regular file"):
        read_table(tmp_path / name)
    (tmp_path / f"zero-{name}").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="is a device, not a regular file"):
        read_table(tmp_path / f"zero-{name}")


ROWS = [{"id": "1", "text": "Zw\u00f6lf, \u201eb\u00f6se\u201c\nZeilen"}, {"id": "2", "text": "caf\u00e9"}]
EXCEL = 'id;text\r\n1;"Zw\u00f6lf, \u201eb\u00f6se\u201c\nZeilen"\r\n2;caf\u00e9\r\n'


@pytest.mark.parametrize(
    ("name", "content", "named", "found"),
    [
        ("a.csv", EXCEL.encode("utf-8-sig"), {}, "; between its columns"),
        ("a.csv", EXCEL.encode("utf-16"), {}, "; between its columns and UTF-16 by its byte-order mark"),
        ("a.csv", EXCEL.encode("utf-32"), {}, "; between its columns and UTF-32 by its byte-order mark"),
        ("a.csv", EXCEL.encode("cp1252"), {"encoding": "cp1252"}, "; between its columns"),
        ("a.csv", EXCEL.encode("utf-16-le"), {"encoding": "utf-16-le", "delimiter": ";"}, ""),
        ("a.csv", EXCEL.replace(";", "\t").encode("utf-16"), {}, "tab between its columns and UTF-16"),
        ("a.tsv", EXCEL.replace(";", "\t").encode(), {}, ""),
        ("a.csv", EXCEL.replace(";", "|").encode(), {}, "| between its columns"),
    ],
)
def test_tables_of_spreadsheets(tmp_path, name, content, named, found):
    table = read_table(written(tmp_path, name, content), **named)
    assert table.rows == ROWS
    assert found in table.found
    assert bool(found) == bool(table.found)


@pytest.mark.parametrize(
    ("encoding", "message"),
    [
        ("utf-7x", "no encoding is called 'utf-7x'"),
        ("ascii", r"line 2, byte 15 of the file \(0xc3\) is nothing in ascii; set another `encoding`"),
        ("base64", "cannot be read as base64"),
    ],
)
def test_an_encoding_that_the_file_has_not(tmp_path, encoding, message):
    with pytest.raises(ConfigError, match=message):
        read_table(written(tmp_path, "a.csv", EXCEL.encode()), encoding=encoding)
