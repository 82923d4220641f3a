"""The storage page: disk usage of the store by artifact kind and by folder, and a list of the artifacts."""

import os
from pathlib import Path

import streamlit as st

from common.text import size
from flows.dashboard import queries, shared
from flows.dashboard.shared import ChosenRun
from store.mirror import open_store

FOLDERS = {
    "staging": "unfinished work, from which stages resume",
    "events": "metrics, samples and calls that processes have reported",
    "logs": "output of the stages",
    "cache": "embeddings, kept for reuse",
    "replies": "replies of endpoints that were paid for, kept for reuse",
    "compiled": "compiled programs",
    "prefect": "Prefect's own database",
}
CACHE_S = 60.0
MAX_ARTIFACTS = 500
MAX_FILES = 20_000  # of a folder: counting more would delay the page


def page(chosen: ChosenRun | None) -> None:
    st.title("Storage")
    store = open_store()
    if not store.catalog_path.exists():
        st.caption("The store is empty.")
        return
    st.text(str(store.root))
    sizes = shared.ask(queries.SIZES)
    left, right = st.columns(2, gap="large")
    with left:
        st.metric("artifacts", size(sum(row["bytes"] or 0 for row in sizes)))
        st.dataframe(sizes, hide_index=True, width="stretch", height="content", column_config=_COLUMNS)
    with right:
        folders = _folder_sizes(str(store.root))
        st.metric("everything else", size(sum(row["bytes"] for row in folders)))
        st.dataframe(folders, hide_index=True, width="stretch", height="content", column_config=_COLUMNS)
    st.subheader("Artifacts")
    kinds = ["", *sorted(row["kind"] for row in sizes)]
    kind = st.selectbox("Kind", kinds, format_func=lambda kind: kind or "all kinds", key="kind")
    artifacts = shared.ask(queries.ARTIFACTS, kind, kind, MAX_ARTIFACTS)
    rows = [{**row, "lineage": shared.lineage_link(row["id"])} for row in artifacts]
    st.dataframe(rows, hide_index=True, width="stretch", column_config=_COLUMNS, column_order=_ORDER)
    st.caption("`nautile store gc --dry-run` lists what can be removed; `nautile store verify` checks every file.")


_ORDER = ("id", "kind", "stage", "created", "bytes", "file_count", "replaced", "lineage", "run")
_COLUMNS = {
    "bytes": st.column_config.NumberColumn("size", format="bytes"),
    "artifacts": st.column_config.NumberColumn("artifacts", format="localized"),
    "created": st.column_config.DatetimeColumn("made (UTC)", format="YYYY-MM-DD HH:mm:ss"),
    "file_count": st.column_config.NumberColumn("files", format="localized"),
    "replaced": st.column_config.CheckboxColumn(
        "replaced", help="A later forced run replaced it; `nautile store gc` removes it."
    ),
    "lineage": st.column_config.LinkColumn("lineage", display_text="open"),
}


@st.cache_data(ttl=CACHE_S, show_spinner=False)
def _folder_sizes(root: str) -> list[dict[str, object]]:
    """A row for each folder of the store other than the artifacts, with its size, and for the catalog."""
    rows: list[dict[str, object]] = []
    for name, what in FOLDERS.items():
        if (Path(root) / name).is_dir():
            total, complete = _size_of(Path(root) / name)
            what = what if complete else f"{what} (its first {MAX_FILES:,} files)"
            rows.append({"folder": name, "bytes": total, "what": what})
    catalog = Path(root) / "catalog.duckdb"
    rows.append(
        {"folder": catalog.name, "bytes": catalog.stat().st_size, "what": "the catalog's tables, which can be rebuilt"}
    )
    return rows


def _size_of(folder: Path) -> tuple[int, bool]:
    """Bytes of the files in a folder (links are not followed), and False if counting stopped at `MAX_FILES`."""
    total = files = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue  # removed while we count
        files += len(names)
        if files > MAX_FILES:
            return total, False
    return total, True
