"""How a run stands, step by step: its plan, the attempts at it, what waits for an answer, and the time that is left.

The terminal and the dashboard show this. Everything is read from the catalog and small files, so a page may ask for it
every few seconds, and no process of the run has to be alive.
"""

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from configs.changes import Change
from flows.operate.questions import waiting
from store.artifacts import Store
from store.catalog import CatalogRow
from store.events import read_live
from store.manifest import host
from tasks.engine.staging import read_retry_note

Ask = Callable[..., list[CatalogRow]]  # (SQL, parameters...) -> rows
FINISHED = ("done", "reused")
AT_WORK = ("running", "waiting")

# The newest start of each run that is a pipeline's, and what its attempts came to, newest first: a run of before there
# were plans is one with several steps, so that an estimate or a single use of a model is none. (limit)
RUNS = """
WITH latest AS (
    SELECT * FROM runs WHERE run IS NOT NULL
    QUALIFY row_number() OVER (PARTITION BY run, label ORDER BY attempt DESC, time DESC) = 1),
begun AS (
    SELECT run, any_value(config) AS config, min(started) AS begun, max(coalesce(ended, time)) AS ended,
        count(*) AS stages, count(*) FILTER (state IN ('done', 'reused')) AS finished,
        count(*) FILTER (state = 'running') AS running, count(*) FILTER (state = 'failed') AS failed,
        count(*) FILTER (state IN ('cancelled', 'interrupted')) AS stopped
    FROM latest GROUP BY run),
plan AS (SELECT * FROM plans QUALIFY row_number() OVER (PARTITION BY run ORDER BY started DESC, time DESC) = 1)
SELECT coalesce(p.run, b.run) AS run, coalesce(p.config, b.config) AS config, p.name, p.state, p.host, p.changes,
    p.resume, coalesce(least(b.begun, p.started), p.started, b.begun) AS begun,
    coalesce(p.ended, b.ended, p.time) AS ended, json_array_length(p.steps) AS planned,
    coalesce(b.stages, 0) AS stages, coalesce(b.finished, 0) AS finished, coalesce(b.running, 0) AS running,
    coalesce(b.failed, 0) AS failed, coalesce(b.stopped, 0) AS stopped
FROM begun b FULL JOIN plan p USING (run) WHERE p.run IS NOT NULL OR b.stages > 1 ORDER BY begun DESC LIMIT ?
"""
# The newest start of a run. (run)
PLAN = "SELECT * FROM plans WHERE run = ? ORDER BY started DESC, time DESC LIMIT 1"
# The last attempt at each step of a run, its times, and the calls of its execution. What this run made itself before it
# was retried counts as done, not as reused. (run)
STEPS = """
WITH spent AS (
    SELECT execution, sum(dollars) AS dollars, sum((fields->>'unknown_dollars')::DOUBLE) AS unknown_dollars,
        count(*) AS calls, count(*) FILTER (coalesce(cached, false)) AS cached
    FROM calls GROUP BY execution),
mine AS (
    SELECT *, bool_or(state = 'done') OVER (PARTITION BY label, execution) AS made_here FROM runs WHERE run = ?),
own AS (SELECT * FROM mine WHERE NOT (coalesce(reused, false) AND made_here)),
tries AS (
    SELECT label, count(*) FILTER (NOT coalesce(reused, false)) AS attempts, sum(seconds) AS seconds,
        min(started) AS begun
    FROM own GROUP BY label)
SELECT m.label, m.stage, m.state, m.reused, t.attempts, t.begun, m.started, m.ended, t.seconds, m.peak_bytes,
    s.dollars, s.unknown_dollars, s.calls, s.cached, m.key, m.execution, m.outputs, m.error, m.exit_code, m.commit,
    m.host, m.config
FROM own m JOIN tries t USING (label) LEFT JOIN spent s USING (execution)
QUALIFY row_number() OVER (PARTITION BY m.label ORDER BY m.started DESC, m.time DESC) = 1 ORDER BY t.begun, m.label
"""
# How long each step took the last time that it was made, preferably of this configuration. (config)
LAST_TIMES = """
SELECT label, arg_max(seconds, (config IS NOT DISTINCT FROM ?, ended)) AS seconds FROM (
    SELECT label, config, execution, sum(seconds) AS seconds, max(ended) AS ended FROM runs
    WHERE NOT coalesce(reused, false) GROUP BY ALL HAVING bool_or(state = 'done'))
GROUP BY label
"""
# Which executions read the outputs of which, for a run without a plan. (executions)
READS = """
SELECT DISTINCT a.execution AS reader, i.execution AS producer FROM inputs i JOIN artifacts a ON a.id = i.artifact
WHERE list_contains(?, a.execution)
"""
# Keys that are in the store: a step with one of them will be reused. (keys)
MADE_KEYS = "SELECT DISTINCT key FROM artifacts WHERE superseded = 0 AND list_contains(?, key)"


@dataclass(frozen=True)
class StepState:
    """A step of a run as it stands.

    `state`: coming, running, waiting, done, reused, failed, cancelled, interrupted, or left out of a run that ended.
    `row`: its last attempt, empty before the first. Times are seconds, None while unknown.
    """

    label: str
    stage: str
    state: str
    after: tuple[str, ...] = ()
    key: str = ""
    row: CatalogRow = field(default_factory=dict)
    note: str = ""  # why it waits, or what it is doing
    elapsed_s: float | None = None  # of the attempt at work; of all attempts once it has ended
    done: float | None = None
    total: float | None = None
    unit: str = ""
    left_s: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)  # the newest that a running step reported
    expected_s: float | None = None  # what it took the last time; 0 if it will be reused

    @property
    def share(self) -> float | None:
        """0..1, None while unknown."""
        return min(1.0, self.done / self.total) if self.total and self.done is not None else None


@dataclass(frozen=True)
class RunState:
    """A run as it stands: running, waiting (for an answer), done, failed, cancelled or interrupted."""

    run: str
    config: str
    name: str
    state: str
    steps: tuple[StepState, ...]
    question: Mapping[str, Any] | None = None  # the note of the question that it waits for
    resume: str = ""  # the command that continues it
    settings: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    begun: datetime | None = None
    ended: datetime | None = None  # None while it is live
    changes: tuple[Change, ...] = ()  # what it changes in the configuration that its own builds on

    @property
    def finished(self) -> int:
        """The number of steps that need no more work."""
        return sum(step.state in FINISHED for step in self.steps)

    def share(self) -> float:
        """How much of it is done, 0..1: steps weigh as they last took, or all alike while a time is not known."""
        shares = [1.0 if step.state in FINISHED else step.share or 0.0 for step in self.steps]
        times = [
            0.0 if step.state == "reused" else step.elapsed_s if step.state == "done" else step.expected_s
            for step in self.steps
        ]
        weights = [time for time in times if time is not None]
        if len(weights) < len(shares) or not sum(weights):
            weights = [1.0] * len(shares)
        return sum(map(operator.mul, weights, shares)) / sum(weights) if shares else 0.0

    def time_left(self) -> tuple[float, int] | None:
        """Seconds until the end, and how many of the steps to come have no known time, which are left out of it.

        The longest path through what is left, each step at what it took the last time; None unless it is running.
        """
        if self.state != "running":
            return None
        end: dict[str, float] = {}
        unknown = 0
        for step in self.steps:
            own = 0.0
            if step.state not in FINISHED:
                known = step.left_s
                if known is None and step.expected_s is not None:
                    known = max(0.0, step.expected_s - (step.elapsed_s or 0.0))
                unknown += known is None
                own = known or 0.0
            end[step.label] = own + max((end.get(label, 0.0) for label in step.after), default=0.0)
        return max(end.values(), default=0.0), unknown


def state_of(row: CatalogRow, store: Store, questions: Mapping[str, Any]) -> str:
    """The state of a run from its row of `RUNS`. `questions`: notes of the runs that wait, by run."""
    if row["run"] in questions:
        return "waiting"
    if row["state"] is None:  # a run of before there were plans: its attempts alone are known
        attempts = (("running", "running"), ("failed", "failed"), ("stopped", "cancelled"))
        return next((state for column, state in attempts if row[column]), "done")
    if row["state"] == "suspended":
        return "cancelled"  # nobody waits for its answer any more
    if row["state"] == "running" and row["host"] == host() and not store.run_lock(row["run"]).held_elsewhere():
        return "interrupted"
    return str(row["state"])


def questions_by_run(store: Store) -> dict[str, dict[str, Any]]:
    """The notes of the runs that wait for an answer, by run."""
    return {note["run"]: note for note in waiting(store)}


def run_state(
    store: Store,
    ask: Ask,
    summary: CatalogRow,
    questions: Mapping[str, Any],
    left: Callable[[str, float, float], float | None] | None = None,
) -> RunState:
    """The state of the run whose row of `RUNS` is `summary`.

    `left`: (key, done, total) -> seconds left of a step at work; where it knows none, the rate since the attempt began
    counts.
    """
    run = summary["run"]
    state = state_of(summary, store, questions)
    plan = next(iter(ask(PLAN, run)), None)
    rows = {row["label"]: row for row in ask(STEPS, run)}
    planned = json.loads(plan["steps"] or "[]") if plan else _steps_of_attempts(ask, rows)
    live = state in AT_WORK
    expected = {row["label"]: row["seconds"] for row in ask(LAST_TIMES, summary["config"])} if live else {}
    to_make = [step["key"] for step in planned if step["label"] not in rows]
    made = {row["key"] for row in ask(MADE_KEYS, to_make)} if live and to_make else set()
    question = questions.get(run)
    steps = []
    for step in planned:
        row = rows.get(step["label"])
        fields: dict[str, Any] = {"after": tuple(step.get("after", ())), "key": step["key"]}
        fields["expected_s"] = 0.0 if step["key"] in made else expected.get(step["label"])
        # What an earlier start of the run did not finish will be tried again by this one.
        again = row and plan and live and row["state"] not in FINISHED and row["started"] < plan["started"]
        if row is None or again:
            own = "coming" if live else "left out"
        else:
            own, more = _attempted(store, row, state, left)
            fields |= more
        if question and question["label"] == step["label"]:
            own, fields["note"] = "waiting", "for an answer"
        steps.append(StepState(step["label"], step["stage"], own, **fields))
    return RunState(
        run,
        summary["config"] or "",
        summary["name"] or "",
        state,
        tuple(steps),
        question,
        summary["resume"] or "",
        json.loads(plan["settings"] or "{}") if plan else {},
        (plan and plan["error"]) or "",
        summary["begun"],
        None if live else summary["ended"],
        tuple(Change(**change) for change in json.loads(summary["changes"] or "[]")),
    )


def _steps_of_attempts(ask: Ask, rows: Mapping[str, CatalogRow]) -> list[dict[str, Any]]:
    """The steps that were begun, in the form of a plan's."""
    labels = {row["execution"]: label for label, row in rows.items() if row["execution"]}
    after: dict[str, list[str]] = {label: [] for label in rows}
    for read in ask(READS, list(labels)) if labels else ():
        if read["producer"] in labels:
            after[labels[read["reader"]]].append(labels[read["producer"]])
    return [
        {"label": label, "stage": row["stage"], "key": row["key"], "after": after[label]} for label, row in rows.items()
    ]


def _attempted(
    store: Store, row: CatalogRow, run: str, left: Callable[[str, float, float], float | None] | None
) -> tuple[str, dict[str, Any]]:
    """The state of a step that was begun, and the fields of its `StepState` that follow from its attempts."""
    staging = store.root / "staging" / row["key"]  # not `Store.staging`, which would create the folder
    if row["state"] == "failed" and run in AT_WORK and (note := read_retry_note(staging)):
        return "waiting", {"row": row, "note": note, "elapsed_s": row["seconds"]}
    if row["state"] != "running":
        return str(row["state"]), {"row": row, "elapsed_s": None if row["reused"] else row["seconds"]}
    if run in ("interrupted", "cancelled", "failed"):
        return "interrupted", {"row": row}
    elapsed = (datetime.now(UTC).replace(tzinfo=None) - row["started"]).total_seconds()
    live = read_live(staging / "live.json")
    fields: dict[str, Any] = {"row": row, "elapsed_s": elapsed, "metrics": live.get("metrics") or {}}
    fields |= {name: str(live.get(name) or "") for name in ("note", "unit")}
    done, total = live.get("done"), live.get("total")
    if isinstance(done, (int, float)) and isinstance(total, (int, float)) and total > 0:
        fields |= {"done": done, "total": total}
        fields["left_s"] = left(row["key"], done, total) if left else None
        if fields["left_s"] is None and done > 0 and row["attempts"] == 1:
            fields["left_s"] = elapsed * (total - done) / done
    return "running", fields


def newest_with_content(summaries: Sequence[CatalogRow]) -> CatalogRow | None:
    """The run that is shown when none is named: the newest that has begun a step, else the newest."""
    return next((row for row in summaries if row["stages"]), summaries[0] if summaries else None)
