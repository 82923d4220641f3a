"""The catalog's views, the one place that says what a run, step, execution, cost and score is; and lineage macros.

The report, the dashboard, the command line and `nautile sql` read them. docs/store.md describes their columns.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from nautile.store.schema import TABLES


@dataclass(frozen=True)
class CatalogView:
    """A view of the catalog: its name, its query, and the columns that identify a row.

    Where a query has the condition `_ALL_RUNS`, `of` replaces it.
    """

    name: str
    key: tuple[str, ...]
    query: str

    def create(self) -> str:
        """The CREATE VIEW statement."""
        return f"CREATE VIEW {self.name} AS {self.query}"

    def of(self, condition: str) -> str:
        """The rows of the view of the runs with a condition on `run`, as a subquery.

        The same rows as with `WHERE condition` behind the view, at a cost that does not grow with the other runs:
        DuckDB does not pass such a condition down to tables that are joined with what it chooses.
        """
        return f"({self.query.replace(_ALL_RUNS, condition)})"


_ALL_RUNS = "run IS NOT NULL"


# An execution is the work on one key from its first attempt to its last. A reuse is an attempt's row too, but no work.
# Its run, label and configuration are those of the attempt that completed it, else of the last.
EXECUTIONS = CatalogView(
    "executions",
    ("execution",),
    """
WITH own AS (
    SELECT *, (coalesce(state = 'done', false), started, time) AS place FROM attempts
    WHERE execution IS NOT NULL AND NOT coalesce(reused, false))
SELECT execution, arg_max(run, place) AS run, arg_max(config, place) AS config, arg_max(stage, place) AS stage,
    arg_max(label, place) AS label, arg_max(key, place) AS key, coalesce(bool_or(state = 'done'), false) AS made,
    count(*) AS attempts, min(started) AS started, max(ended) AS ended, sum(seconds) AS seconds,
    max(peak_bytes) AS peak_bytes
FROM own GROUP BY execution
""",
)


def _with_step(table: str) -> CatalogView:
    """The events of an execution with the run and the step that it belongs to."""
    query = f"SELECT t.*, e.run, e.label FROM recorded.{table} t LEFT JOIN executions e USING (execution)"
    return CatalogView(table, ("execution", "id"), query)


# Accelerators of an execution, as its child process found them, and the price of one for a second, nothing of a CPU;
# and its endpoint calls: `dollars` is certain, `unknown_dollars` may be added by lost replies. In the braces, what
# chooses the executions before their rows are grouped.
_SPENT_BY_EXECUTION = """
chips AS (
    SELECT execution, arg_max(value, time) FILTER (name = 'system/chips') AS chips,
        arg_max(value, time) FILTER (name = 'system/dollars_per_chip_hour') / 3600 AS rate
    FROM recorded.metrics {chosen}
    WHERE name IN ('system/chips', 'system/dollars_per_chip_hour') GROUP BY execution),
asked AS (
    SELECT execution, count(*) AS calls, count(*) FILTER (coalesce(cached, false)) AS cached,
        sum(tokens_in) AS tokens_in, sum(tokens_out) AS tokens_out, sum(dollars) AS dollars,
        sum(TRY_CAST(fields->>'unknown_dollars' AS DOUBLE)) AS unknown_dollars
    FROM recorded.calls {chosen} GROUP BY execution)
"""
# What an execution cost. Accelerators: `chip_hours` and `chip_dollars`, wall time of its ended attempts; NULL on a CPU,
# or without a price. Grouped and not joined, so that a condition on the execution reaches the tables.
COSTS = CatalogView(
    "costs",
    ("execution",),
    f"""
WITH {_SPENT_BY_EXECUTION.format(chosen="")},
occupied AS (
    SELECT execution, seconds * chips / 3600 AS chip_hours, seconds * chips * rate AS chip_dollars
    FROM chips JOIN executions USING (execution))
SELECT execution, max(calls) AS calls, max(cached) AS cached, max(tokens_in) AS tokens_in,
    max(tokens_out) AS tokens_out, max(dollars) AS dollars, max(unknown_dollars) AS unknown_dollars,
    max(chip_hours) AS chip_hours, max(chip_dollars) AS chip_dollars
FROM (FROM asked UNION ALL BY NAME FROM occupied) GROUP BY execution
""",
)
# A step that a run has begun: its last attempt, and the attempts, time and calls of all that the run itself did for it.
# A step that the run executed and then reused after a retry is done, not reused.
STEPS = CatalogView(
    "steps",
    ("run", "label"),
    f"""
WITH mine AS (
    SELECT *, bool_or(state = 'done') OVER (PARTITION BY run, label, execution) AS made_here FROM attempts
    WHERE {_ALL_RUNS}),
own AS (
    SELECT * EXCLUDE (reused), coalesce(reused, false) AS reused FROM mine
    WHERE NOT (coalesce(reused, false) AND coalesce(made_here, false))),
{_SPENT_BY_EXECUTION.format(chosen="SEMI JOIN own USING (execution)")},
tries AS (
    SELECT run, label, count(*) FILTER (NOT reused) AS attempts, sum(seconds) AS seconds, min(started) AS begun,
        max(peak_bytes) AS peak_bytes, sum(seconds * chips / 3600) FILTER (NOT reused) AS chip_hours,
        sum(seconds * chips * rate) FILTER (NOT reused) AS chip_dollars
    FROM own LEFT JOIN chips USING (execution) GROUP BY run, label),
paid AS (
    SELECT run, label, reused, sum(calls)::BIGINT AS calls, sum(cached)::BIGINT AS cached, sum(dollars) AS dollars,
        sum(unknown_dollars) AS unknown_dollars
    FROM (SELECT DISTINCT run, label, reused, execution FROM own) JOIN asked USING (execution) GROUP BY ALL)
SELECT m.run, m.label, m.stage, m.state, m.reused, t.attempts, t.begun, m.started, m.ended, t.seconds, t.peak_bytes,
    p.dollars, p.unknown_dollars, p.calls, p.cached, t.chip_hours, t.chip_dollars, m.key, m.execution, m.outputs,
    m.error, m.exit_code, m.commit, m.host, m.config
FROM own m JOIN tries t ON t.run = m.run AND t.label IS NOT DISTINCT FROM m.label
LEFT JOIN paid p ON p.run = m.run AND p.label IS NOT DISTINCT FROM m.label AND p.reused = m.reused
QUALIFY row_number() OVER (PARTITION BY m.run, m.label ORDER BY m.started DESC, m.time DESC) = 1
""",
)
# A run is all starts under one id. It began with the first of its starts and attempts. Name, state, plan, settings and
# error are of the newest start (`started`); `ended` is its end, or the time of the last event of a run that has none;
# `seconds` is the wall time between the two. `stages` and the counts after it are of steps that it has begun.
# `pipeline` is false for single uses of a model and for estimates: one step, and no plan.
RUNS = CatalogView(
    "runs",
    ("run",),
    """
WITH latest AS (
    SELECT *, min(started) OVER (PARTITION BY run) AS first FROM attempts WHERE run IS NOT NULL
    QUALIFY row_number() OVER (PARTITION BY run, label ORDER BY started DESC, time DESC) = 1),
begun AS (
    SELECT run, any_value(config) AS config, min(first) AS first, min(started) AS newest,
        max(coalesce(ended, time)) AS ended, count(*) AS stages,
        count(*) FILTER (state IN ('done', 'reused')) AS finished, count(*) FILTER (state = 'running') AS running,
        count(*) FILTER (state = 'failed') AS failed,
        count(*) FILTER (state IN ('cancelled', 'interrupted')) AS stopped,
        list(label) FILTER (state IN ('done', 'reused')) AS finished_labels
    FROM latest GROUP BY run),
plan AS (
    SELECT *, min(started) OVER (PARTITION BY run) AS first FROM plans WHERE run IS NOT NULL
    QUALIFY row_number() OVER (PARTITION BY run ORDER BY started DESC, time DESC) = 1),
known AS (
    SELECT coalesce(p.run, b.run) AS run, coalesce(p.config, b.config) AS config, p.name, p.state, p.host, p.commit,
        p.changes, p.error, p.resume, list_filter(json_extract_string(p.steps, '$[*].label'),
            lambda label: NOT list_contains(coalesce(b.finished_labels, []), label))[1] AS first_unfinished,
        least(p.first, b.first) AS begun, coalesce(p.ended, b.ended, p.time) AS ended,
        json_array_length(p.steps) AS planned, coalesce(b.stages, 0) AS stages, coalesce(b.finished, 0) AS finished,
        coalesce(b.running, 0) AS running, coalesce(b.failed, 0) AS failed, coalesce(b.stopped, 0) AS stopped,
        p.run IS NOT NULL OR b.stages > 1 AS pipeline, least(b.newest, p.started) AS newest, p.started, p.steps,
        p.settings
    FROM begun b FULL JOIN plan p USING (run))
SELECT *, if(ended < begun, 0, epoch(ended) - epoch(begun)) AS seconds FROM known
""",
)
# The accuracies of a run's evaluations, `accuracy` (strict, by generation), `accuracy_lenient` or `likelihood`,
# by benchmark and mean. `gain` is over the stage before in the run's plan that has this figure (`over`), and NULL where
# the two evaluations did not grade equally many samples. `not_screened` names the training text that was not screened
# for the benchmark's questions, NULL if all was.
SCORES = CatalogView(
    "scores",
    ("run", "label", "benchmark", "figure"),
    f"""
WITH evaluated AS (
    SELECT run, label, split_part(label, ':', 2) AS after, execution, started FROM attempts
    WHERE {_ALL_RUNS} AND stage = 'evaluate' AND state IN ('done', 'reused')
    QUALIFY row_number() OVER (PARTITION BY run, label ORDER BY started DESC, time DESC) = 1),
measured AS (
    SELECT execution, part.benchmark, part.figure, value FROM (
        SELECT execution, value, time, regexp_extract(name, '^evaluate/(.+)/([^/]+)$', ['benchmark', 'figure']) AS part
        FROM recorded.metrics SEMI JOIN evaluated USING (execution)
        WHERE starts_with(name, 'evaluate/') AND regexp_matches(name, '^evaluate/.+/[^/]+$') AND isfinite(value))
    QUALIFY row_number() OVER (PARTITION BY execution, part ORDER BY time DESC) = 1),
planned AS (
    SELECT run, json_extract_string(steps, '$[*].label') AS labels FROM plans SEMI JOIN evaluated USING (run)
    QUALIFY row_number() OVER (PARTITION BY run ORDER BY started DESC, time DESC) = 1),
placed AS (
    SELECT e.run, e.label, e.after, m.benchmark, m.figure, m.value, execution, a.id AS evaluation, e.started,
        list_position(p.labels, e.after) AS place,
        TRY_CAST(a.facts->>'samples' AS BIGINT) - coalesce(TRY_CAST(a.facts->>'left_out' AS BIGINT), 0) AS graded,
        a.facts->'not_screened'->>m.benchmark AS not_screened
    FROM evaluated e JOIN measured m USING (execution)
    LEFT JOIN (
        SELECT execution, arg_min(id, superseded) AS id, arg_min(facts, superseded) AS facts FROM artifacts
        SEMI JOIN evaluated USING (execution) WHERE kind = 'evaluation' GROUP BY execution) a USING (execution)
    LEFT JOIN planned p ON p.run = e.run),
compared AS (
    SELECT *, CASE WHEN place IS NOT NULL THEN lag({{after: after, value: value, graded: graded}}) OVER (
        PARTITION BY run, benchmark, figure, place IS NULL ORDER BY place) END AS prior FROM placed)
SELECT run, label, after, benchmark, figure, value, prior.after AS over,
    CASE WHEN graded IS NOT DISTINCT FROM prior.graded THEN value - prior.value END AS gain, not_screened,
    evaluation, execution, started
FROM compared
""",
)
# In this order: a view may read those before it.
VIEWS = (EXECUTIONS, *map(_with_step, ("metrics", "calls", "samples")), COSTS, STEPS, RUNS, SCORES)
# Name of a table or view -> the columns that identify a row.
RELATIONS = {table.name: table.key for table in TABLES} | {view.name: view.key for view in VIEWS}
# Time, memory and cost of executions. (executions)
SPENT = """
SELECT execution, attempts, seconds, peak_bytes, dollars, chip_hours, chip_dollars
FROM (FROM executions WHERE list_contains($1, execution))
LEFT JOIN (FROM costs WHERE list_contains($1, execution)) USING (execution)
"""
# The newest attempt at each of the keys. A reuse says nothing about how the work went. (keys)
LAST_ATTEMPTS = """
SELECT key, state, attempt, started, seconds, error FROM attempts
WHERE list_contains(?, key) AND NOT coalesce(reused, false)
QUALIFY row_number() OVER (PARTITION BY key ORDER BY started DESC, time DESC) = 1
"""

# Each artifact is visited once, at its least distance: damaged manifests may name each other as inputs in a circle.
LINEAGE = """
CREATE OR REPLACE MACRO lineage(artifact_id) AS TABLE
WITH RECURSIVE edges AS (
    SELECT i.artifact AS made, i.name, a.id FROM inputs i JOIN artifacts a ON a.kind = i.kind AND a.key = i.key AND (
        a.published_as = i.published_as
        -- the version that was read is gone: show the one that has its key now
        OR (a.superseded = 0 AND NOT EXISTS (
            SELECT 1 FROM artifacts x WHERE x.kind = i.kind AND x.key = i.key AND x.published_as = i.published_as)))
),
up(id, depth) USING KEY (id) AS (
    SELECT id, 0 FROM artifacts WHERE id = artifact_id
    UNION
    SELECT e.id, min(up.depth) + 1 FROM up JOIN edges e ON e.made = up.id
    WHERE NOT EXISTS (SELECT 1 FROM recurring.up seen WHERE seen.id = e.id) GROUP BY e.id
)
SELECT 0 AS depth, NULL::VARCHAR AS name, NULL::VARCHAR AS made, a.* FROM artifacts a WHERE a.id = artifact_id
UNION ALL
SELECT up.depth + 1, e.name, e.made, a.* FROM up JOIN edges e ON e.made = up.id JOIN artifacts a ON a.id = e.id
ORDER BY depth, kind, id
"""

LINEAGE_FILES = """
CREATE OR REPLACE MACRO lineage_files(artifact_id) AS TABLE
SELECT a.id AS artifact, a.kind, a.stage, f.key AS path,
       (f.value->>'bytes')::BIGINT AS bytes, f.value->>'sha256' AS sha256
FROM artifacts a, json_each(a.files) f
WHERE a.id IN (SELECT id FROM lineage(artifact_id)) ORDER BY a.kind, a.id, path
"""

LINEAGE_CALLS = """
CREATE OR REPLACE MACRO lineage_calls(artifact_id) AS TABLE
SELECT c.* FROM calls c WHERE c.execution IN (SELECT execution FROM lineage(artifact_id)) ORDER BY c.time, c.id
"""

MACROS = (LINEAGE, LINEAGE_FILES, LINEAGE_CALLS)

# For `Catalog.lineage`: a row for each artifact and use, with the number of endpoint calls of its execution, the number
# of those that were answered from the reply cache, and the name of the configuration whose run made it.
LINEAGE_WITH_CALLS = """
WITH made_from AS MATERIALIZED (FROM lineage(?)),
asked AS (
    SELECT execution, count(*) AS calls, count(*) FILTER (coalesce(cached, false)) AS cached
    FROM recorded.calls SEMI JOIN made_from USING (execution) GROUP BY execution)
SELECT l.*, coalesce(c.calls, 0) AS calls, coalesce(c.cached, 0) AS cached_calls, e.config AS configuration
FROM made_from l LEFT JOIN asked c USING (execution) LEFT JOIN executions e USING (execution)
ORDER BY l.depth, l.kind, l.id
"""


def run_seconds(row: Mapping[str, Any], live: bool) -> float | None:
    """The time of the run of a row of `runs`: wall time from its first start to its end, of a live run until now."""
    if not live or row["begun"] is None:
        return None if row["seconds"] is None else float(row["seconds"])
    begun: datetime = row["begun"]
    return max(0.0, (datetime.now(UTC).replace(tzinfo=None) - begun).total_seconds())
