"""The first page: the state, time and cost of each stage of the run, and what failed."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime

import streamlit as st

from common.files import read_json
from common.text import amount, dollars, duration, size, visible
from flows.dashboard import queries, shared
from store.catalog import CatalogRow
from store.mirror import open_store
from tasks.engine.staging import read_retry_note


def page(chosen: shared.ChosenRun | None) -> None:
    st.title("Overview")
    if chosen is None:
        st.caption(f"There is no run in {open_store().root} yet: `nautile run` starts one.")
        return
    _totals(chosen.stages)
    if link := shared.prefect_link(chosen.run):
        st.link_button("This run in Prefect", link)
    facts = [json.loads(row["facts"]) for row in shared.ask(queries.ARTIFACTS_OF, chosen.executions())]
    stand_ins = dict.fromkeys(text for fact in facts if isinstance(text := fact.get("stand_in"), str))
    if stand_ins:
        st.caption("Stand-ins in this run: " + "; ".join(shared.escaped(text) for text in stand_ins))
    # A step waits between two attempts: its last one failed, and there will be another.
    folder = open_store().root / "staging"
    failed = [row for row in chosen.stages if row["state"] == "failed"]
    waits = {row["label"]: note for row in failed if (note := read_retry_note(folder / row["key"]))}
    for label, note in waits.items():
        st.warning(f"{shared.escaped(label)} waits: {shared.escaped(visible(note))}")
    st.dataframe(
        [_stage_row(row, row["label"] in waits) for row in chosen.stages],
        hide_index=True,
        width="stretch",
        height="content",
        column_config=_COLUMNS,
    )
    for row in failed:
        if row["label"] not in waits:
            with st.container(border=True):
                st.subheader(f"{shared.escaped(row['label'])} failed")
                shared.show_text(visible(row["error"] or "no reason was recorded"))
                st.caption("Finished work is kept. Fix what the message names, then resume with:")
                st.code("nautile run CONFIG", language="sh")
    st.subheader("All runs")
    runs = [
        {
            "run": row["run"],
            "configuration": row["config"],
            "begun (UTC)": row["begun"],
            "time": duration((row["ended"] - row["begun"]).total_seconds()),
            **{name: row[name] for name in ("stages", "reused", "running", "failed", "stopped")},
            "show": f"/?run={row['run']}",
            "in Prefect": shared.prefect_link(row["run"]),
        }
        for row in shared.ask(queries.RUNS)
    ]
    st.dataframe(runs, hide_index=True, width="stretch", column_config=_COLUMNS)


_COLUMNS = {
    "progress": st.column_config.ProgressColumn("progress", min_value=0.0, max_value=1.0, format="percent"),
    "made": st.column_config.LinkColumn("made", display_text=r"artifact=(.*)%2F"),
    "show": st.column_config.LinkColumn("show", display_text="open"),
    "in Prefect": st.column_config.LinkColumn("in Prefect", display_text="open"),
}


def _totals(stages: Sequence[CatalogRow]) -> None:
    done = sum(row["state"] in ("done", "reused") for row in stages)
    costs = [row["dollars"] for row in stages if row["dollars"] is not None and not row["reused"]]
    times = [row["seconds"] for row in stages if row["seconds"] is not None and not row["reused"]]
    peaks = [row["peak_bytes"] for row in stages if row["peak_bytes"]]
    columns = st.columns(4)
    columns[0].metric("stages finished", f"{done} of {len(stages)}")
    columns[1].metric("time in stages", duration(sum(times)) if times else "none yet")
    unknown = sum(row["unknown_dollars"] or 0.0 for row in stages if not row["reused"])
    more = f"at most {dollars(unknown)} more for lost replies" if unknown else None
    columns[2].metric("paid for calls", dollars(sum(costs)) if costs else "no calls", more, delta_color="off")
    columns[3].metric("largest process", size(max(peaks)) if peaks else "not measured")


def _stage_row(row: CatalogRow, waits: bool) -> CatalogRow:
    """`waits`: there will be another attempt."""
    running = row["state"] == "running"
    # The last progress event of a running stage, read without `Store.staging`, which would create the folder.
    live = (read_json(open_store().root / "staging" / row["key"] / "live.json") or {}) if running else {}
    share = live["done"] / live["total"] if live.get("total") and live.get("done") is not None else None
    progress = f"{amount(live['done'])}/{amount(live['total'])} {live.get('unit', '')}" if share is not None else ""
    # A running stage has no end yet: show the time since its first attempt began.
    elapsed = (datetime.now(UTC).replace(tzinfo=None) - row["begun"]).total_seconds() if running else row["seconds"]
    outputs = json.loads(row["outputs"] or "{}")
    state = "waiting" if waits else "reused" if row["reused"] else row["state"]
    return {
        "stage": row["label"],
        "state": shared.STATE_MARKS.get(state, state),
        "progress": share,
        "now": " ".join(part for part in (progress, visible(live.get("note") or "")) if part),
        "time": "" if row["reused"] or elapsed is None else duration(elapsed),
        "attempts": row["attempts"],
        "peak memory": size(row["peak_bytes"]) if row["peak_bytes"] else "",
        "calls": "" if row["calls"] is None else f"{row['calls']:,}",
        "cost": "" if row["dollars"] is None else dollars(row["dollars"]),
        "begun (UTC)": row["begun"],
        "made": shared.lineage_link(str(next(iter(outputs.values())))) if outputs else None,
    }
