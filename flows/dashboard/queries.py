"""What the dashboard asks of the catalog. Everything that could be long is thinned or paged in SQL, so that a page of
a store with a million metric rows needs no more than one of a store with a thousand."""

from collections.abc import Sequence
from typing import Any

from store.catalog import Catalog
from store.lineage import WITH_CALLS

Row = dict[str, Any]

POINTS = 400  # of a curve: more than a chart has pixels for
PAGE = 25  # texts at a time

_RUNS = """
WITH latest AS (
    SELECT * FROM runs QUALIFY row_number() OVER (PARTITION BY run, label ORDER BY attempt DESC, time DESC) = 1)
SELECT run, any_value(config) AS config, min(started) AS begun, max(coalesce(ended, time)) AS ended,
    count(*) AS stages, count(*) FILTER (state = 'running') AS running, count(*) FILTER (state = 'failed') AS failed,
    count(*) FILTER (state IN ('cancelled', 'interrupted')) AS stopped, count(*) FILTER (reused) AS reused
FROM latest WHERE run IS NOT NULL GROUP BY run ORDER BY begun DESC LIMIT ?
"""
_STAGES = """
WITH spent AS (
    SELECT execution, sum(dollars) AS dollars, count(*) FILTER (NOT coalesce(cached, false)) AS calls
    FROM calls GROUP BY execution),
mine AS (SELECT * FROM runs WHERE run = ?),
tries AS (SELECT label, count(*) AS attempts, sum(seconds) AS seconds, min(started) AS begun FROM mine GROUP BY label)
SELECT m.label, m.stage, m.state, m.reused, t.attempts, t.begun, m.ended, t.seconds, m.peak_bytes,
    s.dollars, s.calls, m.key, m.execution, m.outputs, m.error, m.commit, m.host
FROM mine m JOIN tries t USING (label) LEFT JOIN spent s USING (execution)
QUALIFY row_number() OVER (PARTITION BY m.label ORDER BY m.attempt DESC, m.time DESC) = 1 ORDER BY t.begun, m.label
"""
_NAMES = """
SELECT name, count(*) AS points FROM metrics WHERE list_contains(?, execution) GROUP BY name ORDER BY name
"""
# A bucket of steps becomes one point: its last step, the mean of what was measured in it, and its extremes.
_CURVES = """
WITH chosen AS (
    SELECT execution, name, coalesce(source, '') AS source, step, value FROM metrics
    WHERE list_contains(?, execution) AND list_contains(?, name) AND isfinite(value)),
spans AS (SELECT name, min(step) AS lowest, greatest(1, max(step) - min(step)) AS span FROM chosen GROUP BY name)
SELECT c.execution, c.name, c.source, max(c.step) AS step, avg(c.value) AS value,
    min(c.value) AS low, max(c.value) AS high, count(*) AS points
FROM chosen c JOIN spans USING (name)
GROUP BY c.execution, c.name, c.source, floor((c.step - lowest) * ? / span) ORDER BY ALL
"""
_SETS = """
SELECT "set", count(*) AS texts FROM samples WHERE list_contains(?, execution) GROUP BY "set" ORDER BY "set"
"""
_TEXTS = """
SELECT "index", fields, count(*) OVER () AS found FROM samples
WHERE list_contains(?, execution) AND "set" = ? AND (? = '' OR contains(lower(fields::VARCHAR), lower(?)))
AND {verdict} ORDER BY {order}, "index" LIMIT ? OFFSET ?
"""
_CALLS = """
SELECT stage, purpose, endpoint, model, count(*) AS attempts, count(*) FILTER (cached) AS remembered,
    count(*) FILTER (error IS NOT NULL) AS failed, sum(tokens_in) AS tokens_in, sum(tokens_out) AS tokens_out,
    sum(dollars) AS dollars, quantile_cont(latency_s, 0.5) AS median_s, quantile_cont(latency_s, 0.95) AS p95_s
FROM calls WHERE list_contains(?, execution) GROUP BY ALL ORDER BY ALL
"""
_STATUSES = """
SELECT endpoint, status, count(*) AS attempts FROM calls WHERE list_contains(?, execution) GROUP BY ALL ORDER BY ALL
"""
_ARTIFACTS = """
SELECT id, kind, stage, created, bytes, file_count, superseded > 0 AS replaced, execution, run FROM artifacts
WHERE ? = '' OR kind = ? ORDER BY created DESC LIMIT ?
"""
_SIZES = "SELECT kind, count(*) AS artifacts, sum(bytes) AS bytes FROM artifacts GROUP BY kind ORDER BY bytes DESC"

# What a list of texts may be ordered by: a choice of ours, for it becomes part of the query.
ORDERS = {
    "newest step first": "(fields->>'step')::BIGINT DESC NULLS LAST",
    "highest reward": "(fields->>'reward')::DOUBLE DESC NULLS LAST",
    "lowest reward": "(fields->>'reward')::DOUBLE ASC NULLS LAST",
    "largest advantage": "(fields->>'advantage')::DOUBLE DESC NULLS LAST",
    "longest": "(fields->>'length')::BIGINT DESC NULLS LAST",
    "as they came": '"index"',
}


def runs(catalog: Catalog, limit: int = 50) -> list[Row]:
    """The newest runs: when, how many stages, how many of them running, failed, stopped, reused."""
    return catalog.query(_RUNS, [limit])


def stages(catalog: Catalog, run: str) -> list[Row]:
    """The last attempt at each stage of a run, with time over all attempts and what its calls cost (None: no calls)."""
    return catalog.query(_STAGES, [run])


def metric_names(catalog: Catalog, executions: Sequence[str]) -> list[str]:
    return [row["name"] for row in catalog.query(_NAMES, [list(executions)])]


def curves(catalog: Catalog, executions: Sequence[str], names: Sequence[str], points: int = POINTS) -> list[Row]:
    """About `points` points, at most, for each execution, metric and source; `low`, `high`: of what one stands for."""
    return catalog.query(_CURVES, [list(executions), list(names), points])


def sample_sets(catalog: Catalog, executions: Sequence[str]) -> dict[str, int]:
    return {row["set"]: row["texts"] for row in catalog.query(_SETS, [list(executions)])}


def texts(
    catalog: Catalog, executions: Sequence[str], name: str, search: str = "", order: str = "as they came", page: int = 0
) -> tuple[int, list[Row]]:
    """How many samples of the set hold `search` (any case), and one page of them in the order named in `ORDERS`."""
    sql = _TEXTS.format(verdict="TRUE", order=ORDERS[order])
    found = catalog.query(sql, [list(executions), name, search, search, PAGE, page * PAGE])
    return (found[0]["found"] if found else 0), found


def calls(catalog: Catalog, executions: Sequence[str]) -> list[Row]:
    """Attempts, tokens, dollars and latency by stage, purpose and endpoint."""
    return catalog.query(_CALLS, [list(executions)])


def call_statuses(catalog: Catalog, executions: Sequence[str]) -> list[Row]:
    return catalog.query(_STATUSES, [list(executions)])


def artifacts(catalog: Catalog, kind: str = "", limit: int = 500) -> list[Row]:
    """The newest artifacts, of one kind or of all."""
    return catalog.query(_ARTIFACTS, [kind, kind, limit])


def sizes(catalog: Catalog) -> list[Row]:
    return catalog.query(_SIZES)


_VERDICTS = {
    "any": "TRUE",
    "right": "(fields->>'strict')::BOOLEAN",
    "wrong": "NOT (fields->>'strict')::BOOLEAN",
    "strict and lenient differ": "fields->>'strict' <> fields->>'lenient'",
    "unfinished": "NOT (fields->>'finished_thinking')::BOOLEAN",
}


def verdicts(
    catalog: Catalog, executions: Sequence[str], name: str, search: str, verdict: str
) -> tuple[int, list[Row]]:
    """Samples of an evaluation whose verdict is one of `_VERDICTS`: how many, and the first of them."""
    sql = _TEXTS.format(verdict=_VERDICTS[verdict], order=ORDERS["as they came"])
    found = catalog.query(sql, [list(executions), name, search, search, PAGE, 0])
    return (found[0]["found"] if found else 0), found


def lineage(catalog: Catalog, artifact: str) -> list[Row]:
    """As `Catalog.lineage`, of what the catalog holds now."""
    return catalog.query(WITH_CALLS, [artifact])
