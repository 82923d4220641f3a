"""The page Storage: disk usage of the store by artifact kind and by folder, and a list of the artifacts."""

import os
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st

from nautile.common.text import size
from nautile.flows.dashboard import cards, queries, shared
from nautile.flows.dashboard.shared import ChosenRun
from nautile.store.layout import Layout
from nautile.store.mirror import open_store

CACHE_S = 60.0
_JOINED = "\N{NO-BREAK SPACE}"  # between a number and its unit
MAX_ARTIFACTS = 500
MAX_FILES = 20_000  # files counted per folder; more would delay the page


def page(chosen: ChosenRun | None) -> None:
    st.title("Storage")
    store = open_store()
    if not store.catalog_path.exists():
        st.caption("The store is empty.")
        return
    st.text(str(store.root))
    sizes, folders = shared.query(queries.SIZES), _folder_sizes(str(store.root))
    artifacts, others = sum(row["bytes"] or 0 for row in sizes), sum(row["bytes"] for row in folders)
    free = shutil.disk_usage(store.root).free
    totals = {"in all": artifacts + others, "artifacts": artifacts, "everything else": others, "disk free": free}
    for column, (title, count) in zip(st.columns(len(totals)), totals.items(), strict=True):
        column.metric(title, size(count))
    left, right = st.columns(2, gap="large")
    kinds_rows = (
        (row["kind"], f"{row['artifacts']:,}", size(row["bytes"] or 0).replace(" ", _JOINED)) for row in sizes
    )
    with left:
        cards.show([cards.table(("kind", "artifacts", "size"), kinds_rows, "Artifacts by kind")])
    with right:
        folder_rows = ((row["folder"], size(row["bytes"]).replace(" ", _JOINED), row["what"]) for row in folders)
        cards.show([cards.table(("folder", "size", "what it is"), folder_rows, "Everything else")])
    st.subheader("Artifacts")
    kinds = ["all kinds", *sorted(row["kind"] for row in sizes)]
    kind = st.selectbox("Kind", kinds, key="kind", bind="query-params")
    filter_kind = "" if kind == "all kinds" else kind
    rows = shared.query(queries.ARTIFACTS, filter_kind, filter_kind, MAX_ARTIFACTS)
    table = pd.DataFrame([{**row, "lineage": shared.lineage_link(row["id"])} for row in rows], columns=_ORDER)
    table["replaced"] = table["replaced"].map({True: "yes", False: ""})
    # Formatted with units, but still sorted as numbers.
    styled = table.style.format({"bytes": size, "file_count": "{:,}"})
    st.dataframe(styled, hide_index=True, width="stretch", column_config=_COLUMNS, alt="The artifacts of the store")
    st.caption(
        "Replaced: a later forced run made it again. `nautile store gc --dry-run` lists what can be removed; "
        "`nautile store verify` checks every file."
    )


_ORDER = ("id", "stage", "created", "bytes", "file_count", "replaced", "lineage", "run")
_COLUMNS = {
    "id": st.column_config.TextColumn("artifact"),
    "bytes": st.column_config.NumberColumn("size"),
    "created": st.column_config.DatetimeColumn("made (UTC)", format="YYYY-MM-DD HH:mm:ss"),
    "file_count": st.column_config.NumberColumn("files"),
    "lineage": st.column_config.LinkColumn("lineage", display_text="open"),
}


def _folders(store: Layout) -> dict[Path, str]:
    return {
        store.staging_root: "unfinished work, from which stages resume",
        store.events: "metrics, samples and calls that processes have reported",
        store.logs: "output of the stages",
        store.cache: "embeddings, kept for reuse",
        store.replies: "replies of endpoints that were paid for, kept for reuse",
        store.compiled: "compiled programs",
        store.prefect: "Prefect's own database",
    }


@st.cache_data(ttl=CACHE_S, show_spinner=False)
def _folder_sizes(root: str) -> list[dict[str, Any]]:
    """The sizes of the store's folders other than those of artifacts, and of the catalog, a row each."""
    rows: list[dict[str, Any]] = []
    for folder, what in _folders(Layout(root)).items():
        if folder.is_dir():
            total, complete = _size_of(folder)
            what = what if complete else f"{what} (its first {MAX_FILES:,} files)"
            rows.append({"folder": folder.name, "bytes": total, "what": what})
    catalog = Layout(root).catalog_path
    rows.append(
        {"folder": catalog.name, "bytes": catalog.stat().st_size, "what": "the catalog's tables, which can be rebuilt"}
    )
    return rows


def _size_of(folder: Path) -> tuple[int, bool]:
    """Bytes of the files in a folder (without following links), and False if counting stopped at `MAX_FILES`."""
    total = files = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue  # removed in the meantime
        files += len(names)
        if files > MAX_FILES:
            return total, False
    return total, True
