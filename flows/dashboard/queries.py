"""The dashboard's catalog queries, as SQL whose parameters the comments name. `executions` are lists.

Curves are thinned and texts are paged in SQL, so that a store with a million metric rows is as fast to show as one with
a thousand.
"""

from pathlib import Path

POINTS = 400  # of a curve: about as many as a chart has pixels
PAGE = 10  # texts on a page
FILE_ROWS = 20_000  # of a JSON Lines file: what can be searched and sorted while somebody waits

# The newest runs: time, and how many of their stages are running, failed, stopped, reused. ()
RUNS = """
WITH latest AS (
    SELECT * FROM runs QUALIFY row_number() OVER (PARTITION BY run, label ORDER BY attempt DESC, time DESC) = 1)
SELECT run, any_value(config) AS config, min(started) AS begun, max(coalesce(ended, time)) AS ended,
    count(*) AS stages, count(*) FILTER (state = 'running') AS running, count(*) FILTER (state = 'failed') AS failed,
    count(*) FILTER (state IN ('cancelled', 'interrupted')) AS stopped, count(*) FILTER (reused) AS reused
FROM latest WHERE run IS NOT NULL GROUP BY run ORDER BY begun DESC LIMIT 50
"""
# The last attempt at each stage of a run, with the time of all attempts and the cost of its calls. (run)
STAGES = """
WITH spent AS (
    SELECT execution, sum(dollars) AS dollars, sum((fields->>'unknown_dollars')::DOUBLE) AS unknown_dollars,
        count(*) FILTER (NOT coalesce(cached, false)) AS calls
    FROM calls GROUP BY execution),
mine AS (SELECT * FROM runs WHERE run = ?),
tries AS (SELECT label, count(*) AS attempts, sum(seconds) AS seconds, min(started) AS begun FROM mine GROUP BY label)
SELECT m.label, m.stage, m.state, m.reused, t.attempts, t.begun, m.ended, t.seconds, m.peak_bytes,
    s.dollars, s.unknown_dollars, s.calls, m.key, m.execution, m.outputs, m.error, m.commit, m.host
FROM mine m JOIN tries t USING (label) LEFT JOIN spent s USING (execution)
QUALIFY row_number() OVER (PARTITION BY m.label ORDER BY m.attempt DESC, m.time DESC) = 1 ORDER BY t.begun, m.label
"""
# (executions)
METRIC_NAMES = """
SELECT name, count(*) AS points FROM metrics WHERE list_contains(?, execution) GROUP BY name ORDER BY name
"""
# Each bucket of steps becomes one point: its last step, and the mean and the extremes (`low`, `high`) of its values.
# (executions, metric names, about how many points at most for each execution, metric and source)
CURVES = """
WITH chosen AS (
    SELECT execution, name, coalesce(source, '') AS source, step, value FROM metrics
    WHERE list_contains(?, execution) AND list_contains(?, name) AND isfinite(value)),
spans AS (SELECT name, min(step) AS lowest, greatest(1, max(step) - min(step)) AS span FROM chosen GROUP BY name)
SELECT c.execution, c.name, c.source, max(c.step) AS step, avg(c.value) AS value,
    min(c.value) AS low, max(c.value) AS high, count(*) AS points
FROM chosen c JOIN spans USING (name)
GROUP BY c.execution, c.name, c.source, floor((c.step - lowest) * ? / span) ORDER BY ALL
"""
# (executions)
SAMPLE_SETS = """
SELECT "set", count(*) AS texts FROM samples WHERE list_contains(?, execution) GROUP BY "set" ORDER BY "set"
"""
_TEXTS = """
WITH source AS ({source})
SELECT "index", fields, count(*) OVER () AS total FROM source
WHERE (? = '' OR contains(lower(fields::VARCHAR), lower(?))) AND {which} ORDER BY {order}, "index" LIMIT ? OFFSET ?
"""
# Sources of `texts`: the samples of a set (executions, name of the set), and
# the first lines of a JSON Lines file in the store (`file_pattern` of its path, number of lines).
SAMPLES = 'SELECT "index", fields FROM samples WHERE list_contains(?, execution) AND "set" = ?'
FILE_LINES = """
SELECT row_number() OVER () - 1 AS "index", json AS fields
FROM (SELECT json FROM read_ndjson_objects(?, ignore_errors = true) WHERE json IS NOT NULL LIMIT ?)
"""
# Attempts, tokens, dollars and latency by stage, purpose and endpoint. (executions)
CALLS = """
SELECT stage, purpose, endpoint, model, count(*) AS attempts, count(*) FILTER (cached) AS remembered,
    count(*) FILTER (error IS NOT NULL) AS failed, sum(tokens_in) AS tokens_in, sum(tokens_out) AS tokens_out,
    sum(dollars) AS dollars, sum((fields->>'unknown_dollars')::DOUBLE) AS unknown_dollars,
    quantile_cont(latency_s, 0.5) AS median_s, quantile_cont(latency_s, 0.95) AS p95_s
FROM calls WHERE list_contains(?, execution) GROUP BY ALL ORDER BY ALL
"""
# (executions)
CALL_STATUSES = """
SELECT endpoint, status, count(*) AS attempts FROM calls WHERE list_contains(?, execution) GROUP BY ALL ORDER BY ALL
"""
# The newest artifacts of a kind, or of all for "". (kind, kind, limit)
ARTIFACTS = """
SELECT id, kind, stage, created, bytes, file_count, superseded > 0 AS replaced, execution, run FROM artifacts
WHERE ? = '' OR kind = ? ORDER BY created DESC LIMIT ?
"""
# The artifacts of executions, oldest first, with facts and configuration as JSON. (executions)
ARTIFACTS_OF = """
SELECT id, kind, stage, execution, facts, config FROM artifacts WHERE list_contains(?, execution) ORDER BY created, id
"""
# Newest first, with the label and configuration of the run that made each. ()
# `label` names the stage that was evaluated; an evaluation of a checkpoint by name has none.
EVALUATIONS = """
SELECT a.id, a.execution, a.run, a.created, max(r.label) AS label, max(r.config) AS config
FROM artifacts a LEFT JOIN runs r ON r.execution = a.execution AND NOT coalesce(r.reused, false)
WHERE a.kind = 'evaluation' AND a.superseded = 0 GROUP BY ALL ORDER BY a.created DESC LIMIT 200
"""
SIZES = "SELECT kind, count(*) AS artifacts, sum(bytes) AS bytes FROM artifacts GROUP BY kind ORDER BY bytes DESC"

# The orders of a list of texts: a fixed choice, because they become part of the SQL.
ORDERS = {
    "newest step first": "TRY_CAST(fields->>'step' AS BIGINT) DESC NULLS LAST",
    "highest reward": "TRY_CAST(fields->>'reward' AS DOUBLE) DESC NULLS LAST",
    "lowest reward": "TRY_CAST(fields->>'reward' AS DOUBLE) ASC NULLS LAST",
    "largest advantage": "TRY_CAST(fields->>'advantage' AS DOUBLE) DESC NULLS LAST",
    "longest": "TRY_CAST(fields->>'length' AS BIGINT) DESC NULLS LAST",
    "as they came": '"index"',
}
# The filters, a fixed choice as well.
WHICH = {
    "any": "TRUE",
    "kept": "coalesce(fields->>'rejected', fields->>'reason') IS NULL",
    "rejected": "coalesce(fields->>'rejected', fields->>'reason') IS NOT NULL",
    "right": "TRY_CAST(fields->>'strict' AS BOOLEAN)",
    "wrong": "NOT TRY_CAST(fields->>'strict' AS BOOLEAN)",
    "strict and lenient differ": "fields->>'strict' <> fields->>'lenient'",
    "unfinished": "NOT TRY_CAST(fields->>'finished_thinking' AS BOOLEAN)",
}


def texts(source: str, order: str = "as they came", which: str = "any") -> str:
    """SQL for a page of the texts of a `source`, with their `total` number.

    Its parameters are those of the source, then the text that they contain (any case) twice, rows a page, first row.
    """
    return _TEXTS.format(source=source, which=WHICH[which], order=ORDERS[order])


def file_pattern(path: Path) -> str:
    """The path as DuckDB reads paths: as patterns."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in str(path))
