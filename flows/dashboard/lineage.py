"""Lineage as a graph, from any artifact back to the first text; and what lies in the store."""

from collections.abc import Sequence

import streamlit as st

from flows.dashboard import frame, queries
from flows.dashboard.frame import Chosen
from flows.dashboard.queries import Row
from tasks.wording import size

SHOWN_ARTIFACTS = 1000


def page(chosen: Chosen | None) -> None:
    st.title("Lineage")
    made = frame.ask(queries.artifacts, "", SHOWN_ARTIFACTS) if frame.store().catalog_path.exists() else []
    if not made:
        frame.nothing("No artifact in the store yet.")
        return
    names = [row["id"] for row in made]
    asked = st.query_params.get("artifact", "")
    picked = st.selectbox("Artifact", names, index=names.index(asked) if asked in names else 0)
    rows = frame.ask(queries.lineage, picked)
    st.graphviz_chart(graph(rows), width="stretch")
    st.caption("An arrow goes from what was read to what was made of it. Calls are those to teachers and judges.")
    table = [{name: row[name] for name in ("id", "stage", "created", "bytes", "calls", "commit")} for row in rows]
    st.dataframe(table, hide_index=True, width="stretch")
    with st.expander("Facts, configuration and files of this artifact"):
        manifest = frame.store().get(picked).manifest
        st.json({name: manifest[name] for name in ("facts", "config", "files")}, expanded=1)


def storage(chosen: Chosen | None) -> None:
    """What takes room, by kind, and the artifacts one by one."""
    st.title("Storage")
    if not frame.store().catalog_path.exists():
        frame.nothing("The store is empty.")
        return
    st.caption(f"{frame.store().root}")
    sizes = frame.ask(queries.sizes)
    st.metric("artifacts", size(sum(row["bytes"] or 0 for row in sizes)))
    st.dataframe([{**row, "size": size(row["bytes"] or 0)} for row in sizes], hide_index=True, width="stretch")
    kinds = ["", *sorted(row["kind"] for row in sizes)]
    kind = st.selectbox("Kind", kinds, format_func=lambda one: one or "all kinds")
    made = [{**row, "size": size(row["bytes"] or 0)} for row in frame.ask(queries.artifacts, kind)]
    st.dataframe(made, hide_index=True, width="stretch")
    st.caption("`nautile store gc --dry-run` says what nothing rests on; `nautile store verify` reads every byte.")


def graph(rows: Sequence[Row]) -> str:
    """The rows of a lineage in Graphviz's language. Names are ids and stages, which hold no quotes."""
    lines = ["digraph {", "rankdir=LR", 'node [shape=box, style="rounded", fontname="sans-serif", fontsize=11]']
    for row in {row["id"]: row for row in rows}.values():
        calls = f"\\n{row['calls']:,} calls" if row["calls"] else ""
        bold = ", penwidth=2" if row["depth"] == 0 else ""
        lines.append(f'"{row["id"]}" [label="{row["id"]}\\n{row["stage"]}{calls}"{bold}]')
    edges = {(row["id"], row["made"], row["name"]) for row in rows if row["made"]}
    lines += [f'"{read}" -> "{made}" [label="{name}", fontsize=9]' for read, made, name in sorted(edges)]
    return "\n".join([*lines, "}"])
