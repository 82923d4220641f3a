"""Export distilled documents as Parquet files, with SYNTH's columns and the provenance of each document."""

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from nautile.data.distill.run import DOCUMENTS
from nautile.data.records import SynthRecord

ROWS_PER_FILE = 200_000  # a multiple of BATCH
BATCH = 5_000  # rows in memory

_SYNTH = tuple(field.name for field in fields(SynthRecord))
_PROVENANCE = {"set": "prompt_set", "teacher": "teacher", "template": "template", "difficulty": "difficulty"}
SCHEMA = pyarrow.schema(
    [
        *((name, pyarrow.string()) for name in _SYNTH),
        ("prompt_set", pyarrow.string()),
        ("teacher", pyarrow.string()),
        ("template", pyarrow.string()),
        ("difficulty", pyarrow.float64()),
        ("exemplars", pyarrow.list_(pyarrow.string())),
    ]
)
# Description of each column, for a dataset card.
COLUMNS = {
    "query": "the prompt",
    "synthetic_reasoning": "the teacher's reasoning",
    "synthetic_answer": "the teacher's answer",
    "exercise": "the kind of the prompt",
    "constraints": "of the exercise; empty here",
    "synth_id": "the document's id",
    "language": "of the document, where it is known",
    "model": "the teacher's model",
    "query_seed_url": "the page that the prompt rests on",
    "query_seed_text": "the passage that the teacher was shown",
    "seed_license": "the licence of the prompt set, as the configuration states it",
    "prompt_set": "the set that the prompt is of",
    "teacher": "the endpoint's name in the configuration",
    "template": "of the teacher's prompt, with its version",
    "difficulty": "of the prompt, 0 to 1",
    "exemplars": "ids of the records of SYNTH, or its stand-in, that the teacher was shown",
}


def write_parquet(documents: Path, out: Path, rows_per_file: int = ROWS_PER_FILE) -> int:
    """Write a `documents` artifact as train-00000.parquet, … in `out`, always the same bytes; returns the rows."""
    out.mkdir(parents=True, exist_ok=True)
    total, writer = 0, None
    try:
        for rows in _batches(documents, min(BATCH, rows_per_file)):
            # `ROWS_PER_FILE` is a multiple of `BATCH`, so a file ends between two batches.
            if total % rows_per_file == 0 or writer is None:
                if writer:
                    writer.close()
                name = out / f"train-{total // rows_per_file:05}.parquet"
                writer = pyarrow.parquet.ParquetWriter(name, SCHEMA, compression="zstd")
            writer.write_table(pyarrow.Table.from_pylist(rows, SCHEMA))
            total += len(rows)
    finally:
        if writer:
            writer.close()
    return total


def _batches(documents: Path, size: int) -> Iterator[list[dict[str, Any]]]:
    """The rows in lists of `size`; the last may be shorter."""
    rows = []
    for path in sorted(documents.glob(DOCUMENTS)):
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                rows.append(_row(json.loads(line)))
                if len(rows) == size:
                    yield rows
                    rows = []
    if rows:
        yield rows


def _row(document: dict[str, Any]) -> dict[str, Any]:
    provenance = document.get("provenance") or {}
    row = {name: document.get(name) for name in _SYNTH}
    row |= {column: provenance.get(name) for name, column in _PROVENANCE.items()}
    return row | {"exemplars": provenance.get("neighbours")}
