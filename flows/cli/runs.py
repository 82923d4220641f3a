"""`nautile runs`, and `nautile status RUN`: the rows of --json, and their tables on the terminal."""

import json
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from nautile.common.commands import shell_command
from nautile.common.errors import ConfigError
from nautile.common.text import amount, chips_text, did_you_mean, dollars, duration, one_line, visible
from nautile.configs.changes import Change, describe_changes, read_changes
from nautile.flows.cli.tables import STATES, calls_text
from nautile.flows.listings import listed_runs
from nautile.flows.render import FittingTable, text_table
from nautile.flows.run_state import (
    LIVE,
    NAMES_OF_RUNS,
    RUNS_OF,
    RunState,
    StepState,
    last_score,
    live_or_newest,
    live_run,
    questions_by_run,
    reading,
    resume_command,
    run_named,
    run_state,
    scores_of,
    time_left_text,
)
from nautile.store.artifacts import Store
from nautile.store.catalog import CatalogRow
from nautile.store.views import run_seconds

# Step state of a run -> `state` in a row, which uses the states of `nautile status CONFIG`. `outcome` has the original.
_STATES = {
    "done": "made", "reused": "made", "cancelled": "interrupted", "silent": "running", "coming": "not made",
    "not started": "not made",
}  # fmt: skip


def run_unless_config(store: Store, name: str | None) -> RunState | None:
    """The run whose name is `name` or whose id begins with it; without `name` the live or newest run.

    None if `name` is a configuration, or if there is no run yet. Raises `ConfigError` if it is neither a run nor a
    configuration, or if several runs match.
    """
    if name is None:
        return newest_run(store)
    from nautile.configs.load import locate  # loads every section

    try:
        locate(name)
    except ConfigError as no_config:
        # A configuration wins over a run of its name, because `nautile run local` calls its runs `local` too.
        if (run := named_run(store, name)) is not None:
            return run
        raise ConfigError(f"{no_config}; nor is it the id or name of a run{near_run(store, name)}") from None
    return None


def named_run(store: Store, name: str) -> RunState | None:
    """The run whose name is `name` or whose id begins with it; None if there is none. Raises if several match."""
    with reading(store) as query:
        run_id = run_named(name, {row["run"]: row["name"] for row in query(NAMES_OF_RUNS)})
        if run_id is None:
            return None
        return run_state(store, query, query(RUNS_OF, [run_id])[0], questions_by_run(store))


def near_run(store: Store, name: str) -> str:
    """For a message about a run that does not exist: a name that is near, and the ids of the newest."""
    with reading(store) as query:
        runs = query(NAMES_OF_RUNS)
    newest = ", ".join(row["run"][:8] for row in runs[:8]) or "none"
    return f"{did_you_mean(name, {row['name'] for row in runs if row['name']})}: the newest are {newest}"


def newest_run(store: Store) -> RunState | None:
    """The newest run that is live, else the newest; None before the first."""
    with reading(store) as query:
        questions = questions_by_run(store)
        if not (runs := live_or_newest(query, questions)):
            return None
        # A run that began earlier and still works is more interesting than one that ended since.
        return run_state(store, query, live_run(runs, store, questions) or runs[0], questions)


def list_runs(
    store: Store, most: int, match: str = "", sort: str = "newest", state: str | None = None
) -> tuple[list[dict[str, Any]], int]:
    """Rows of the first runs of the list, and how many the list has. `match`, `sort`, `state`: see `listed_runs`.

    Steps are read only for live runs, whose progress they show.
    """
    rows = []
    with reading(store) as query:
        summaries = listed_runs(store, query, match, state=state, order=sort, limit=most)
        scores = scores_of(query, [row["run"] for row in summaries])
        questions = questions_by_run(store)
        for row in summaries:
            if (state := row["current_state"]) in LIVE:
                rows.append(run_row(run_state(store, query, row, questions)))
            else:
                rows.append(_ended_row(row, state, last_score(scores.get(row["run"]))))
    return rows, summaries[0]["total"] if summaries else 0


def queued_rows(queued: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the runs that wait for a process (`queued_runs`), newest first, without those that are in `rows`."""
    known = {row["id"] for row in rows}
    nothing = dict.fromkeys(
        (
            "ended",
            "seconds",
            "score",
            "share",
            "seconds_left",
            "steps_without_time",
            "question",
            "answer",
            "resume",
            "error",
        )
    )
    return [
        {"id": run["id"], "name": run["name"], "config": run["config"], "state": "queued", "begun": run["since"]}
        | {"done": 0, "steps": 0, "changes": [], **nothing}
        for run in reversed(queued)
        if run["id"] not in known
    ]


def _ended_row(row: CatalogRow, state: str, score: CatalogRow | None) -> dict[str, Any]:
    """The row of a run that has ended, from its row of `RUNS`."""
    # A run whose plan is not recorded, as of another program: the steps that it began are the best count.
    steps = row["planned"] or row["stages"]
    return {
        "id": row["run"],
        "name": row["name"] or row["config"] or row["run"][:8],
        "config": row["config"] or "",
        "state": state,
        "begun": _utc(row["begun"]),
        "ended": _utc(row["ended"]),
        "seconds": run_seconds(row, live=False),
        "score": _score(score),
        "done": row["finished"],
        "steps": steps,
        "share": row["finished"] / steps if steps else None,
        **dict.fromkeys(("seconds_left", "steps_without_time", "question", "answer")),
        "changes": [asdict(change) for change in read_changes(row["changes"])],
        "resume": resume_command(row) or None if state != "done" else None,
        "error": row["error"] or None,
    }


def run_row(run: RunState) -> dict[str, Any]:
    """The row of a run in `nautile runs --json`."""
    left = run.time_left()
    return {
        "id": run.run,
        "name": run.name or run.config or run.run[:8],
        "config": run.config,
        "state": run.state,
        "begun": _utc(run.begun),
        "ended": _utc(run.ended),
        "seconds": run.seconds,
        "score": _score(run.score),
        "done": run.finished,
        "steps": len(run.steps),
        "share": run.share(),
        "seconds_left": left[0] if left else None,
        "steps_without_time": left[1] if left else None,
        "changes": [asdict(change) for change in run.changes],
        "question": run.question["message"] if run.question else None,
        "answer": shell_command("nautile", "approve", run.run[:8]) if run.question else None,
        "resume": run.resume or None if run.state != "done" else None,
        "error": run.error or None,
    }


def step_rows(run: RunState) -> list[dict[str, Any]]:
    """The rows of `nautile status RUN --json`: the fields of `nautile status CONFIG`, and what the run did per step."""
    run_fields = run_row(run)
    return [_step_row(step) | {"run": run_fields} for step in run.steps]


def _step_row(step: StepState) -> dict[str, Any]:
    row = step.row
    progress = {"done": step.done, "total": step.total, "unit": step.unit or None, "note": step.note or None}
    return {
        "label": step.label,
        "state": _STATES.get(step.state, step.state),
        "key": step.key,
        "artifacts": list(json.loads(row.get("outputs") or "{}").values()),
        # A run's record has the ids of its inputs in the keys already; the field is there so that both forms of
        # `status` have the same fields.
        "start": None,
        "progress": {name: value for name, value in progress.items() if value is not None},
        "started": _utc(row.get("started")),
        "seconds": step.elapsed_s,
        "error": row.get("error") if step.state == "failed" else None,
        "outcome": step.state,
        "attempts": row.get("attempts"),
        "calls": row.get("calls"),
        "cached_calls": row.get("cached"),
        "dollars": row.get("dollars"),
        "chip_hours": row.get("chip_hours"),
        "chip_dollars": row.get("chip_dollars"),
        "longer_than": step.longer_than,
        "warnings": list(step.warnings),
    }


def run_view(rows: list[dict[str, Any]], run: dict[str, Any] | None = None) -> RenderableType:
    """The state and progress of a run, the table of its steps, and the command that answers or resumes it.

    `run`: the run's own row (`run_row`), for one that ended before it had a step.
    """
    if rows:
        run = rows[0]["run"]
    if run is None:
        return Text("the run has no steps")
    begun, score, left = datetime.fromisoformat(run["begun"]), run["score"], ""
    if run["seconds_left"] is not None:
        left = f", {time_left_text(run['seconds_left'], run['steps_without_time'])}"
    lines = [
        f"run {run['id'][:8]} ({one_line(run['name'])}): {run['state']}",
        *([f"changes {describe_changes(_changes(run), None)}"] if run["changes"] else []),
        f"begun {begun.astimezone():%Y-%m-%d %H:%M}, {'took' if run['ended'] else 'for'} "
        f"{duration(run['seconds'] or 0.0)}",
        f"{run['done']} of {run['steps']} steps ({100 * run['share']:.0f} %){left}",
        *([one_line(score_text(score))] if score else []),
        *(visible(run["error"]).splitlines()[:1] if run["error"] and not any(row["error"] for row in rows) else []),
    ]
    table = text_table("stage", "state", "time", "")
    for row in rows:
        state = Text(row["outcome"], style=STATES[row["outcome"]])
        took = duration(row["seconds"]) if row["seconds"] is not None else ""
        table.add_row(row["label"], state, took, Text(_details(row)))
    parts: list[RenderableType] = [Text("\n".join(lines)), Text(), table]
    logged = [row["label"] for row in rows if row["outcome"] in ("running", "failed")]
    logs = [shell_command("nautile", "logs", run["id"][:8], "--stage", label) for label in logged]
    parts += [Text(), *(Text(f"Log: {command}", no_wrap=True, overflow="ignore") for command in logs)] if logs else []
    # Each is one line, however narrow the terminal: they are searched for.
    warned = [f"{row['label']}: {visible(text)}" for row in rows for text in row["warnings"]]
    parts += [Text(), *(Text(line, "yellow", no_wrap=True, overflow="ignore") for line in warned)] if warned else []
    if run["question"]:
        parts += [Text(), Text(visible(run["question"])), Text(f"Answer with: {run['answer']}")]
    elif run["state"] in ("failed", "cancelled", "interrupted", "silent"):
        parts += [Text(), Text("Finished work is kept.")] if rows else []
        if run["resume"]:  # never wrapped, so that it can be copied
            parts.append(Text(f"Continue with: {visible(run['resume'])}", no_wrap=True, overflow="ignore"))
    return Group(*parts)


def _details(row: dict[str, Any]) -> str:
    """The last column of a step: error, progress, note, attempts, calls and artifacts, as far as known."""
    if row["error"]:
        # Only the first line fits a table; `nautile logs` and the failure's page have the rest.
        return visible(row["error"]).splitlines()[0]
    parts, progress = [], row["progress"]
    if progress.get("done") is not None:
        of = f"/{amount(progress['total'])}" if progress.get("total") else ""
        parts.append(f"{amount(progress['done'])}{of} {progress.get('unit') or ''}".strip())
    if progress.get("note"):
        parts.append(visible(progress["note"]))
    if row["longer_than"] is not None:
        parts.append(f"longer than last time ({duration(row['longer_than'])})")
    if (row["attempts"] or 0) > 1:
        parts.append(f"{row['attempts']} attempts")
    if row["calls"] and row["outcome"] != "reused":
        parts.append(calls_text(row["calls"], row["cached_calls"]))
        parts += [dollars(row["dollars"])] if row["dollars"] else []
    if row["outcome"] != "reused" and (used := chips_text(row["chip_hours"], row["chip_dollars"])):
        parts.append(used)
    return "  ".join([", ".join(parts), *row["artifacts"]] if parts else row["artifacts"])


def runs_table(rows: list[dict[str, Any]]) -> RenderableType:
    """The table of `nautile runs`."""
    if not rows:
        return Text("no run yet: `nautile run` starts one")
    columns = ("run", "name", "state", "steps", "begun", "time", "changes")
    table = FittingTable(*columns, least=("changes", "time", "steps"))
    for row in rows:
        begun = datetime.fromisoformat(row["begun"])
        took = duration(row["seconds"]) if row["ended"] and row["seconds"] is not None else ""
        steps = f"{row['done']} of {row['steps']}" if row["state"] != "queued" else ""
        changes = describe_changes(_changes(row))
        table.add_row(
            row["id"][:8], row["name"], row["state"], steps, f"{begun.astimezone():%Y-%m-%d %H:%M}", took, changes
        )
    return table


def score_text(score: CatalogRow) -> str:
    """A score of `run_row` in words, with the gain over the stage before."""
    from nautile.evals.benchmarks.registry import title_of

    gain = "" if score["gain"] is None else f", {100 * score['gain']:+.1f} points over {score['over']}"
    return f"{100 * score['accuracy']:.1f} % of {title_of(score['benchmark'])} after {score['after']}{gain}"


def _score(row: CatalogRow | None) -> dict[str, Any] | None:
    return row and {name: row[name] for name in ("after", "benchmark", "accuracy", "over", "gain")}


def _changes(run: dict[str, Any]) -> list[Change]:
    changes: list[dict[str, Any]] = run["changes"]
    return [Change(**change) for change in changes]


def _utc(moment: datetime | None) -> str | None:
    return None if moment is None else moment.replace(tzinfo=UTC).isoformat()
