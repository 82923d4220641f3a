"""Distilled documents as Parquet: every row, in order, in files of a bounded length, the same bytes each time."""

import json

import pyarrow.parquet

from nautile.data.distill.parquet import COLUMNS, SCHEMA, write_parquet


def documents(folder):
    for number in range(2):
        rows = [
            {
                "query": f"{number}-{index}", "synthetic_reasoning": "<b>", "synthetic_answer": "\ud83d\ude00",
                "exercise": "fact", "constraints": None, "model": "m",
                "provenance": {"set": "s", "teacher": "t", "difficulty": 0.5, "neighbours": ["a", "b"]},
            }
            for index in range(3)
        ]  # fmt: skip
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / f"documents-{number:05}.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "rejected-00000.jsonl").write_text('{"query": "no"}\n', encoding="utf-8")
    return folder


def test_every_document_is_a_row_in_files_of_a_bounded_length(tmp_path):
    assert write_parquet(documents(tmp_path), tmp_path / "out", rows_per_file=4) == 6
    tables = [pyarrow.parquet.read_table(path) for path in sorted((tmp_path / "out").iterdir())]
    assert [table.num_rows for table in tables] == [4, 2]
    rows = [row for table in tables for row in table.to_pylist()]
    assert [row["query"] for row in rows] == ["0-0", "0-1", "0-2", "1-0", "1-1", "1-2"]
    assert rows[0] == {
        **dict.fromkeys(SCHEMA.names), "query": "0-0", "synthetic_reasoning": "<b>", "synthetic_answer": "\U0001f600",
        "exercise": "fact", "model": "m", "prompt_set": "s", "teacher": "t", "difficulty": 0.5, "exemplars": ["a", "b"],
    }  # fmt: skip


def test_the_same_documents_give_the_same_bytes(tmp_path):
    folder = documents(tmp_path)
    for name in ("a", "b"):
        write_parquet(folder, tmp_path / name)
    (path,) = (tmp_path / "a").iterdir()
    assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_every_column_is_described():
    assert list(COLUMNS) == SCHEMA.names
