"""Storage: what takes room in the store, by kind of artifact and by folder, and the artifacts one by one."""

import os
from pathlib import Path

import streamlit as st

from common.text import size
from flows.dashboard import queries
from flows.dashboard import shared as frame
from flows.dashboard.shared import Chosen

FOLDERS = {
    "staging": "unfinished work, from which a stage resumes",
    "events": "what processes have reported: metrics, samples, calls",
    "logs": "logs",
    "cache": "embeddings and replies that need not be made again",
    "compiled": "compiled programs",
    "prefect": "Prefect's own database",
}
FRESH_S = 60.0
MANY = 20_000  # files: walking more than these would hold the page up


def page(chosen: Chosen | None) -> None:
    """What takes room, by kind, and the artifacts one by one."""
    st.title("Storage")
    if not frame.store().catalog_path.exists():
        frame.nothing("The store is empty.")
        return
    root = frame.store().root
    st.text(str(root))
    sizes = frame.ask(queries.sizes)
    left, right = st.columns(2, gap="large")
    with left:
        st.metric("artifacts", size(sum(row["bytes"] or 0 for row in sizes)))
        st.dataframe(sizes, hide_index=True, width="stretch", height="content", column_config=_COLUMNS)
    with right:
        around = _around(str(root))
        st.metric("all else", size(sum(row["bytes"] for row in around)))
        st.dataframe(around, hide_index=True, width="stretch", height="content", column_config=_COLUMNS)
    st.subheader("Artifacts")
    kinds = ["", *sorted(row["kind"] for row in sizes)]
    kind = st.selectbox("Kind", kinds, format_func=lambda one: one or "all kinds", key="kind")
    rows = frame.ask(queries.artifacts, kind)
    made = [{**row, "lineage": frame.lineage_link(row["id"])} for row in rows]
    st.dataframe(made, hide_index=True, width="stretch", column_config=_COLUMNS, column_order=_ORDER)
    st.caption("`nautile store gc --dry-run` says what nothing rests on; `nautile store verify` reads every byte.")


_ORDER = ("id", "kind", "stage", "created", "bytes", "file_count", "replaced", "lineage", "run")
_COLUMNS = {
    "bytes": st.column_config.NumberColumn("size", format="bytes"),
    "artifacts": st.column_config.NumberColumn("artifacts", format="localized"),
    "created": st.column_config.DatetimeColumn("made (UTC)", format="YYYY-MM-DD HH:mm:ss"),
    "file_count": st.column_config.NumberColumn("files", format="localized"),
    "replaced": st.column_config.CheckboxColumn("replaced", help="made anew since; `gc` may take it"),
    "lineage": st.column_config.LinkColumn("lineage", display_text="from where"),
}


@st.cache_data(ttl=FRESH_S, show_spinner=False)
def _around(root: str) -> list[dict[str, object]]:
    """The folders beside the artifacts, with their bytes; links are not followed."""
    rows: list[dict[str, object]] = []
    for name, what in FOLDERS.items():
        if (Path(root) / name).is_dir():
            total, whole = _bytes(Path(root) / name)
            rows.append(
                {"folder": name, "bytes": total, "what": what if whole else f"{what} (its first {MANY:,} files)"}
            )
    catalog = Path(root) / "catalog.duckdb"
    rows.append(
        {"folder": catalog.name, "bytes": catalog.stat().st_size, "what": "tables over all of it; can be rebuilt"}
    )
    return rows


def _bytes(folder: Path) -> tuple[int, bool]:
    total = files = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue  # gone since, as staging goes
        files += len(names)
        if files > MANY:
            return total, False
    return total, True
