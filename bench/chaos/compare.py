"""Compare two stores of a chaos run: payloads, rows, and leftovers."""

import json
import re
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

# Kinds, metrics and fields that contain times differ between any two runs. So does the possible charge of a failing
# endpoint (dollars_unknown).
TIMED_KINDS = ("report", "data_card", "evaluation")
TIMED_METRICS = r"dollars_unknown|second|per_s|_s$|time|latency|mfu|bytes|share_in_steps"
TIMED_FIELDS = ("latency_s",)  # of a sample
# An execution with several artifacts would give each of its rows once per artifact, so only the first by id is joined.
LIVE = (
    "JOIN artifacts a ON a.execution = t.execution AND a.superseded = 0 AND a.id = (SELECT min(b.id) FROM artifacts b"
)
LIVE += " WHERE b.execution = t.execution AND b.superseded = 0)"


def payloads(store: Path) -> dict[str, str]:
    """`kind/key/file` -> sha256 of each live file without times, and the scores of evaluations."""
    by_name: dict[str, str] = {}
    for path in (store / "artifacts").glob("*/*/manifest.json"):
        # A superseded artifact: how many there are depends on the faults.
        if "." in path.parent.name:
            continue
        name = f"{path.parent.parent.name}/{path.parent.name}"
        kind = path.parent.parent.name
        if kind == "evaluation":
            # The files of an evaluation contain times; what must be equal are its scores.
            by_name[f"{name}/scores"] = json.dumps(_scores(path.parent / "scores.json"), sort_keys=True)
        elif kind in TIMED_KINDS:
            by_name[name] = "there"
        else:
            for file, entry in json.loads(path.read_text(encoding="utf-8"))["files"].items():
                by_name[f"{name}/{file}"] = entry["sha256"]
    return by_name


def _scores(path: Path) -> Any:
    report = json.loads(path.read_text(encoding="utf-8"))
    return {
        name: [benchmark.get("n"), benchmark.get("correct"), benchmark.get("accuracy")]
        for name, benchmark in report["benchmarks"].items()
    }


def rows(query: Any) -> dict[str, Counter[str]]:
    """Table -> the rows of the live artifacts' executions, identified by content, with the count of each."""
    columns = "key: a.key, name: t.name, step: t.step, source: t.source, value: t.value"
    query_rows = query(
        f"SELECT 'metrics' AS of, to_json({{{columns}}}) AS row "
        f"FROM metrics t {LIVE} WHERE NOT starts_with(t.name, 'system/') UNION ALL "
        f"""SELECT 'samples', to_json({{key: a.key, "set": t."set", "index": t."index", fields: t.fields}}) """
        f"FROM samples t {LIVE} UNION ALL "
        f"SELECT 'calls', to_json({{key: a.key, purpose: t.purpose, digest: t.digest}}) "
        f"FROM calls t {LIVE} WHERE t.status = 'ok' AND NOT t.cached"
    )
    by_name: dict[str, list[Any]] = {"metrics": [], "samples": [], "calls": []}
    for item in query_rows:
        row = json.loads(item["row"])
        if item["of"] == "metrics" and re.search(TIMED_METRICS, row["name"]):
            row["value"] = None
        if item["of"] == "samples":
            row["fields"] = {name: value for name, value in row["fields"].items() if name not in TIMED_FIELDS}
        by_name[item["of"]].append(row)
    return {
        name: Counter(json.dumps(row, sort_keys=True, default=str) for row in table_rows)
        for name, table_rows in by_name.items()
    }


def differences(plain: dict[str, Any], result: dict[str, Any]) -> list[str]:
    """What `result` (`{"payloads": …, "rows": …}`) lacks or has in addition to `plain`; empty if they are equal.

    A paid reply whose row was not on disk when its process was killed is requested again, which is a second call. A
    call may therefore occur twice, but must not be missing.
    """
    problems = []
    for name in sorted(plain["payloads"].keys() | result["payloads"].keys()):
        expected, actual = plain["payloads"].get(name), result["payloads"].get(name)
        if expected != actual:
            problems.append(
                f"{name}: {'missing' if actual is None else 'not in the plain run' if expected is None else 'differs'}"
            )
    for table, expected in plain["rows"].items():
        actual_rows = result["rows"][table]
        # Counters: a row that is there twice and expected once is one too many.
        missing, extra = expected - actual_rows, actual_rows - expected
        if table == "calls":
            extra = Counter({row: n for row, n in extra.items() if row not in expected})
        for word, odd_rows in (("lost", missing), ("too many", extra)):
            if odd_rows:
                problems.append(f"{table}: {sum(odd_rows.values())} {word}, one is {min(odd_rows)[:200]}")
    return problems


def repeated_calls(plain: dict[str, Any], result: dict[str, Any]) -> int:
    """Replies that were paid for more than once."""
    return sum((result["rows"]["calls"] - plain["rows"]["calls"]).values())


def leftovers(store: Path, query: Any) -> list[str]:
    """Staging folders and unfinished runs in the catalog; there must be none once nothing runs."""
    results = [f"staging: {path.name[:16]} is left" for path in (store / "staging").iterdir() if len(path.name) == 64]
    results += [
        f"runs: {row['label']} is still {row['state']}"
        for row in query("SELECT label, state FROM runs WHERE state = 'running'")
    ]
    return results


def prefect_running(store: Path) -> int:
    """Number of flow runs that Prefect's own database still lists as running."""
    path = store / "prefect" / "prefect.db"
    if not path.exists():
        return 0
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
        return database.execute("SELECT count(*) FROM flow_run WHERE state_type = 'RUNNING'").fetchone()[0]
