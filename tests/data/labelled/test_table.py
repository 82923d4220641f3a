"""Tables are read strictly: what is wrong is named with its row, and a file that changes is refused."""

import hashlib
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from common.errors import ConfigError
from data.labelled import table as table_module
from data.labelled.table import read_table


def written(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_csv_with_quotes_line_breaks_and_a_byte_order_mark(tmp_path):
    path = written(tmp_path, "a.csv", '\ufefftext,label\n"two\nlines, ""quoted""",x\n\nplain,y\n')
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
    assert table.classes == {"label": ["neg", "pos"], "tags": ["O", "B-PER"], "older": ["x"]}


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
        ("a.xlsx", "nothing", "is none of .csv"),
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
