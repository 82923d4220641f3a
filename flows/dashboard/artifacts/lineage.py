"""The page Lineage: the graph of all artifacts that an artifact was made from."""

import json
from collections.abc import Sequence

import streamlit as st

from nautile.common.errors import ConfigError
from nautile.common.text import size
from nautile.configs.changes import differences
from nautile.flows.dashboard import cards, figures, queries, shared
from nautile.flows.dashboard.shared import ChosenRun
from nautile.store.catalog import CatalogRow
from nautile.store.manifest import short_commit
from nautile.store.mirror import open_store
from nautile.store.views import LINEAGE_WITH_CALLS

MAX_ARTIFACTS = 1000
_COLORS = {"report": "#e8eef7", "evaluation": "#fdf0d5", "checkpoint": "#dff0e0", "rollouts": "#efe6f5"}
_COLORS |= {"traces": "#efe6f5", "documents": "#fbe3e0"}


def page(chosen: ChosenRun | None) -> None:
    st.title("Lineage")
    artifacts = shared.query(queries.ARTIFACTS, "", "", MAX_ARTIFACTS)
    if not artifacts:
        st.caption("No artifact in the store yet.")
        return
    picked = _choose_artifact([row["id"] for row in artifacts])
    rows = shared.query(LINEAGE_WITH_CALLS, picked)
    all_edges = st.toggle("Every arrow", value=False, key="arrows", help="Also draw the arrows that a path implies.")
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
        table, hide_index=True, width="stretch", column_order=order, column_config=_COLUMNS, alt="What it was made from"
    )
    _settings_that_differ(picked, [row["id"] for row in rows], [row["id"] for row in artifacts])
    with st.expander("Facts, configuration and files of this artifact"):
        try:
            manifest = open_store().get(picked).manifest
        except ConfigError as error:
            st.error(shared.escaped(str(error)))
            return
        st.json({name: manifest[name] for name in ("facts", "config", "files")}, expanded=1)


_COLUMNS = {
    "depth": st.column_config.NumberColumn("steps back"),
    "file_count": st.column_config.NumberColumn("files", format="localized"),
    "bytes": st.column_config.TextColumn("size"),
    "created": st.column_config.DatetimeColumn("made (UTC)", format="YYYY-MM-DD HH:mm:ss"),
    "calls": st.column_config.NumberColumn("calls", format="localized"),
    "lineage": st.column_config.LinkColumn("lineage", display_text="open"),
}


def _settings_that_differ(picked: str, made_from: list[str], artifacts: Sequence[str]) -> None:
    """Draw the settings that differ between the lineages of two artifacts; the other is chosen here."""
    kind = picked.partition("/")[0]
    others = [name for name in artifacts if name != picked and name.partition("/")[0] == kind]
    st.subheader("Settings that differ")
    if not others:
        st.caption("There is no other artifact of this kind to compare with.")
        return
    other = st.selectbox("Compare with", others, index=None, placeholder="an artifact of the same kind", key="with")
    if other is None:
        return
    sides = [made_from, [row["id"] for row in shared.query(LINEAGE_WITH_CALLS, other)]]
    # Compared step by step over the whole lineage: what makes two checkpoints differ is often a setting of the
    # distillation.
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


def _choose_artifact(names: list[str]) -> str:
    """The artifact picked on the page, by default the one in the address, else the newest."""
    requested = st.query_params.get("artifact", "")
    if requested and requested not in names:
        # Older than the listed ones, or superseded: its own page still opens.
        if shared.query(LINEAGE_WITH_CALLS, requested):
            names = [requested, *names]
        else:
            st.warning(f"There is no artifact {shared.escaped(requested)}.")
    # The key contains the requested name, so that another address resets the selection, but new artifacts do not.
    first = names.index(requested) if requested in names else 0
    return st.selectbox("Artifact", names, index=first, key=f"artifact-{requested}")


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
    edges = {(row["id"], row["made"], row["name"]) for row in rows if row["made"]}
    for source, target, name in sorted(edges if all_edges else _transitive_reduction(edges)):
        label = f" [label={_quote(name)}, fontsize=10]" if all_edges else ""
        lines.append(f"{_quote(source)} -> {_quote(target)}{label}")
    return "\n".join([*lines, "}"])


def _transitive_reduction(edges: set[tuple[str, str, str]]) -> set[tuple[str, str, str]]:
    """The edges (input, output, name) whose ends are not connected by a longer path."""
    consumers: dict[str, set[str]] = {}
    for source, target, _ in edges:
        consumers.setdefault(source, set()).add(target)
    descendants: dict[str, set[str]] = {}

    def descendants_of(node: str) -> set[str]:
        if node not in descendants:
            # Without recursion: a chain may be longer than Python's stack, and damaged manifests may form a circle.
            reached: set[str] = set()
            open_ends = list(consumers.get(node, ()))
            while open_ends:
                near = open_ends.pop()
                if near not in reached:
                    reached.add(near)
                    open_ends += consumers.get(near, ())
            descendants[node] = reached
        return descendants[node]

    def implied(source: str, target: str) -> bool:
        return any(target in descendants_of(near) for near in consumers[source] if near not in (target, source))

    return {(source, target, "") for source, target, _ in edges if not implied(source, target)}


def _quote(text: str) -> str:
    """A quoted DOT string: nothing in the text ends it, and its only escapes are line breaks."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
