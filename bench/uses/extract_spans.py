"""Strings that must occur in a text: share of valid rows with and without the constraint during decoding.

    python bench/uses/extract_spans.py CHECKPOINT [--rows 64] [--write FILE]

The first sentences of Wikipedia articles, and a schema with two strings that must be parts of them. Both arms decode
the same rows with the same seeds, greedily and at temperature 1. Times exclude start and compilation.
"""

import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.measure import argument_parser
from common.text import markdown_table
from configs.labelling import ExtractConfig
from configs.tune import LabelledDataConfig
from data.labelled.rows import read_rows
from evals.extraction.runner import Extractor
from model.decoding.constrained import Constraint

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 30, "x-span": True},
        "what": {"type": "string", "minLength": 4, "maxLength": 40, "x-span": True},
        "living": {"type": "boolean"},
    },
    "required": ["name", "what", "living"],
    "additionalProperties": False,
}
CHARACTERS = 160  # of a text


def main():
    parser = argument_parser(__doc__, rows=64, write=None)
    parser.add_argument("checkpoint", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = read_rows(LabelledDataConfig.model_validate("wikipedia_topics"), "label", Path(folder))
    texts = [row.text[:CHARACTERS] for row in rows[:: max(1, len(rows) // arguments.rows)][: arguments.rows]]
    within = Constraint.within
    lines = []
    for temperature in (0.0, 1.0):
        for constrained in (False, True):
            # Without the constraint to the text the schema still holds; only `within`, which narrows a string to parts
            # of the text, is switched off.
            Constraint.within = within if constrained else lambda constraint, text: constraint
            lines.append(measure(arguments.checkpoint, texts, temperature, constrained))
            print(lines[-1], flush=True)
    columns = ["", "Temperature", "Rows that hold", "Refused for a span", "Otherwise", "Rows / CPU s"]
    table = markdown_table(columns, lines)
    print(table)
    if arguments.write:
        Path(arguments.write).write_text(table + "\n", encoding="utf-8")


def measure(checkpoint, texts, temperature, constrained):
    config = ExtractConfig(
        texts={"reader": "jsonl", "path": "texts.jsonl"}, json_schema=json.dumps(SCHEMA),
        instructions="Name the subject and what it is, as JSON.", temperature=temperature, max_tokens=80,
    )  # fmt: skip
    extractor = Extractor(checkpoint, config, SCHEMA)
    with tempfile.TemporaryDirectory() as folder:
        extractor.run(texts[:4], Path(folder) / "first.jsonl")  # compiles
        start = time.process_time()
        rows = extractor.run(texts, Path(folder) / "rows.jsonl")
        seconds = time.process_time() - start
    reasons = Counter(row["reason"] for row in rows)
    other = len(rows) - reasons[None] - reasons["span"]
    share = f"{reasons[None]} of {len(rows)} ({100 * reasons[None] / len(rows):.0f} %)"
    title = "held to the text" if constrained else "checked afterwards alone"
    return [title, temperature, share, reasons["span"], other, f"{len(rows) / seconds:.1f}"]


if __name__ == "__main__":
    main()
