"""Lineage as a graph, from any artifact back to the first text."""

from collections.abc import Sequence

import streamlit as st

from common.errors import ConfigError
from flows.dashboard import queries
from flows.dashboard import shared as frame
from flows.dashboard.queries import Row
from flows.dashboard.shared import Chosen

SHOWN_ARTIFACTS = 1000
_COLORS = {"report": "#e8eef7", "evaluation": "#fdf0d5", "checkpoint": "#dff0e0", "rollouts": "#efe6f5"}
_COLORS |= {"traces": "#efe6f5", "documents": "#fbe3e0"}


def page(chosen: Chosen | None) -> None:
    st.title("Lineage")
    made = frame.ask(queries.artifacts, "", SHOWN_ARTIFACTS) if frame.store().catalog_path.exists() else []
    if not made:
        frame.nothing("No artifact in the store yet.")
        return
    picked = _picked([row["id"] for row in made])
    rows = frame.ask(queries.lineage, picked)
    every = st.toggle("Every arrow", value=False, key="arrows", help="also those that a longer way already implies")
    st.graphviz_chart(graph(rows, every), width="content")
    st.caption("An arrow goes from what was read to what was made of it. Calls are those to teachers and judges.")
    table = [{**row, "lineage": frame.lineage_link(row["id"])} for row in {row["id"]: row for row in rows}.values()]
    order = ("depth", "id", "stage", "created", "bytes", "calls", "commit", "lineage")
    st.dataframe(table, hide_index=True, width="stretch", column_order=order, column_config=_COLUMNS)
    with st.expander("Facts, configuration and files of this artifact"):
        try:
            manifest = frame.store().get(picked).manifest
        except ConfigError as error:
            st.error(frame.quoted(str(error)))
            return
        st.json({name: manifest[name] for name in ("facts", "config", "files")}, expanded=1)


_COLUMNS = {
    "depth": st.column_config.NumberColumn("steps back"),
    "bytes": st.column_config.NumberColumn("size", format="bytes"),
    "created": st.column_config.DatetimeColumn("made (UTC)", format="YYYY-MM-DD HH:mm:ss"),
    "calls": st.column_config.NumberColumn("calls", format="localized"),
    "lineage": st.column_config.LinkColumn("lineage", display_text="from where"),
}


def _picked(names: list[str]) -> str:
    """The artifact to show: the one the address names, wherever it stands among them, else the newest."""
    asked = st.query_params.get("artifact", "")
    if asked and asked not in names:
        if frame.ask(queries.lineage, asked):
            names = [asked, *names]
        else:
            st.warning(f"There is no artifact {frame.quoted(asked)}.")
    # The key holds the name asked for: another address begins anew there, new artifacts do not.
    first = names.index(asked) if asked in names else 0
    return st.selectbox("Artifact", names, index=first, key=f"artifact-{asked}")


def graph(rows: Sequence[Row], every: bool = True) -> str:
    """The rows of a lineage in Graphviz's language; without `every`, no arrow that a longer way already implies."""
    lines = ["digraph {", "rankdir=TB", 'size="11,60"', "nodesep=0.25", "ranksep=0.4"]
    lines.append('node [shape=box, style="rounded,filled", fillcolor="#ffffff", fontname="sans-serif", fontsize=12]')
    for row in {row["id"]: row for row in rows}.values():
        calls = f"\n{row['calls']:,} calls" if row["calls"] else ""
        look = ", penwidth=2.5" if row["depth"] == 0 else ""
        look += f', fillcolor="{_COLORS[row["kind"]]}"' if row["kind"] in _COLORS else ""
        kind, _, name = row["id"].partition("/")
        label = _quote(f"{kind} · {row['stage']}{calls}\n{name}")
        lines.append(f"{_quote(row['id'])} [label={label}{look}]")
    edges = {(row["id"], row["made"], row["name"]) for row in rows if row["made"]}
    for read, made, name in sorted(edges if every else _needed(edges)):
        label = f" [label={_quote(name)}, fontsize=10]" if every else ""
        lines.append(f"{_quote(read)} -> {_quote(made)}{label}")
    return "\n".join([*lines, "}"])


def _needed(edges: set[tuple[str, str, str]]) -> set[tuple[str, str, str]]:
    """The edges whose ends no longer way joins."""
    after: dict[str, set[str]] = {}
    for read, made, _ in edges:
        after.setdefault(read, set()).add(made)
    reached: dict[str, set[str]] = {}

    def reach(node: str) -> set[str]:
        if node not in reached:
            reached[node] = set()  # a hostile manifest may read itself
            reached[node] = {far for near in after.get(node, ()) for far in (near, *reach(near))}
        return reached[node]

    def implied(read: str, made: str) -> bool:
        return any(made in reach(near) for near in after[read] if near not in (made, read))

    return {(read, made, "") for read, made, _ in edges if not implied(read, made)}


def _quote(text: str) -> str:
    """A string of Graphviz: nothing in it ends it, and nothing in it is an escape but the line breaks."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
