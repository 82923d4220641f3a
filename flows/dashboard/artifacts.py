"""The pages Lineage (all artifacts that one was made from) and Storage (disk usage, and a list of the artifacts)."""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st

from nautile.common.errors import ConfigError
from nautile.common.text import size
from nautile.configs.changes import differences
from nautile.flows.dashboard import cards, figures, queries, shared
from nautile.flows.dashboard.graph import without_implied
from nautile.flows.dashboard.shared import ChosenRun
from nautile.flows.listings import listed_artifacts
from nautile.store.catalog import CatalogRow
from nautile.store.layout import Layout
from nautile.store.manifest import short_commit
from nautile.store.mirror import open_store
from nautile.store.views import LINEAGE_WITH_CALLS

_COLORS = {"report": "#e8eef7", "evaluation": "#fdf0d5", "checkpoint": "#dff0e0", "rollouts": "#efe6f5"}
_COLORS |= {"traces": "#efe6f5", "documents": "#fbe3e0"}


def lineage(chosen: ChosenRun | None) -> None:
    st.title("Lineage")
    picked = _choose_artifact()
    if picked is None:
        st.caption("No artifact in the store yet.")
        return
    rows = shared.query(LINEAGE_WITH_CALLS, picked)
    arrows_help = "Also draw the arrows that a path implies."
    all_edges = st.toggle("Every arrow", value=False, key="arrows", help=arrows_help, bind="query-params")
    st.graphviz_chart(graph(rows, all_edges), width="content")
    st.caption("Arrows point from an input to what was made from it. Calls are those to teachers and judges.")
    # An artifact stands in the lineage once for each that read it; the table has it once.
    distinct = sorted({row["id"]: row for row in rows}.values(), key=lambda row: (row["depth"], row["id"]))
    table = []
    for row in distinct:
        shown = {"bytes": size(row["bytes"] or 0), "commit": short_commit(row["commit"] or "")}
        table.append({**row, **shown, "lineage": shared.lineage_link(row["id"])})
    order = ("depth", "id", "stage", "created", "file_count", "bytes", "calls", "configuration", "commit", "lineage")
    st.dataframe(
        table,
        hide_index=True,
        width="stretch",
        column_order=order,
        column_config=_LINEAGE_COLUMNS,
        alt="What it was made from",
    )
    _settings_that_differ(picked, [row["id"] for row in rows])
    with st.expander("Facts, configuration and files of this artifact"):
        try:
            manifest = open_store().get(picked).manifest
        except ConfigError as error:
            st.error(shared.escaped(str(error)))
            return
        st.json({name: manifest[name] for name in ("facts", "config", "files")}, expanded=1)


_LINEAGE_COLUMNS = {
    "depth": st.column_config.NumberColumn("steps back"),
    "file_count": st.column_config.NumberColumn("files", format="localized"),
    "bytes": st.column_config.TextColumn("size"),
    "created": st.column_config.DatetimeColumn("made (UTC)", format="YYYY-MM-DD HH:mm:ss"),
    "calls": st.column_config.NumberColumn("calls", format="localized"),
    "lineage": st.column_config.LinkColumn("lineage", display_text="open"),
}


def _settings_that_differ(picked: str, made_from: list[str]) -> None:
    """Draw the settings that differ between the lineages of two artifacts; the other is chosen here."""
    kind = picked.partition("/")[0]
    st.subheader("Settings that differ")
    place = "an artifact of the same kind"
    row = shared.choose_artifact(kind, "Compare with", "with", replaced=True, placeholder=place)
    if row is None or row["id"] == picked:
        return
    other = row["id"]
    sides = [made_from, [row["id"] for row in shared.query(LINEAGE_WITH_CALLS, other)]]
    # What makes two checkpoints differ is often a setting of the distillation.
    settings = [
        {row["label"]: json.loads(row["config"] or "{}") for row in shared.query(queries.CONFIGURATIONS, ids)}
        for ids in sides
    ]
    rows = [
        (change.field, json.dumps(change.before), json.dumps(change.after))
        for change in differences(settings[0], settings[1])
    ]
    if rows:
        cards.show([cards.table(("step and setting", picked, other), rows)])
    else:
        st.caption("None: they were made with the same settings.")


def _choose_artifact() -> str | None:
    """The artifact picked on the page, by default the one in the address, else the newest; None if there are none."""
    requested = st.query_params.get("artifact", "")
    made = shared.query(queries.ARTIFACT, requested) if requested else []
    if requested and not made:
        st.warning(f"There is no artifact {shared.escaped(requested)}.")
    # The key contains the requested name, so that another address resets the selection, but new artifacts do not.
    first = [made[0]["execution"]] if made and made[0]["execution"] else []
    row = shared.choose_artifact("", "Artifact", f"artifact-{requested}", first, replaced=True, begin=requested)
    return row["id"] if row else None


def graph(rows: Sequence[CatalogRow], all_edges: bool = True) -> str:
    """The rows of a lineage as a graph in DOT. Without `all_edges`, edges that a longer path implies are left out."""
    lines = ["digraph {", "rankdir=TB", 'size="11,60"', "nodesep=0.25", "ranksep=0.4"]
    ink = figures.shade("#333333", "#c9d1d9")
    lines += ['bgcolor="transparent"', f'edge [color="{ink}", fontcolor="{ink}"]']
    lines.append('node [shape=box, style="rounded,filled", fillcolor="#ffffff", fontname="sans-serif", fontsize=12]')
    for row in {row["id"]: row for row in rows}.values():
        calls = f"\n{row['calls']:,} calls" if row["calls"] else ""
        style = ", penwidth=2.5" if row["depth"] == 0 else ""
        style += f', fillcolor="{_COLORS[row["kind"]]}"' if row["kind"] in _COLORS else ""
        kind, _, name = row["id"].partition("/")
        label = _quote(f"{kind} · {row['stage']}{calls}\n{name}")
        lines.append(f"{_quote(row['id'])} [label={label}{style}]")
    named = sorted({(row["id"], row["made"], row["name"]) for row in rows if row["made"]})
    if not all_edges:  # an input that is read by two names is one arrow
        edges = dict.fromkeys((source, target) for source, target, _ in named)
        named = [(*edge, "") for edge in without_implied(list(edges))]
    for source, target, name in named:
        label = f" [label={_quote(name)}, fontsize=10]" if all_edges else ""
        lines.append(f"{_quote(source)} -> {_quote(target)}{label}")
    return "\n".join([*lines, "}"])


def _quote(text: str) -> str:
    """A quoted DOT string: nothing in the text ends it, and its only escapes are line breaks."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


CACHE_S = 60.0
_JOINED = "\N{NO-BREAK SPACE}"  # between a number and its unit
MAX_FILES = 20_000  # files counted per folder; more would delay the page


def storage(chosen: ChosenRun | None) -> None:
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
    left, right = st.columns([1, 2])
    kind = left.selectbox("Kind", kinds, key="kind", bind="query-params")
    search = right.text_input("Search", placeholder="id, stage or run", key="search", bind="query-params")
    only = None if kind == "all kinds" else kind

    def page_of(limit: int, offset: int) -> list[CatalogRow]:
        return listed_artifacts(shared.query, search, kind=only, limit=limit, offset=offset)

    rows = shared.paged_rows("artifacts", page_of, (only, search), size=queries.LISTED, unit="artifacts")
    table = pd.DataFrame([{**row, "lineage": shared.lineage_link(row["id"])} for row in rows], columns=_ORDER)
    table["superseded"] = table["superseded"].map(lambda number: "yes" if number else "")
    styled = table.style.format({"bytes": size, "file_count": "{:,}"})
    st.dataframe(
        styled, hide_index=True, width="stretch", column_config=_STORAGE_COLUMNS, alt="The artifacts of the store"
    )
    st.caption(
        "Replaced: a later forced run made it again. `nautile store gc --dry-run` lists what can be removed; "
        "`nautile store verify` checks every file."
    )


_ORDER = ("id", "stage", "created", "bytes", "file_count", "superseded", "lineage", "run")
_STORAGE_COLUMNS = {
    "id": st.column_config.TextColumn("artifact"),
    "bytes": st.column_config.NumberColumn("size"),
    "created": st.column_config.DatetimeColumn("made (UTC)", format="YYYY-MM-DD HH:mm:ss"),
    "file_count": st.column_config.NumberColumn("files"),
    "superseded": st.column_config.TextColumn("replaced"),
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
