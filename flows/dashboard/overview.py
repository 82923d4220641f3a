"""The first page: where each stage of the run stands, what it took and cost, and what failed with what to do."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime

import streamlit as st

from common.files import read_json
from common.text import amount, size, visible
from flows.dashboard import queries
from flows.dashboard import shared as frame
from flows.dashboard.queries import Row


def page(chosen: frame.Chosen | None) -> None:
    st.title("Overview")
    if chosen is None:
        frame.nothing(f"There is no run in {frame.store().root} yet: `nautile run` makes one.")
        return
    _figures(chosen.stages)
    if link := frame.prefect_link(chosen.run):
        st.link_button("This run in Prefect", link)
    stand_ins = _stand_ins(chosen)
    if stand_ins:
        st.caption("Stand-ins in this run: " + "; ".join(frame.quoted(one) for one in stand_ins))
    st.dataframe(
        [_line(row) for row in chosen.stages],
        hide_index=True,
        width="stretch",
        height="content",
        column_config=_COLUMNS,
    )
    for row in chosen.stages:
        if row["state"] == "failed":
            _failure(row)
    st.subheader("All runs")
    found = [_run(row) for row in frame.ask(queries.runs)]
    st.dataframe(found, hide_index=True, width="stretch", column_config=_COLUMNS)


_COLUMNS = {
    "progress": st.column_config.ProgressColumn("progress", min_value=0.0, max_value=1.0, format="percent"),
    "made": st.column_config.LinkColumn("made", display_text=r"artifact=(.*)%2F"),
    "show": st.column_config.LinkColumn("show", display_text="open"),
    "in Prefect": st.column_config.LinkColumn("in Prefect", display_text="open"),
}


def _stand_ins(chosen: frame.Chosen) -> list[str]:
    """What stands in for a source, teacher or benchmark of the paper, as the artifacts of the run say."""
    made = frame.ask(queries.made, chosen.executions())
    told = [json.loads(row["facts"]).get("stand_in") for row in made]
    return list(dict.fromkeys(text for text in told if isinstance(text, str)))


def _figures(stages: Sequence[Row]) -> None:
    done = sum(row["state"] in ("done", "reused") for row in stages)
    spent = [row["dollars"] for row in stages if row["dollars"] is not None and not row["reused"]]
    worked = [row["seconds"] for row in stages if row["seconds"] is not None and not row["reused"]]
    peaks = [row["peak_bytes"] for row in stages if row["peak_bytes"]]
    columns = st.columns(4)
    columns[0].metric("stages finished", f"{done} of {len(stages)}")
    columns[1].metric("time in stages", frame.seconds(sum(worked)) if worked else "none yet")
    columns[2].metric("paid for calls", frame.dollars(sum(spent)) if spent else "no calls")
    columns[3].metric("largest process", size(max(peaks)) if peaks else "not measured")


def _line(row: Row) -> Row:
    running = row["state"] == "running"
    live = _live(row) if running else {}
    share = live["done"] / live["total"] if live.get("total") and live.get("done") is not None else None
    doing = f"{amount(live['done'])}/{amount(live['total'])} {live.get('unit', '')}" if share is not None else ""
    return {
        "stage": row["label"],
        "state": frame.STATE_MARKS.get("reused" if row["reused"] else row["state"], row["state"]),
        "progress": share,
        "now": " ".join(part for part in (doing, visible(live.get("note") or "")) if part),
        "time": "" if row["reused"] else frame.seconds(_elapsed(row) if running else row["seconds"]),
        "attempts": row["attempts"],
        "peak memory": size(row["peak_bytes"]) if row["peak_bytes"] else "",
        "calls": "" if row["calls"] is None else f"{row['calls']:,}",
        "cost": frame.dollars(row["dollars"]),
        "begun (UTC)": row["begun"],
        "made": _made(row),
    }


def _elapsed(row: Row) -> float:
    """Seconds since the stage's first attempt began."""
    return (datetime.now(UTC).replace(tzinfo=None) - row["begun"]).total_seconds()


def _made(row: Row) -> str | None:
    """The way to the lineage of the first artifact that the stage wrote."""
    outputs = json.loads(row["outputs"] or "{}")
    return frame.lineage_link(str(next(iter(outputs.values())))) if outputs else None


def _live(row: Row) -> Row:
    """What a running stage said last, from its staging folder (`Store.staging` would create it)."""
    return read_json(frame.store().root / "staging" / row["key"] / "live.json") or {}


def _failure(row: Row) -> None:
    with st.container(border=True):
        st.subheader(f"{frame.quoted(row['label'])} failed")
        frame.plain(visible(row["error"] or "no reason was recorded"))
        st.caption("What was finished is kept. Mend what it says, then go on with:")
        st.code("nautile run CONFIG", language="sh")


def _run(row: Row) -> Row:
    return {
        "run": row["run"],
        "configuration": row["config"],
        "begun (UTC)": row["begun"],
        "time": frame.seconds((row["ended"] - row["begun"]).total_seconds()),
        "stages": row["stages"],
        "reused": row["reused"],
        "running": row["running"],
        "failed": row["failed"],
        "stopped": row["stopped"],
        "show": f"/?run={row['run']}",
        "in Prefect": frame.prefect_link(row["run"]),
    }
