"""Texts of a table, and tables of answers written back: the same rows in every format."""

import csv
import json
import math
from datetime import UTC, date, datetime, time
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nautile.common.errors import ConfigError
from nautile.data.table import read_table
from nautile.uses.labelled.config import TextsConfig
from nautile.uses.labelled.texts import check_writable, read_texts, with_answers, write_rows

ROWS = [
    {"row": 1, "text": 'a "b"\n,c', "tags": ["x"], "odd": 1, "p": 0.5, "none": None},
    {"row": 2, "text": None, "tags": [], "odd": "é", "p": None, "none": None},
]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_rows_are_read_back_as_they_were_written(tmp_path, suffix):
    path = tmp_path / f"rows{suffix}"
    write_rows(path, ROWS)
    rows = read_table(path).rows
    if suffix == ".jsonl":
        assert rows == ROWS
        return
    # A CSV has texts alone; in Parquet a column whose values share no type is text.
    assert [row["text"] or None for row in rows] == [row["text"] for row in ROWS]
    assert [json.loads(row["tags"]) if suffix == ".csv" else row["tags"] for row in rows] == [["x"], []]
    assert [row["odd"] for row in rows] == ["1", "é"]
    assert [float(rows[0]["p"]), rows[1]["p"] or None] == [0.5, None]
    write_rows(path, [])
    assert path.stat().st_size < 1000


def test_an_answer_of_a_columns_name_keeps_both(tmp_path):
    write_rows(tmp_path / "t.csv", [{"text": "a", "label": "gold"}])
    table = read_table(tmp_path / "t.csv")
    assert with_answers(table, [{"label": "x", "p": 1.0}]) == [
        {"text": "a", "given_label": "gold", "label": "x", "p": 1.0}
    ]


def test_answers_to_a_table_that_has_been_answered_before_keep_every_column(tmp_path):
    write_rows(tmp_path / "t.csv", [{"text": "a", "given_label": "gold", "label": "x", "given_given_label": "older"}])
    table = read_table(tmp_path / "t.csv")
    [row] = with_answers(table, [{"label": "y"}])
    assert row == {
        "text": "a",
        "given_label": "gold",
        "given_given_given_label": "x",
        "given_given_label": "older",
        "label": "y",
    }


def test_numbers_that_json_does_not_have_are_written_as_null(tmp_path):
    rows = [{"text": "a", "score": value, "nested": {"of": [value]}} for value in (math.nan, math.inf, 0.5)]
    write_rows(tmp_path / "t.parquet", rows)
    table = read_table(tmp_path / "t.parquet")
    write_rows(tmp_path / "t.jsonl", table.rows)
    assert [row["score"] for row in read_table(tmp_path / "t.jsonl").rows] == [None, None, 0.5]
    write_rows(tmp_path / "t.csv", table.rows)
    assert [json.loads(row["nested"], parse_constant=pytest.fail) for row in read_table(tmp_path / "t.csv").rows] == [
        {"of": [None]},
        {"of": [None]},
        {"of": [0.5]},
    ]


def test_rows_without_a_text_are_none(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": "a"}\n{"text": " "}\n{"text": null}\n{"other": 1}\n')
    table, texts = read_texts(TextsConfig(reader="jsonl", path=str(path)))
    assert texts == ["a", None, None, None]
    with pytest.raises(ConfigError, match="no column 'body'; there are text, other"):
        read_texts(TextsConfig(reader="jsonl", path=str(path), text_column="body"))
    path.write_text('{"text": "b"}\n')
    with pytest.raises(ConfigError, match="has changed since its digest was taken"):
        read_texts(TextsConfig(reader="jsonl", path=str(path)), table.sha256)


@pytest.mark.parametrize(("content", "message"), [('{"text": 3}\n', "row 1: has a int"), ('{"text": ""}\n', "no row")])
def test_a_table_without_texts_is_refused(tmp_path, content, message):
    path = tmp_path / "t.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_texts(TextsConfig(reader="jsonl", path=str(path)))


def test_only_known_formats_in_folders_that_exist_are_written(tmp_path):
    with pytest.raises(ConfigError, match="tables are written as"):
        check_writable(tmp_path / "rows.xlsx")
    with pytest.raises(ConfigError, match="there is no folder"):
        check_writable(tmp_path / "none" / "rows.csv")


def test_a_text_that_a_spreadsheet_would_run_gets_an_apostrophe(tmp_path):
    """In the names of columns too. Numbers stay, and so do texts inside."""
    hostile = [
        '=HYPERLINK("http://evil.example")',
        "+1-2",
        "-2+3",
        "@SUM(1)",
        "\tx",
        "\rx",
        "\n=1",
        "\uff1d1+1",
        "-\n=1",
        "\ufeff=1",
    ]
    harmless = ["-5", "+1.5e3", "-12,5", "-3%", "-", "a=b", " =1", "", "'=1"]
    rows = [{"=cmd": text, "n": -1} for text in (*hostile, *harmless)]
    write_rows(tmp_path / "t.csv", rows)
    with (tmp_path / "t.csv").open(newline="") as file:
        names, *cells = csv.reader(file)
    assert names == ["'=cmd", "n"]
    assert [cell[0] for cell in cells] == [*(f"'{text}" for text in hostile), *harmless]
    assert {cell[1] for cell in cells} == {"-1"}
    for name in ("t.jsonl", "t.parquet"):
        write_rows(tmp_path / name, rows)
        assert read_table(tmp_path / name).rows == rows


def test_dates_decimals_and_bytes_are_written_without_quotes(tmp_path):
    row = {
        "when": datetime(2024, 1, 2, 3, 4, 5, tzinfo=UTC), "day": date(2024, 1, 2), "time": time(1, 2, 3),
        "price": Decimal("1.50"), "text": "zw\u00f6lf".encode(), "raw": b"\xff\x00",
        "list": [Decimal("2.0"), date(2024, 1, 2)],
    }  # fmt: skip
    expected = {
        "when": "2024-01-02T03:04:05+00:00", "day": "2024-01-02", "time": "01:02:03",
        "price": "1.50", "text": "zw\u00f6lf", "raw": "/wA=", "list": '["2.0", "2024-01-02"]',
    }  # fmt: skip
    write_rows(tmp_path / "t.csv", [row])
    assert read_table(tmp_path / "t.csv").rows == [expected]
    write_rows(tmp_path / "t.jsonl", [row])
    assert read_table(tmp_path / "t.jsonl").rows == [expected | {"list": ["2.0", "2024-01-02"]}]
    scalars = {name: value for name, value in row.items() if name != "list"}
    write_rows(tmp_path / "t.parquet", [scalars])
    assert read_table(tmp_path / "t.parquet").rows == [scalars]


def test_nanoseconds_are_kept(tmp_path):
    columns = {
        "t": pa.array([1_700_000_000_123_456_789, None], pa.timestamp("ns", "UTC")),
        "d": pa.array([None, 5_000_000_001], pa.duration("ns")),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    rows = read_table(tmp_path / "a.parquet").rows
    write_rows(tmp_path / "b.parquet", rows)
    written = pq.read_table(tmp_path / "b.parquet")
    assert written.column("t").cast(pa.int64()).to_pylist() == [1_700_000_000_123_456_789, None]
    assert written.column("d").cast(pa.int64()).to_pylist() == [None, 5_000_000_001]
    write_rows(tmp_path / "b.csv", rows)
    assert read_table(tmp_path / "b.csv").rows[0]["t"] == "2023-11-14T22:13:20.123456789+00:00"


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_half_a_surrogate_pair_costs_no_work(tmp_path, suffix):
    """JSON can hold one, and UTF-8 cannot: all texts were answered before the table could not be written."""
    path = tmp_path / "in.jsonl"
    path.write_text(
        '{"text": "half \\ud83d pair", "tags": ["\\udc00"]}\n{"text": "whole \\ud83d\\ude00 pair", "tags": []}\n'
    )
    rows = read_table(path).rows
    write_rows(tmp_path / f"out{suffix}", rows)
    again = read_table(tmp_path / f"out{suffix}").rows
    assert again[0]["text"] == f"half {chr(0xD83D if suffix == '.jsonl' else 0xFFFD)} pair"
    assert again[1]["text"] == "whole \U0001f600 pair"
    assert suffix != ".jsonl" or again == rows


def test_texts_written_as_bytes_are_texts(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": pa.array(["zw\u00f6lf".encode()], pa.binary())}), path)
    assert read_texts(TextsConfig(reader="parquet", path=str(path)))[1] == ["zw\u00f6lf"]
    pq.write_table(pa.table({"text": pa.array([b"\xff"], pa.binary())}), path)
    with pytest.raises(ConfigError, match="row 1: has a bytes, not a text"):
        read_texts(TextsConfig(reader="parquet", path=str(path)))


def test_texts_of_a_csv_with_another_delimiter(tmp_path):
    (tmp_path / "a.csv").write_text("id;text\n1;help, please\n")
    config = TextsConfig(reader="csv", path=str(tmp_path / "a.csv"), delimiter=";")
    assert read_texts(config)[1] == ["help, please"]
