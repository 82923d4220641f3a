"""The table of runs: changed settings, chosen settings, scores, time, cost, notes and tags."""

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pandas as pd
import streamlit as st

from nautile.common.text import visible
from nautile.configs.changes import describe_changes, read_changes
from nautile.evals.scoring.scores import NOT_SCREENED
from nautile.evals.tables.paper_figures import TABLE_1
from nautile.evals.tables.results import TABLE_1_BENCHMARKS
from nautile.flows.dashboard import figures, queries, shared
from nautile.flows.run_state import LIVE, MOST_SEARCHED
from nautile.store.catalog import CatalogRow

_FIELD = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)*")  # the path of a setting, as `--set` takes it
USUAL = ("seed", "reason.policy.steps", "align.policy.steps", "pretrain.optimizer.peak")


def show(chosen: str | None) -> None:
    """Draw the table and its controls. `chosen`: the run that the page shows."""
    # A search looks through all runs: the run that is searched is often an old one.
    summaries = shared.run_summaries(MOST_SEARCHED if st.session_state.get("find") else queries.MOST_RUNS)
    (count,) = shared.query(queries.RUN_COUNT) or [{"runs": 0}]
    changed = [change.field for row in summaries for change in read_changes(row["changes"])]
    title, left, right = st.columns([2, 4, 3], vertical_alignment="center")
    listed = len(summaries)
    title.subheader("All runs" if listed >= count["runs"] else f"The newest {listed} of {count['runs']:,} runs")
    parameters = left.multiselect(
        "Settings shown",
        list(dict.fromkeys([*changed, *USUAL])),
        accept_new_options=True,
        key="settings",
        bind="query-params",
        placeholder="columns of settings: reason.policy.steps",
        label_visibility="collapsed",
    )
    search = right.text_input(
        "Search runs",
        key="find",
        bind="query-params",
        placeholder="search: name, change, tag or note",
        label_visibility="collapsed",
    )
    rows = table(summaries, [field for field in parameters if _FIELD.fullmatch(field)], chosen)
    needle = search.strip().lower()
    # Searched in Python over what is shown, so that a number is found as it is printed.
    rows = [row for row in rows if needle in " ".join(str(value) for value in row.values()).lower()]
    if not rows:
        st.caption("No run fits the search.")
        return
    frame = pd.DataFrame(rows)
    empty = [name for name in ("cost", "tags", "notes", "changed", "after") if not frame[name].any()]
    empty += [name for name in ("score", "difference") if frame[name].isna().all()]  # a score of zero is a score
    frame = frame.drop(columns=empty)
    styled = frame.style.map(colour, subset=["state"])
    st.dataframe(styled, hide_index=True, width="stretch", column_config=_COLUMNS, row_height=32, placeholder="")
    st.caption(
        "Score: share of the held-out problems (GSM8K where it was asked) that are right after the last stage that was "
        "evaluated. Cost: calls that the run paid for. "
        "A click on a heading sorts; a setting that is chosen above becomes a column, and the page's address keeps it; "
        "`nautile note RUN TEXT --tag NAME` writes notes."
    )


_COLUMNS = {
    "show": st.column_config.LinkColumn("run", display_text="open", width=55),
    "state": st.column_config.TextColumn("state", width=100),
    "begun": st.column_config.DatetimeColumn("begun (UTC)", format="YYYY-MM-DD HH:mm", width=120),
    "steps": st.column_config.TextColumn("steps", width=70),
    "score": st.column_config.NumberColumn("score, %", format="%.1f", width=70),
    "difference": st.column_config.NumberColumn(
        "gain, points", format="%+.1f", help="Against the run before that was evaluated after the same stage."
    ),
    "after": st.column_config.TextColumn("after", width=85, help="The last stage that was evaluated."),
    "seconds": st.column_config.NumberColumn(
        "time, min", format="%.1f", width=75, help="Time in the run's own attempts."
    ),
    "cost": st.column_config.NumberColumn("cost, $", format="%.4f"),
    "tags": st.column_config.ListColumn("tags", width=110),
    "notes": st.column_config.TextColumn("notes", width=200),
    "changed": st.column_config.TextColumn("changed", width=190),
}


def table(summaries: Sequence[CatalogRow], fields: Sequence[str], chosen: str | None) -> list[dict[str, Any]]:
    """The rows of the table, newest run first. `fields`: paths of settings to add as columns."""
    runs = [row["run"] for row in summaries]
    scores = scores_by_stage(shared.query(queries.RUN_SCORES, runs))
    costs = {row["run"]: row for row in shared.query(queries.RUN_COSTS, runs)}
    notes = {row["run"]: row for row in shared.query(queries.NOTES)}
    settings: dict[str, list[str | None]] = {}
    if fields:
        paths = [f"$.{field}" for field in fields]
        settings = {row["run"]: row["chosen"] for row in shared.query(queries.RUN_SETTINGS, paths, runs)}
    rows = []
    for place, row in enumerate(summaries):
        run = row["run"]
        stage, (score, screened) = next(reversed(scores.get(run, {}).items()), (None, (None, True)))
        # `summaries` is newest first, so what comes after in the list was before in time.
        earlier = (scores.get(other["run"], {}) for other in summaries[place + 1 :])
        before = next((by_stage[stage][0] for by_stage in earlier if stage in by_stage), None)
        note, cost = notes.get(run, {}), costs.get(run, {})
        changes = describe_changes(read_changes(row["changes"]))
        rows.append(
            {
                "show": f"/?run={run}",
                "state": shared.STATE_MARKS.get(row["current_state"], row["current_state"]),
                "name": visible(row["name"] or row["config"] or run[:8]) + (" (shown)" if run == chosen else ""),
                "begun": row["begun"],
                "steps": f"{row['finished']} of {row['planned'] or row['stages']}",
                "after": (stage or "") + ("" if screened else f" ({NOT_SCREENED})"),
                "score": None if score is None else 100 * score,
                "difference": None if score is None or before is None else 100 * (score - before),
                "seconds": _minutes(cost, row["current_state"] in LIVE),
                "cost": cost.get("dollars"),
                "changed": changes,
                **{field: value for field, value in zip(fields, settings.get(run, [None] * len(fields)), strict=True)},
                "tags": json.loads(note.get("tags") or "[]"),
                "notes": visible(note.get("text") or ""),
            }
        )
    return rows


def _minutes(cost: CatalogRow, live: bool) -> float | None:
    """The minutes in a run's own attempts; those of a live run that have not ended count until now."""
    now = datetime.now(UTC).replace(tzinfo=None)
    times = [(now - started).total_seconds() for started in cost.get("open") or () if live]
    times += [cost["seconds"]] if cost.get("seconds") is not None else []
    return sum(times) / 60 if times else None


def scores_by_stage(rows: Sequence[CatalogRow]) -> dict[str, dict[str, tuple[float, bool]]]:
    """Run -> stage of the paper's Table 1, in its order -> accuracy (0 to 1) on the first measured benchmark.

    With it, whether training text was screened for the benchmark's questions.
    """
    measured: dict[str, dict[str, tuple[float, bool]]] = {}
    for row in rows:
        accuracy = json.loads(row["accuracy"] or "{}")
        unscreened = json.loads(row["not_screened"] or "{}")
        values = ((shared.nested(accuracy, name), name not in unscreened) for name in TABLE_1_BENCHMARKS)
        found = next(((float(value), ok) for value, ok in values if isinstance(value, (int, float))), None)
        if found is not None:
            measured.setdefault(row["run"], {})[row["label"].partition(":")[2]] = found
    return {run: {stage: own[stage] for stage in TABLE_1 if stage in own} for run, own in measured.items()}


def colour(state: str) -> str:
    """The CSS of a cell with a state in the form of `STATE_MARKS`."""
    _, _, text, ground = next((look for look in shared.LOOKS.values() if state == f"{look[0]} {look[1]}"), ("",) * 4)
    # A table of Streamlit is a canvas, so that the server chooses.
    text, ground = figures.shade(text, ground), figures.shade(ground, text)
    return f"color: {text}; background-color: {ground}" if text else ""
