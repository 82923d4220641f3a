"""Texts of a table, and tables of answers written back: the same rows in every format."""

import json
import math

import pytest

from common.errors import ConfigError
from configs.labelling import TextsConfig
from data.labelled.table import read_table
from data.labelled.texts import check_writable, read_texts, with_answers, write_rows

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
