"""SQL queries of the dashboard on the catalog. Comments list their parameters; `executions` are lists.

Curves are downsampled and texts are paged in SQL, so that a store with a million metric rows is as fast as one with a
thousand.
"""

from pathlib import Path

from nautile.flows.listings import FITS
from nautile.store import views

LISTED = 50  # entries of a page of runs, artifacts or evaluations, and of a picker; a search finds the others
# Its row of `run_state.RUNS`. (run)
ONE_RUN = "SELECT * EXCLUDE (steps, settings) FROM runs WHERE pipeline AND run = ?"
RUNS_BEGINNING = "SELECT run FROM runs WHERE starts_with(run, ?) LIMIT 2"

PAGE = 10  # texts per page
GROUPS_PAGE = 6  # groups of texts per page
FILE_ROWS = 20_000  # rows of a JSON Lines file that are sorted and grouped at a time; more would take too long

# (executions)
METRIC_NAMES = """
SELECT name, count(*) AS points FROM metrics WHERE list_contains(?, execution) GROUP BY name ORDER BY name
"""
# All that was measured of them, for a file. (executions, metric names, most rows)
MEASURED = """
SELECT run, label AS step_of_run, name AS metric, source, step, value, time FROM metrics
WHERE list_contains(?, execution) AND list_contains(?, name) ORDER BY ALL LIMIT ?
"""
# Tokens per training step: its speed times its time. (executions)
TOKENS_A_STEP = """
SELECT s.execution, median(s.value * t.value) AS tokens
FROM metrics s JOIN metrics t ON t.execution = s.execution AND t.step = s.step AND t.name = 'step_seconds'
WHERE list_contains(?, s.execution) AND s.name = 'tokens_per_second' GROUP BY s.execution
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
# Sources of `texts` and `groups`: the samples of a set (executions, name of the set), those of all sets (executions),
# and lines of a JSON Lines file in the store (parameters: `lines_of`).
SAMPLES = 'SELECT "index", fields FROM samples WHERE list_contains(?, execution) AND "set" = ?'
ALL_SAMPLES = 'SELECT "index", fields FROM samples WHERE list_contains(?, execution)'
FILE_LINES = """
SELECT row_number() OVER () - 1 AS "index", json AS fields
FROM (SELECT json FROM read_ndjson_objects(?, ignore_errors = true) WHERE json IS NOT NULL
    AND (? = '' OR TRY_CAST(json->>'step' AS BIGINT) + 1 = TRY_CAST(? AS BIGINT))
    AND (? = '' OR ? = md5(coalesce(json->>'question', json->>'prompt', '')))
    AND (? = '' OR contains(lower(json::VARCHAR), lower(?))) LIMIT ? OFFSET ?)
"""
# Attempts, tokens, dollars and latency by stage, purpose and endpoint. (executions)
CALLS = """
SELECT stage, purpose, endpoint, model, count(*) AS attempts, count(*) FILTER (cached) AS remembered,
    count(*) FILTER (error IS NOT NULL) AS failed, sum(tokens_in) AS tokens_in, sum(tokens_out) AS tokens_out,
    sum(dollars) AS dollars, sum(TRY_CAST(fields->>'unknown_dollars' AS DOUBLE)) AS unknown_dollars,
    quantile_cont(latency_s, 0.5) AS median_s, quantile_cont(latency_s, 0.95) AS p95_s
FROM calls WHERE list_contains(?, execution) GROUP BY ALL ORDER BY ALL
"""
# (executions)
CALL_STATUSES = """
SELECT endpoint, status, count(*) AS attempts FROM calls WHERE list_contains(?, execution) GROUP BY ALL ORDER BY ALL
"""
# Name on the page -> order of `listings.RUN_ORDERS`.
RUN_ORDERS = {
    "newest first": "newest",
    "oldest first": "oldest",
    "highest score": "best",
    "lowest score": "worst",
    "longest": "time",
    "by name": "name",
}
# The runs that may be live by their record, however old, and those that wait for an answer. (runs that wait)
LIVE_RUNS = """
SELECT * EXCLUDE (steps, settings) FROM runs
WHERE pipeline AND (state = 'running' OR (state IS NULL AND running > 0) OR list_contains(?, run)) ORDER BY newest DESC
"""
KNOWN_RUNS = "SELECT run FROM runs WHERE list_contains(?, run)"  # (runs)
# The score of each run on a benchmark after a stage, and `before`, that of the run before which was evaluated so, with
# its `earlier` evaluation. (runs)
RUNS_BEFORE = """
WITH placed AS (
    SELECT s.run, after, benchmark, value, lag(value) OVER own AS before, lag(evaluation) OVER own AS earlier
    FROM scores s JOIN runs r USING (run) WHERE r.pipeline AND figure = 'accuracy'
    WINDOW own AS (PARTITION BY after, benchmark ORDER BY r.newest, s.run))
SELECT * FROM placed WHERE list_contains(?, run)
"""
ARTIFACT = "SELECT id, execution FROM artifacts WHERE id = ?"  # (id)
# The artifacts of executions, oldest first, with facts and configuration as JSON. (executions)
ARTIFACTS_OF = """
SELECT id, kind, stage, execution, facts, config FROM artifacts WHERE list_contains(?, execution) ORDER BY created, id
"""
# (ids)
CONFIGURATIONS = """
SELECT id, coalesce(label, stage) AS label, config FROM artifacts WHERE list_contains(?, id) ORDER BY created, id
"""
# Evaluations, with the label and configuration of the run that made each. `label` contains the evaluated stage; it is
# null for an evaluation of a named checkpoint.
_EVALUATIONS = """
SELECT a.id, a.execution, a.run, a.created, e.label, e.config, count(*) OVER () AS total
FROM artifacts a LEFT JOIN executions e USING (execution) WHERE a.kind = 'evaluation' AND a.superseded = 0
"""
# Those of executions, however old. (executions)
EVALUATIONS_OF = f"{_EVALUATIONS} AND list_contains(?, a.execution) ORDER BY a.created DESC, a.id"
EVALUATION = f"{_EVALUATIONS} AND a.id = ?"  # (id)
# A page of those that fit a search over id, configuration, stage and run, newest first, with their `total` number.
# (words, limit, offset)
EVALUATIONS = f"""
{_EVALUATIONS} AND {FITS.format("concat_ws(' ', a.id, e.config, e.label, a.run)")}
ORDER BY a.created DESC, a.id LIMIT ? OFFSET ?
"""
RUN_NAMES = "SELECT run, coalesce(name, config) AS name, begun FROM runs WHERE list_contains(?, run)"  # (runs)
# The values of settings in the newest start of runs, as text. (JSON paths of `json_path`, runs)
RUN_SETTINGS = """
SELECT run, list_transform(?, lambda path: json_extract_string(settings, path)) AS chosen FROM runs
WHERE list_contains(?, run)
"""
# The whole settings of runs, as JSON; without those that recorded none. (runs)
WHOLE_SETTINGS = "SELECT run, settings FROM runs WHERE settings IS NOT NULL AND list_contains(?, run)"
# What runs paid themselves, without reused steps. (runs)
RUN_COSTS = f"""
SELECT run, sum(dollars) AS dollars, sum(chip_dollars) AS chip_dollars FROM {views.STEPS.of("list_contains(?, run)")}
WHERE NOT reused GROUP BY run
"""
# A page of estimates and single uses of a model, which are no pipeline runs, newest first. (limit, offset)
OTHER_WORK = """
SELECT run, label, state, started, seconds, error, count(*) OVER () AS total
FROM steps SEMI JOIN (FROM runs WHERE NOT pipeline) USING (run) ORDER BY started DESC, run LIMIT ? OFFSET ?
"""
# The newest value of a metric. (executions, name)
LAST_VALUE = """
SELECT arg_max(value, step) AS value FROM metrics WHERE list_contains(?, execution) AND name = ? AND isfinite(value)
"""
SIZES = "SELECT kind, count(*) AS artifacts, sum(bytes) AS bytes FROM artifacts GROUP BY kind ORDER BY bytes DESC"

# Sort orders of a list of texts. Fixed values, because they are inserted into the SQL.
ORDERS = {"as they came": '"index"', "longest": "TRY_CAST(fields->>'length' AS BIGINT) DESC NULLS LAST"}
# Filters of a list of texts, fixed values as well.
WHICH = {
    "any": "TRUE",
    "kept": "coalesce(fields->>'rejected', fields->>'reason') IS NULL",
    "rejected": "coalesce(fields->>'rejected', fields->>'reason') IS NOT NULL",
    "right": "TRY_CAST(fields->>'strict' AS BOOLEAN)",
    "wrong": "NOT TRY_CAST(fields->>'strict' AS BOOLEAN)",
    "not graded": "TRY_CAST(fields->>'strict' AS BOOLEAN) IS NULL",
    "strict and lenient differ": "fields->>'strict' <> fields->>'lenient'",
    "unfinished": "NOT TRY_CAST(fields->>'finished_thinking' AS BOOLEAN)",
}
# Texts with the same prompt, round and step form a group, whose `members` are their fields. The groups of the page are
# selected first, so that only their texts are read. `fitting` says of each member whether it is within the limits; a
# group without one is left out. Parameters: those of the source, those of `EVERY_ANSWER`, step (twice; empty: all), the
# text to search (twice), groups per page, first group.
_GROUPS = """
WITH source AS ({source}),
asked AS (SELECT ?::DOUBLE AS reward_from, ?::DOUBLE AS reward_to, ?::BIGINT AS length_from, ?::BIGINT AS length_to,
    ?::VARCHAR AS digest),
parsed AS (  -- one extraction for all fields, because each extraction parses the record again
    SELECT "index", fields, json_extract_string(fields, ['$.question', '$.prompt', '$.round', '$.step', '$.reward',
        '$.length', '$.parts.correct', '$.truncated']) AS value
    FROM source),
read AS MATERIALIZED (
    SELECT "index", fields, coalesce(value[1], value[2], '') AS prompt, {keys},
        TRY_CAST(value[5] AS DOUBLE) AS reward, TRY_CAST(value[6] AS BIGINT) AS length,
        coalesce(TRY_CAST(value[7] AS DOUBLE), TRY_CAST(value[5] AS DOUBLE)) AS correct,
        coalesce(TRY_CAST(value[8] AS BOOLEAN), false) AS truncated,
        coalesce((reward_from IS NULL OR reward >= reward_from) AND (reward_to IS NULL OR reward <= reward_to)
            AND (length_from IS NULL OR length >= length_from) AND (length_to IS NULL OR length <= length_to)
            AND {verdict}, false) AS fits
    FROM parsed, asked
    WHERE digest = '' OR digest = md5(prompt)),
grouped AS (
    SELECT round, step, prompt, count(*) OVER () AS total,
        row_number() OVER (ORDER BY {order}, min("index")) AS place FROM read
    WHERE ? = '' OR step = TRY_CAST(? AS BIGINT)
    GROUP BY round, step, prompt
    HAVING bool_or(fits) AND {which} AND (? = '' OR bool_or(contains(lower(fields::VARCHAR), lower(?))))
    ORDER BY place LIMIT ? OFFSET ?)
SELECT g.round, g.step, g.prompt, g.total, g.place,
    list(r.fields ORDER BY r.reward DESC NULLS LAST, r."index") AS members,
    list(r.fits ORDER BY r.reward DESC NULLS LAST, r."index") AS fitting
FROM grouped g JOIN read r ON r.prompt = g.prompt AND r.step IS NOT DISTINCT FROM g.step
    AND r.round IS NOT DISTINCT FROM g.round
GROUP BY ALL ORDER BY g.place
"""
GROUP_ORDERS = {
    "newest step first": "round DESC NULLS LAST, step DESC NULLS LAST",
    "oldest step first": "round, step",
    "highest reward": "avg(reward) DESC NULLS LAST",
    "lowest reward": "avg(reward) ASC NULLS LAST",
    "rewards most apart": "stddev_pop(reward) DESC NULLS LAST",
    "longest": "max(length) DESC NULLS LAST",
}
GROUP_WHICH = {
    "all groups": "TRUE",
    "right and wrong": "min(correct) < 1 AND max(correct) >= 1",
    "all right": "min(correct) >= 1",
    "all wrong": "max(correct) < 1",
    "with one cut off": "bool_or(truncated)",
}
# Verdicts on one answer. A mark between right and wrong is neither.
ANSWERS = {
    "all answers": "TRUE",
    "right": "correct >= 1",
    "wrong": "correct <= 0",
    "not graded": "correct IS NULL",
    "cut off": "truncated",
}
# Limits of reward (from, to) and length in tokens (from, to), and the MD5 digest of the one prompt to follow.
EVERY_ANSWER: tuple[float | None, float | None, int | None, int | None, str] = (None, None, None, None, "")
# The answers to one prompt over the steps. (MD5 digest of the prompt)
PROMPT_OVER_STEPS = """
WITH source AS ({source})
SELECT {step} AS step, avg(TRY_CAST(fields->>'reward' AS DOUBLE)) AS reward, count(*) AS answers FROM source
WHERE md5(coalesce(fields->>'question', fields->>'prompt', '')) = ? GROUP BY ALL HAVING reward IS NOT NULL ORDER BY step
"""
# Steps are numbered from 1, as in the charts. In events they already are; a row of a file has the number of updates
# before it, from 0, because a resumed stage compares it with the number of steps in its checkpoint.
_STEPS = "TRY_CAST(value[3] AS BIGINT) + 1 AS round, TRY_CAST(value[4] AS BIGINT) AS step"
_FILE_STEPS = _STEPS.replace(" AS step", " + 1 AS step")
# Samples during pretraining are grouped by prompt, over all steps.
_NO_STEPS = "NULL::BIGINT AS round, NULL::BIGINT AS step"


def json_path(field: str) -> str:
    """The path of a setting in its JSON: `ingest.sources.1.path` is `$.ingest.sources[1].path`."""
    return "$" + "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in field.split("."))


def texts(source: str, order: str = "as they came", which: str = "any") -> str:
    """SQL for a page of the texts of a `source`, with their `total` number.

    Parameters: those of the source, then the text to search (any case; twice), rows per page, first row.
    """
    return _TEXTS.format(source=source, which=WHICH[which], order=ORDERS[order])


def groups(
    source: str,
    order: str = "newest step first",
    which: str = "all groups",
    by_step: bool = True,
    answers: str = "all answers",
) -> str:
    """SQL for a page of the groups of a `source`, in order, with their `total` number; see `_GROUPS`."""
    keys = (_FILE_STEPS if source == FILE_LINES else _STEPS) if by_step else _NO_STEPS
    which, verdict = GROUP_WHICH[which], ANSWERS[answers]
    return _GROUPS.format(source=source, which=which, order=GROUP_ORDERS[order], keys=keys, verdict=verdict)


def prompt_over_steps(source: str) -> str:
    """SQL for the mean reward of one prompt at each step; parameters: those of the source, and its digest."""
    step = "TRY_CAST(fields->>'step' AS BIGINT)" + (" + 1" if source == FILE_LINES else "")
    return PROMPT_OVER_STEPS.format(source=source, step=step)


def lines_of(path: Path, first: int = 0, step: str = "", prompt: str = "", search: str = "") -> tuple[str | int, ...]:
    """The parameters of `FILE_LINES`: at most `FILE_ROWS` lines from number `first` on of those that fit.

    `step`: counted from 1; `prompt`: the digest of one; `search`: a text in the line. "" fits all. They are applied as
    the file is read, so that every line of it can be reached.
    """
    return file_pattern(path), step, step, prompt, prompt, search, search, FILE_ROWS, first


def file_pattern(path: Path) -> str:
    """The path with glob characters escaped, because DuckDB reads paths as glob patterns."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in str(path))
