"""Lists of the runs and the artifacts of a store, for commands and pages: a search, an order, one page at a time.

The rows of a page are chosen first, by columns that cost little; what is shown of them is computed for them alone. So
a page costs the same over 50 runs and over 5,000.
"""

from collections.abc import Collection, Sequence
from typing import Any

from nautile.common.errors import ConfigError
from nautile.common.text import did_you_mean
from nautile.configs.stages import TRAINED
from nautile.evals.benchmarks.titles import TABLE_1
from nautile.flows.run_state import LIVE, Query, questions_by_run, state_of
from nautile.store.artifacts import Store
from nautile.store.catalog import CatalogRow

# Order -> SQL. Fixed texts, because they are inserted into the queries.
RUN_ORDERS = {
    "newest": "newest DESC",
    "oldest": "newest",
    "best": "score DESC NULLS LAST",
    "worst": "score NULLS LAST",
    "time": "seconds DESC NULLS LAST",
    "name": "lower(r.name) NULLS LAST",
}
RUN_STATES = ("queued", *LIVE, "done", "failed", "cancelled", "interrupted", "silent")  # `queued`: not in the store yet
ARTIFACT_ORDERS = {"created": "created DESC", "bytes": "bytes DESC"}
# Whether a text, in place of the braces, contains all words of a search. (words in lower case)
FITS = "len(list_filter(?::VARCHAR[], lambda word: NOT contains(lower({}), word))) = 0"
# The state of a run as it is shown: for the runs that have recorded no end, that of a list. (runs, states)
_STATE = "coalesce(list_extract(?::VARCHAR[], list_position(?::VARCHAR[], run)), state)"
_TEXT = f"concat_ws(' ', run, name, config, {_STATE}, changes, n.text, n.tags)"
_CHOSEN_RUNS = """
SELECT run, count(*) OVER () AS total FROM runs r {joined}
WHERE pipeline AND {condition} ORDER BY {order}, newest DESC, run LIMIT ? OFFSET ?
"""
# The score of each run as `run_state.last_score` has it: after its last stage that was evaluated, on the first of the
# benchmarks that it was evaluated on.
_SCORED = f"""
LEFT JOIN (
    SELECT run, arg_max(value, {{
        benchmark: -list_position({list(TABLE_1)}, benchmark), stage: list_position({list(TRAINED)}, after)}}) AS score
    FROM scores
    WHERE figure = 'accuracy' AND list_contains({list(TABLE_1)}, benchmark) AND list_contains({list(TRAINED)}, after)
    GROUP BY run) USING (run)
"""
_NOTED = "LEFT JOIN notes n ON n.id = r.run"
_SHOWN_RUNS = f"""
SELECT r.* EXCLUDE (steps, settings), n.text AS note, n.tags FROM runs r {_NOTED} WHERE list_contains(?, r.run)
"""
# The runs without a recorded end, those with an open question, and those of which only attempts are known. (runs)
_OPEN_RUNS = """
SELECT * EXCLUDE (steps, settings) FROM runs
WHERE pipeline AND (state IS NULL OR state IN ('running', 'suspended') OR list_contains(?, run))
"""
_ARTIFACTS = """
SELECT a.id, a.kind, a.key, a.superseded, a.stage, a.label, a.run, a.created, a.bytes, a.file_count, a.execution,
    a.published_as, count(*) OVER () AS total
FROM artifacts a {joined}
WHERE (? IS NULL OR kind = ?) AND (? OR superseded = 0) AND {condition}
ORDER BY list_contains(?::VARCHAR[], a.execution) DESC, {order}, a.id DESC LIMIT ? OFFSET ?
"""
_NAMED = "LEFT JOIN (SELECT run, arg_max(name, started) AS name FROM plans GROUP BY run) p ON p.run = a.run"


def words_of(search: str) -> list[str]:
    """The words of a search, in lower case, each of which must be found. Arrows and other signs are no words."""
    return [word for word in search.lower().split() if any(map(str.isalnum, word))]


def listed_runs(
    store: Store,
    query: Query,
    search: str = "",
    *,
    state: str | None = None,
    order: str = "newest",
    limit: int,
    offset: int = 0,
) -> list[CatalogRow]:
    """A page of the pipeline runs: the columns of `run_state.RUNS`, `note`, `tags`, `current_state` and `total`.

    `search`: each word must be in the id, name, configuration, changed settings, state, note or tags. `state`: only
    those in this state, as `state_of` says it. `order`: of `RUN_ORDERS`. `total`: how many fit. Raises `ConfigError`
    for an unknown order or state.
    """
    _check("sort", order, RUN_ORDERS)
    _check("state", state or RUN_STATES[0], RUN_STATES)
    questions = questions_by_run(store)
    conditions, joined, parameters = ["TRUE"], _SCORED if "score" in RUN_ORDERS[order] else "", list[Any]()
    if search or state:
        open_states = {row["run"]: state_of(row, store, questions) for row in query(_OPEN_RUNS, list(questions))}
        states = [list(open_states.values()), list(open_states)]
        if state:
            conditions.append(f"{_STATE} = ?")
            parameters += [*states, state]
        if search:
            joined += _NOTED
            conditions.append(FITS.format(_TEXT))
            parameters += [words_of(search), *states]
    sql = _CHOSEN_RUNS.format(joined=joined, condition=" AND ".join(conditions), order=RUN_ORDERS[order])
    chosen = query(sql, *parameters, limit, offset)
    shown = {row["run"]: row for row in query(_SHOWN_RUNS, [row["run"] for row in chosen])} if chosen else {}
    rows = [shown[row["run"]] | {"total": row["total"]} for row in chosen]
    return [row | {"current_state": state_of(row, store, questions)} for row in rows]


def listed_artifacts(
    query: Query,
    search: str = "",
    *,
    kind: str | None = None,
    replaced: bool = True,
    first: Sequence[str] = (),
    order: str = "created",
    limit: int | None,
    offset: int = 0,
) -> list[CatalogRow]:
    """A page of the artifacts, newest or largest first: columns of the table `artifacts`, and `total`, how many fit.

    `search`: each word must be in the id, stage, label, or the id or name of the run. `replaced`: also those that a
    forced run has replaced. Those of the executions in `first` come first. `order`: of `ARTIFACT_ORDERS`. Raises
    `ConfigError` for an unknown order.
    """
    _check("sort", order, ARTIFACT_ORDERS)
    condition = FITS.format("concat_ws(' ', a.id, a.stage, a.label, a.run, p.name)") if search else "TRUE"
    sql = _ARTIFACTS.format(joined=_NAMED if search else "", condition=condition, order=f"a.{ARTIFACT_ORDERS[order]}")
    words = [words_of(search)] if search else []
    return query(sql, kind, kind, replaced, *words, list(first), limit, offset)


def _check(option: str, value: str, choices: Collection[str]) -> None:
    if value not in choices:
        raise ConfigError(f"--{option} {value}: must be {', '.join(choices)}{did_you_mean(value, choices)}")
