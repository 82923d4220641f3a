"""The rows file of an evaluation: one JSON line per sample, appended when it is graded, never rewritten.

Rows contain nothing that differs between executions, so an evaluation that was killed and resumed writes the same bytes
as an uninterrupted one. Latencies differ, so they are in a separate file of the same form.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nautile.common.errors import ConfigError
from nautile.common.files import append_durably

SampleRow = dict[str, Any]
# Answering mode -> file of an evaluation. "sampled": several answers to a question, which share its vote.
WAYS = {"generate": "rows.jsonl", "likelihood": "likelihood.jsonl", "sampled": "sampled.jsonl"}


class RowFile:
    """An append-only rows file. Opening it removes an incomplete last line. `rows`: its rows, in order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.rows = read_rows(path) if path.exists() else []
        content = path.read_bytes() if path.exists() else b""
        # A process that was killed while it wrote leaves half a line; the next append must not continue it.
        complete_bytes = content.rfind(b"\n") + 1
        if complete_bytes < len(content):
            with path.open("r+b") as file:
                file.truncate(complete_bytes)

    def append(self, rows: Iterable[SampleRow]) -> None:
        """Append `rows` in one write and fsync them."""
        rows = list(rows)
        if not rows:
            return
        lines = "".join(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n" for row in rows)
        append_durably(self.path, lines.encode("utf-8", errors="replace"))
        self.rows += rows


def read_rows(path: Path) -> list[SampleRow]:
    """Read the complete lines of a file that may still be growing; an incomplete last line is ignored.

    Raises `ConfigError` for a line that is not JSON.
    """
    content = path.read_bytes()
    rows = []
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), 1):
        try:
            rows.append(json.loads(line))
        except ValueError:  # invalid UTF-8 as well as invalid JSON
            raise ConfigError(f"{path}: line {number} is damaged; delete the file to ask all questions again") from None
    return rows


def digest(prompt: str) -> str:
    """Digest of a prompt: the first 16 hexadecimal digits of its sha256."""
    return hashlib.sha256(prompt.encode("utf-8", errors="replace")).hexdigest()[:16]


READING_FIELDS = (
    "benchmark", "index", "id", "prompt", "output", "reasoning", "answer", "parsed", "expected", "problem", "strict",
    "lenient",
)  # fmt: skip


def sample_readings(rows: Sequence[SampleRow], right: int = 3, wrong: int = 2) -> list[dict[str, Any]]:
    """Select samples for people to read: per benchmark `right` right answers and `wrong` of each kind of failure.

    The selection follows a hash of the prompt, so two models are shown on the same questions where possible.
    """
    asked_rows = sorted(
        (row for row in rows if row["left_out"] is None),
        key=lambda row: hashlib.sha256(f"{row['benchmark']}/{row['prompt_digest']}".encode()).digest(),
    )
    counts: dict[tuple[str, str], int] = {}
    samples = []
    for row in asked_rows:
        kind = "right" if row["strict"] else row["problem"] or "wrong"
        count = counts.get((row["benchmark"], kind), 0)
        if count < (right if row["strict"] else wrong):
            counts[row["benchmark"], kind] = count + 1
            samples.append({**{field: row[field] for field in READING_FIELDS}, "kind": kind})
    order = {name: position for position, name in enumerate(dict.fromkeys(row["benchmark"] for row in rows))}
    return sorted(samples, key=lambda row: (order[row["benchmark"]], row["kind"] != "right", row["kind"], row["index"]))
