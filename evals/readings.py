"""A few samples of each benchmark to read: right ones, and wrong ones of every kind."""

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from evals.rows import Row

SHOWN = (
    "benchmark", "index", "id", "prompt", "output", "reasoning", "answer", "parsed", "expected", "problem", "strict",
    "lenient",
)  # fmt: skip


def readings(rows: Sequence[Row], right: int = 3, wrong: int = 2) -> list[dict[str, Any]]:
    """Per benchmark, `right` right answers and `wrong` of each kind of failure, picked by a hash: no cherries."""
    asked = sorted((row for row in rows if row["left_out"] is None), key=_lot)
    taken: dict[tuple[str, str], int] = {}
    picked = []
    for row in asked:
        kind = "right" if row["strict"] else row["problem"] or "wrong"
        count = taken.get((row["benchmark"], kind), 0)
        if count < (right if row["strict"] else wrong):
            taken[row["benchmark"], kind] = count + 1
            picked.append({**{field: row[field] for field in SHOWN}, "kind": kind})
    order = {name: place for place, name in enumerate(dict.fromkeys(row["benchmark"] for row in rows))}
    return sorted(picked, key=lambda one: (order[one["benchmark"]], one["kind"] != "right", one["kind"], one["index"]))


def _lot(row: Row) -> bytes:
    return sha256(f"{row['benchmark']}/{row['prompt_digest']}".encode()).digest()
