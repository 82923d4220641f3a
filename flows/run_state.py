"""The state of a run, step by step: its plan, its attempts, open approval questions, and the time left.

The terminal and the dashboard show it. Everything is read from the catalog and small files, so that a page can reload
it every few seconds, also after the processes of the run have ended.
"""

import json
import operator
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path, PurePath
from typing import Any

from nautile.common.commands import program, shell_command
from nautile.common.curve_checks import CHECKED, CurveWarning, curve_warnings
from nautile.common.errors import ConfigError
from nautile.common.text import counted, duration
from nautile.configs.changes import Change, read_changes
from nautile.configs.stages import TRAINED
from nautile.data.tokens.losses import LOST
from nautile.evals.benchmarks.titles import TABLE_1
from nautile.flows.operate.questions import waiting
from nautile.store import views
from nautile.store.artifacts import Artifact, Store
from nautile.store.catalog import Catalog, CatalogRow
from nautile.store.events import read_live
from nautile.store.manifest import RUN, host
from nautile.store.staging_mirror import upload_note
from nautile.store.views import run_seconds
from nautile.tasks.engine.progress import read_retry_note

Query = Callable[..., list[CatalogRow]]  # (SQL, parameters...) -> rows
EVALUATE = "evaluate:"  # in front of a label of the evaluation after a step
FINISHED = ("done", "reused")
LIVE = ("running", "waiting")
POINTS = 150  # per curve, one per three pixels: the browser draws all of them, and a page has up to 26 charts
PATIENCE_S = 0.3  # how long to wait for processes that write the catalog, before it is read without an update
# A run of another machine of which nothing was heard for so long is not called running any more. No shorter: a machine
# sends its events when a step ends, and a training may take a day. Nor is it called dead: nothing here shows that.
SILENT = timedelta(hours=48)

# Stands for a step in the resume command of a forced run. The command is recorded as the run starts, because a run that
# is killed cannot record where it was; `resume_command` puts in the step.
FIRST_UNFINISHED = "{first unfinished step}"
_STEP = "{step}"  # the same as one word

# Pipeline runs, those that were started or retried last first. (limit)
RUNS = "SELECT * EXCLUDE (steps, settings) FROM runs WHERE pipeline ORDER BY newest DESC LIMIT ?"
# Run -> name of all of them, newest first.
NAMES_OF_RUNS = "SELECT run, name FROM runs WHERE pipeline ORDER BY newest DESC"
RUNS_OF = "SELECT * EXCLUDE (steps, settings) FROM runs WHERE list_contains(?, run) ORDER BY newest DESC"  # (runs)
# Those that may be live by their record, the newest, and the newest of several steps. (runs that wait for an answer)
_LIVE_OR_NEWEST = """
WITH known AS (
    SELECT run, newest, coalesce(planned, stages) > 1 AS several,
        state = 'running' OR (state IS NULL AND running > 0) OR list_contains(?, run) AS may_live
    FROM runs WHERE pipeline)
SELECT run FROM known QUALIFY may_live OR row_number() OVER (ORDER BY newest DESC) = 1
    OR (several AND row_number() OVER (PARTITION BY several ORDER BY newest DESC) = 1)
"""
# What the newest start of a run has recorded, NULL where none is recorded. (run)
PLAN = "SELECT config, name, started, steps, settings, error FROM runs WHERE run = ?"
STEPS = f"SELECT * FROM {views.STEPS.of('run = ?')} ORDER BY begun, label"  # (run)
# How long each step took at its last complete execution, preferably with this configuration. (config)
LAST_TIMES = """
SELECT label, arg_max(seconds, (config IS NOT DISTINCT FROM ?, ended)) AS seconds FROM executions WHERE made
GROUP BY label
"""
# The strict accuracies in the evaluations of runs, after a stage each. (runs, stages)
SCORES = f"""
SELECT run, after, benchmark, value AS accuracy, over, gain, not_screened, evaluation
FROM {views.SCORES.of("list_contains(?, run)")} WHERE figure = 'accuracy' AND list_contains(?, after)
"""
# Pairs of executions where one reads an output of the other, for a run without a plan. (executions)
READS = """
SELECT DISTINCT a.execution AS reader, i.execution AS producer FROM inputs i JOIN artifacts a ON a.id = i.artifact
WHERE list_contains(?, a.execution)
"""
# What the executions could not read, as their artifacts say. (executions)
LOST_INPUT = f"""
SELECT execution, string_agg(facts->>'{LOST}', '; ' ORDER BY kind) AS lost FROM artifacts
WHERE list_contains(?, execution) AND facts->>'{LOST}' IS NOT NULL GROUP BY execution
"""
# Each bucket of steps becomes one point: its last step and the time of that (`at`, seconds since the epoch), and the
# mean and the extremes (`low`, `high`) of its values.
# (executions, metric names, approximate maximum number of points per execution, metric and source)
CURVES = """
WITH chosen AS (
    -- Joined, so that DuckDB reads only that part of the metrics which has rows of these executions.
    SELECT execution, name, coalesce(source, '') AS source, step, value, time
    FROM recorded.metrics SEMI JOIN (SELECT unnest(?::VARCHAR[]) AS execution) USING (execution)
    WHERE list_contains(?, name) AND isfinite(value)),
spans AS (SELECT name, min(step) AS lowest, greatest(1, max(step) - min(step)) AS span FROM chosen GROUP BY name)
SELECT c.execution, c.name, c.source, max(c.step) AS step, avg(c.value) AS value,
    min(c.value) AS low, max(c.value) AS high, count(*) AS points, epoch(max(c.time)) AS at,
    floor((c.step - lowest) * ? / span) AS bucket  -- of steps, the same of all executions
FROM chosen c JOIN spans USING (name)
GROUP BY c.execution, c.name, c.source, bucket ORDER BY ALL
"""
# Which of the keys are in the store: steps with these will be reused. (keys)
STORED_KEYS = "SELECT DISTINCT key FROM artifacts WHERE superseded = 0 AND list_contains(?, key)"


@dataclass(frozen=True)
class StepState:
    """The state of a step of a run.

    `state`: coming, running, waiting, done, reused, failed, cancelled, interrupted, silent, or "not started" (the run
    ended before it). `row`: the last attempt of `STEPS`, empty before the first. Times are in seconds, None while
    unknown.
    """

    label: str
    stage: str
    state: str
    after: tuple[str, ...] = ()
    key: str = ""
    row: CatalogRow = field(default_factory=dict)
    note: str = ""  # why it waits, what it is doing, or what it could not read
    elapsed_s: float | None = None  # of the current attempt; of all attempts once the step has ended
    done: float | None = None
    total: float | None = None
    unit: str = ""
    left_s: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)  # newest values of a running step
    expected_s: float | None = None  # time of its last execution; 0 if it will be reused
    warnings: tuple[str, ...] = ()  # what its curves do that they should not

    @property
    def longer_than(self) -> float | None:
        """The time of its last execution, if it takes longer than that and no rate says how much longer; else None."""
        overruns = (
            self.state == "running"
            and self.left_s is None
            and None not in (self.expected_s, self.elapsed_s)
            and (self.elapsed_s or 0.0) > (self.expected_s or 0.0) > 0
        )
        return self.expected_s if overruns else None

    @property
    def share(self) -> float | None:
        """Completed share of the step, 0..1; None while unknown."""
        return min(1.0, self.done / self.total) if self.total and self.done is not None else None


@dataclass(frozen=True)
class RunState:
    """The state of a run: running, waiting (for an approval), done, failed, cancelled, interrupted or silent."""

    run: str
    config: str
    name: str
    state: str
    steps: tuple[StepState, ...]
    question: Mapping[str, Any] | None = None  # the note of the approval that it waits for
    resume: str = ""  # the command that resumes it
    settings: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    begun: datetime | None = None
    ended: datetime | None = None  # None while it is live
    seconds: float | None = None  # wall time from its first start to its end, of a live one until now
    changes: tuple[Change, ...] = ()  # differences from the configuration that the run's configuration extends
    score: CatalogRow | None = None  # after the last stage that was evaluated; see `scores_of`

    @property
    def finished(self) -> int:
        """The number of steps that need no more work."""
        return sum(step.state in FINISHED for step in self.steps)

    def share(self) -> float:
        """Completed share of the run, 0..1. Steps are weighted by their last times, or equally if one is unknown."""
        shares = [1.0 if step.state in FINISHED else step.share or 0.0 for step in self.steps]
        times = [
            0.0 if step.state == "reused" else step.elapsed_s if step.state == "done" else step.expected_s
            for step in self.steps
        ]
        weights = [time for time in times if time is not None]
        # With one unknown time the known ones say nothing about their share of the whole.
        if len(weights) < len(shares) or not sum(weights):
            weights = [1.0] * len(shares)
        return sum(map(operator.mul, weights, shares)) / sum(weights) if shares else 0.0

    def time_left(self) -> tuple[float, int] | None:
        """Seconds until the end, and the number of unfinished steps whose time is unknown and counted as 0.

        The critical path of the unfinished steps, each at the time of its last execution. None unless the run is
        running.
        """
        if self.state != "running":
            return None
        end: dict[str, float] = {}  # label -> seconds until the step ends; `steps` lists producers first
        unknown = 0
        for step in self.steps:
            own = 0.0
            if step.state not in FINISHED:
                # The measured rate, else what is left of the time that it took before.
                known = step.left_s
                if known is None and step.expected_s is not None and step.longer_than is None:
                    known = max(0.0, step.expected_s - (step.elapsed_s or 0.0))
                unknown += known is None
                own = known or 0.0
            end[step.label] = own + max((end.get(label, 0.0) for label in step.after), default=0.0)
        return max(end.values(), default=0.0), unknown


def time_left_text(seconds: float, unknown: int) -> str:
    """`RunState.time_left` as text."""
    steps = f"{counted(unknown, 'step')} of unknown time"
    if seconds < 1:  # "about 0.0 s" would be the time of the steps that are known, and nearly none is
        return f"{steps} left" if unknown else "less than a second left"
    return f"about {duration(seconds)} left" + (f", and {steps}" if unknown else "")


def state_of(row: CatalogRow, store: Store, questions: Mapping[str, Any]) -> str:
    """The state of a run from its row of `RUNS`. `questions`: run -> note, of the runs that wait for an approval."""
    if row["run"] in questions:
        return "waiting"
    if row["state"] is None:  # an old run without a row in `plans`: only its attempts are known
        attempts = (("running", "running"), ("failed", "failed"), ("stopped", "cancelled"))
        return next((state for column, state in attempts if row[column]), "done")
    if row["state"] == "suspended":
        return "cancelled"  # it was suspended for an approval, and its question is gone
    if row["state"] != "running":
        return str(row["state"])
    lock = store.run_lock(row["run"]) if RUN.fullmatch(row["run"]) else None
    if lock and lock.held_elsewhere():
        return "running"
    # A run that was killed stays `running` in the catalog, but its process no longer holds the lock. The file shows
    # that the process was one of this folder: another machine, or another folder for the same remote, has its own.
    if row["host"] == host() and (store.url is None or (lock and lock.path.exists())):
        return "interrupted"
    last_news: datetime | None = row["ended"]  # of a run that has no end, the time of its last event
    quiet = datetime.now(UTC).replace(tzinfo=None) - last_news if last_news else SILENT
    return "running" if quiet < SILENT else "silent"


def scores_of(query: Query, runs: Sequence[str]) -> dict[str, dict[str, CatalogRow]]:
    """Run -> stage that trains, in order -> its row of `SCORES`, on one benchmark of Table 1 for each run."""
    rows = query(SCORES, list(runs), list(TRAINED)) if runs else []
    scores: dict[str, dict[str, CatalogRow]] = {}
    if not rows:
        return scores
    for benchmark, stage in product(TABLE_1, TRAINED):
        for row in rows:
            # The first of the benchmarks that any stage was evaluated on.
            if (row["benchmark"], row["after"]) == (benchmark, stage) and all(
                known["benchmark"] == benchmark for known in scores.get(row["run"], {}).values()
            ):
                scores.setdefault(row["run"], {})[stage] = row
    return scores


def last_score(by_stage: Mapping[str, CatalogRow] | None) -> CatalogRow | None:
    """The score after the last stage of a run; None if none was evaluated."""
    return list(by_stage.values())[-1] if by_stage else None


def resume_command(row: CatalogRow) -> str:
    """The command that resumes the run of a row of `RUNS`; "" if none is recorded.

    What is recorded comes from an event, which any machine may have written, and users copy it into a shell. So only
    the commands that resume a run are shown, with each word quoted again.
    """
    try:
        words = shlex.split((row["resume"] or "").replace(FIRST_UNFINISHED, _STEP), comments=True)
    except ValueError:  # a quote that does not end
        return ""
    if len(words) < 3 or PurePath(words[0]).name != "nautile" or words[1] not in ("run", "retry"):
        return ""
    return shell_command(program(), *((row["first_unfinished"] or "") if word == _STEP else word for word in words[1:]))


def output_of(store: Store, row: CatalogRow, kind: str) -> Artifact | None:
    """The artifact of `kind` that the step of a row of `STEPS` made or reused; None if it was removed.

    Found by its execution: a forced run has perhaps replaced it since, and its key then names another artifact. Raises
    `ConfigError` if the live artifact of the key is damaged.
    """
    live = store.find(kind, row["key"])
    if live is not None and live.recorded_execution == row["execution"]:
        return live
    versions = store.versions(kind, row["key"])
    return next((version for version in versions if version.recorded_execution == row["execution"]), None)


def questions_by_run(store: Store) -> dict[str, dict[str, Any]]:
    """The notes of the runs that wait for an approval: run -> note."""
    return {note["run"]: note for note in waiting(store)}


def run_state(
    store: Store,
    query: Query,
    summary: CatalogRow,
    questions: Mapping[str, Any],
    time_left: Callable[[str, float, float], float | None] | None = None,
) -> RunState:
    """The state of the run whose row of `RUNS` is `summary`.

    `time_left`: (key, done, total) -> seconds left of a running step. Where it returns None, the average rate of the
    attempt is used.
    """
    run = summary["run"]
    state = state_of(summary, store, questions)
    plan = next(iter(query(PLAN, run)), None)
    rows = {row["label"]: row for row in query(STEPS, run)}
    planned = json.loads(plan["steps"]) if plan and plan["steps"] else _steps_of_attempts(query, rows)
    live = state in LIVE
    # Expected times matter only while the run is live: the last time of each step, 0 for one that will be reused.
    expected = {row["label"]: row["seconds"] for row in query(LAST_TIMES, summary["config"])} if live else {}
    keys_to_come = [step["key"] for step in planned if step["label"] not in rows]
    stored = {row["key"] for row in query(STORED_KEYS, keys_to_come)} if live and keys_to_come else set()
    executions = [row["execution"] for row in rows.values() if row["state"] in FINISHED]
    lost = {row["execution"]: row["lost"] for row in query(LOST_INPUT, executions)} if executions else {}
    begun = [row["execution"] for row in rows.values() if row["execution"]]
    warned = warnings_of(query(CURVES, begun, list(CHECKED), POINTS) if begun else [])
    question = questions.get(run)
    steps = []
    for step in planned:
        row = rows.get(step["label"])
        fields: dict[str, Any] = {"after": tuple(step.get("after", ())), "key": step["key"]}
        fields["expected_s"] = 0.0 if step["key"] in stored else expected.get(step["label"])
        # This start of the run will retry a step that an earlier start did not finish.
        restarted = plan["started"] if plan and live else None
        to_retry = row and restarted and row["state"] not in FINISHED and row["started"] < restarted
        if row is None or to_retry:
            step_state = "coming" if live else "not started"
        else:
            step_state, attempt_fields = _attempt_state(store, row, state, time_left)
            fields["warnings"] = tuple(warning.text for warning in warned.get(row["execution"], ()))
            fields |= {"note": lost.get(row["execution"], "")} | attempt_fields
        # An open question is newer than any row: the attempt has not begun, or has ended at its budget.
        if question and question["label"] == step["label"]:
            step_state, fields["note"] = "waiting", "for an answer"
        steps.append(StepState(step["label"], step["stage"], step_state, **fields))
    return RunState(
        run,
        summary["config"] or "",
        summary["name"] or "",
        state,
        tuple(steps),
        question,
        resume_command(summary),
        json.loads(plan["settings"] or "{}") if plan else {},
        (plan and plan["error"]) or "",
        summary["begun"],
        None if live else summary["ended"],
        run_seconds(summary, live),
        tuple(read_changes(summary["changes"])),
        last_score(scores_of(query, [run]).get(run)),
    )


def warnings_of(rows: Sequence[CatalogRow]) -> dict[str, list[CurveWarning]]:
    """Execution -> what its curves do that they should not, of rows of `CURVES`."""
    curves: dict[str, dict[str, dict[str, list[tuple[float, float]]]]] = {}
    for row in rows:
        own = curves.setdefault(row["execution"], {}).setdefault(row["name"], {})
        own.setdefault(row["source"], []).append((row["step"], row["value"]))
    return {execution: curve_warnings(own) for execution, own in curves.items()}


def _steps_of_attempts(query: Query, rows: Mapping[str, CatalogRow]) -> list[dict[str, Any]]:
    """The steps of a run without a plan, from its attempts, in the form of `plans.steps`."""
    labels = {row["execution"]: label for label, row in rows.items() if row["execution"]}
    after: dict[str, list[str]] = {label: [] for label in rows}
    for pair in query(READS, list(labels)) if labels else ():
        if pair["producer"] in labels:
            after[labels[pair["reader"]]].append(labels[pair["producer"]])
    return [
        {"label": label, "stage": row["stage"], "key": row["key"], "after": after[label]} for label, row in rows.items()
    ]


def _attempt_state(
    store: Store, row: CatalogRow, run_state: str, time_left: Callable[[str, float, float], float | None] | None
) -> tuple[str, dict[str, Any]]:
    """The state of a step that has begun, and the fields of its `StepState` that follow from its attempts."""
    staging = store.staging_files(row["key"] or "unknown")
    if row["state"] == "failed" and run_state in LIVE and (note := read_retry_note(staging.folder)):
        return "waiting", {"row": row, "note": note, "elapsed_s": row["seconds"]}
    if row["state"] == "cancelled" and run_state == "interrupted":
        # The process of the step was ended with its run, which nobody has cancelled.
        return "interrupted", {"row": row, "elapsed_s": row["seconds"]}
    if row["state"] != "running":
        return str(row["state"]), {"row": row, "elapsed_s": None if row["reused"] else row["seconds"]}
    # The row says running, and nobody is left who could: its process was killed together with the run.
    if run_state == "silent":
        return "silent", {"row": row}
    if run_state in ("interrupted", "cancelled", "failed"):
        return "interrupted", {"row": row}
    # A running step: its progress is in live.json, which its process rewrites every few seconds.
    elapsed = (datetime.now(UTC).replace(tzinfo=None) - row["started"]).total_seconds()
    live = read_live(staging.live)
    fields: dict[str, Any] = {"row": row, "elapsed_s": max(0.0, elapsed), "metrics": live.get("metrics", {})}
    fields |= {name: live.get(name) or "" for name in ("note", "unit")}
    fields["note"] = ", ".join(filter(None, (fields["note"], upload_note(staging.folder))))
    done, total = live.get("done"), live.get("total")
    if done is not None and total is not None and total > 0:
        fields |= {"done": done, "total": total}
        fields["left_s"] = time_left(row["key"], done, total) if time_left else None
        # After a resume, `done` includes work of earlier attempts, so the rate of this attempt is not known.
        if fields["left_s"] is None and done > 0 and row["attempts"] == 1:
            fields["left_s"] = max(0.0, elapsed * (total - done) / done)  # more may be done than was expected
    return "running", fields


def live_or_newest(query: Query, questions: Mapping[str, Any]) -> list[CatalogRow]:
    """The rows of `RUNS` that `live_run` chooses from, however many runs there are: the newest is the first."""
    runs = [row["run"] for row in query(_LIVE_OR_NEWEST, list(questions))]
    return query(RUNS_OF, runs) if runs else []


def live_run(summaries: Sequence[CatalogRow], store: Store, questions: Mapping[str, Any]) -> CatalogRow | None:
    """The live run that is meant where none is named: the newest pipeline, else the newest of a single step.

    A scheduled evaluation may have begun after the pipeline that works beside it. A run of another machine counts if it
    is known to live, or if no pipeline began after it: it may be lost, and is called running until `SILENT` has passed.
    """
    pipelines = [row for row in summaries if (row["planned"] or row["stages"]) > 1]
    newest = [next(iter(rows), None) for rows in (summaries, pipelines)]

    def is_known(row: CatalogRow) -> bool:
        own = row["host"] in (None, host()) or row["run"] in questions
        # The lock of a run of another machine is known on a shared disk.
        return own or row in newest or bool(RUN.fullmatch(row["run"]) and store.run_lock(row["run"]).held_elsewhere())

    live = [row for row in summaries if is_known(row) and state_of(row, store, questions) in LIVE]
    return next((row for row in live if row in pipelines), next(iter(live), None))


def newest_with_content(summaries: Sequence[CatalogRow]) -> CatalogRow | None:
    """The run to show by default: the newest that has begun a step, else the newest."""
    return next((row for row in summaries if row["stages"]), summaries[0] if summaries else None)


def run_named(name: str, runs: Mapping[str, str | None]) -> str | None:
    """The id in `runs` (id -> name of the run) that begins with `name`, or whose run has that name, or None.

    Raises `ConfigError` if several runs match.
    """
    matching = [run for run, run_name in runs.items() if run.startswith(name) or run_name == name]
    if len(matching) > 1:
        known = ", ".join(run[:8] for run in matching[:8])
        raise ConfigError(f"{name!r} matches more than one run ({known}): give more digits of its id")
    return matching[0] if matching else None


_reader: ContextVar[tuple[Path, Query] | None] = ContextVar("reader", default=None)


@contextmanager
def reading(store: Store) -> Iterator[Query]:
    """Open the catalog for queries inside the block: (SQL, parameters...) -> rows. Without a store, no rows.

    Inside another such block it is the connection of that one: to open the file takes longer than most queries.
    """
    if (outer := _reader.get()) and outer[0] == store.root:
        yield outer[1]
        return
    store.refresh(events=True)
    if not store.root.exists():
        yield lambda sql, *parameters: []
        return
    with Catalog(store).caught_up(patience=PATIENCE_S) as query:
        token = _reader.set((store.root, query))
        try:
            yield query
        finally:
            _reader.reset(token)
