"""The page Logs: the last lines of a stage's log, with a search, refreshed while the stage runs."""

from pathlib import Path

import streamlit as st

from nautile.common.text import visible
from nautile.flows.dashboard import cards, shared
from nautile.flows.dashboard.shared import ChosenRun
from nautile.flows.logs import LogFile
from nautile.store.mirror import open_store

MOST_BYTES = 2_000_000  # searched bytes at the end of a log
MOST_LINES = 500  # lines shown at most


def page(chosen: ChosenRun | None) -> None:
    st.title("Logs")
    store = open_store()
    rows = {row["label"]: row for row in chosen.stages if row["execution"]} if chosen else {}
    if chosen is None or not rows:
        st.caption("No stage in this run yet.")
        return
    # By default the running stage, else the last that was not reused.
    running = [label for label, row in rows.items() if row["state"] == "running"]
    own = [label for label, row in rows.items() if not row["reused"]]
    first = (running or own or list(rows))[-1]
    left, right = st.columns([1, 2])
    picked = left.selectbox("Stage", list(rows), index=list(rows).index(first), key="stage", bind="query-params")
    search = right.text_input("Search", placeholder="lines with this text, any case", key="search", bind="query-params")
    row = rows.get(picked, rows[first])
    log = LogFile(chosen.run, *(row[name] for name in ("label", "stage", "key", "execution", "state")))
    path = log.path(store)
    if path is None:
        st.caption("It has no log here: it ran no process, or it ran on another machine.")
        return
    lines, complete = last_lines(path)
    matches = [line for line in lines if search.lower() in line.lower()]
    st.caption(
        f"{shared.STATE_MARKS.get(row['state'], row['state'])} · {len(matches):,} "
        f"{'lines' if complete else 'of the last lines'}{' with this text' if search else ''}"
        + (f", the last {MOST_LINES:,} shown" if len(matches) > MOST_LINES else "")
    )
    if row["error"]:
        st.error(shared.escaped(visible(row["error"])))
    if not lines:
        st.caption("Its log is empty.")
        return
    cards.show_text("\n".join(matches[-MOST_LINES:]))
    # Read when it is clicked: a log of a day's training does not go through every redraw.
    st.download_button("The whole log", data=path.read_bytes, file_name=path.name, mime="text/plain")


def last_lines(path: Path, most: int = MOST_BYTES) -> tuple[list[str], bool]:
    """The lines of the last `most` bytes of a log, control characters replaced; and whether that is the whole log."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - most))
        text = visible(file.read().decode(errors="replace"))
    lines = text.splitlines()
    return (lines, True) if size <= most else (lines[1:], False)  # the first line may be incomplete
