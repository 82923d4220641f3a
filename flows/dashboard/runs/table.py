"""The table of runs: changed settings, chosen settings, scores, time, cost, notes and tags."""

import json
import re
from collections.abc import Sequence
from typing import Any

import pandas as pd
import streamlit as st

from nautile.common.text import visible
from nautile.configs.changes import describe_changes, read_changes
from nautile.evals.scoring.scores import NOT_SCREENED
from nautile.flows.dashboard import figures, queries, shared
from nautile.flows.run_state import LIVE, MOST_SEARCHED, RUN_COUNT, last_score, scores_of
from nautile.store.catalog import CatalogRow
from nautile.store.views import run_seconds

_FIELD = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)*")  # the path of a setting, as `--set` takes it
USUAL = ("seed", "reason.policy.steps", "align.policy.steps", "pretrain.optimizer.peak")


def show(chosen: str | None) -> None:
    """Draw the table and its controls. `chosen`: the run that the page shows."""
    # A search looks through all runs: the run that is searched is often an old one.
    summaries = shared.run_summaries(MOST_SEARCHED if st.session_state.get("find") else queries.MOST_RUNS)
    (count,) = shared.query(RUN_COUNT) or [{"runs": 0}]
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
    # A score of zero is a score.
    empty += [name for name in ("score", "gain", "difference") if frame[name].isna().all()]
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
    "gain": st.column_config.NumberColumn("gain, points", format="%+.1f", help="Over the stage before, in this run."),
    "difference": st.column_config.NumberColumn(
        "over the run before", format="%+.1f", help="Points, against the run before that was evaluated after it."
    ),
    "after": st.column_config.TextColumn("after", width=85, help="The last stage that was evaluated."),
    "minutes": st.column_config.NumberColumn(
        "time, min", format="%.1f", width=75, help="From its first start to its end, over restarts."
    ),
    "cost": st.column_config.NumberColumn("cost, $", format="%.4f"),
    "tags": st.column_config.ListColumn("tags", width=110),
    "notes": st.column_config.TextColumn("notes", width=200),
    "changed": st.column_config.TextColumn("changed", width=190),
}


def table(summaries: Sequence[CatalogRow], fields: Sequence[str], chosen: str | None) -> list[dict[str, Any]]:
    """The rows of the table, newest run first. `fields`: paths of settings to add as columns."""
    runs = [row["run"] for row in summaries]
    scores = scores_of(shared.query, runs)
    costs = {row["run"]: row for row in shared.query(queries.RUN_COSTS, runs)}
    notes = {row["run"]: row for row in shared.query(queries.NOTES)}
    settings: dict[str, list[str | None]] = {}
    if fields:
        paths = [f"$.{field}" for field in fields]
        settings = {row["run"]: row["chosen"] for row in shared.query(queries.RUN_SETTINGS, paths, runs)}
    rows = []
    for place, row in enumerate(summaries):
        run = row["run"]
        score = last_score(scores.get(run)) or {}
        # `summaries` is newest first, so what comes after in the list was before in time.
        earlier = (scores.get(other["run"], {}) for other in summaries[place + 1 :])
        before = next((by_stage[score["after"]] for by_stage in earlier if score and score["after"] in by_stage), None)
        note, seconds = notes.get(run, {}), run_seconds(row, row["current_state"] in LIVE)
        changes = describe_changes(read_changes(row["changes"]))
        rows.append(
            {
                "show": f"/?run={run}",
                "state": shared.STATE_MARKS.get(row["current_state"], row["current_state"]),
                "name": visible(row["name"] or row["config"] or run[:8]) + (" (shown)" if run == chosen else ""),
                "begun": row["begun"],
                "steps": f"{row['finished']} of {row['planned'] or row['stages']}",
                "after": score.get("after", "") + (f" ({NOT_SCREENED})" if score.get("not_screened") else ""),
                "score": 100 * score["accuracy"] if score else None,
                "gain": None if score.get("gain") is None else 100 * score["gain"],
                "difference": 100 * (score["accuracy"] - before["accuracy"]) if before else None,
                "minutes": None if seconds is None else seconds / 60,
                "cost": costs.get(run, {}).get("dollars"),
                "changed": changes,
                **{field: value for field, value in zip(fields, settings.get(run, [None] * len(fields)), strict=True)},
                "tags": json.loads(note.get("tags") or "[]"),
                "notes": visible(note.get("text") or ""),
            }
        )
    return rows


def colour(state: str) -> str:
    """The CSS of a cell with a state in the form of `STATE_MARKS`."""
    _, _, text, ground = next((look for look in shared.LOOKS.values() if state == f"{look[0]} {look[1]}"), ("",) * 4)
    # A table of Streamlit is a canvas, so that the server chooses.
    text, ground = figures.shade(text, ground), figures.shade(ground, text)
    return f"color: {text}; background-color: {ground}" if text else ""
