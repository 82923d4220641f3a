"""How the read commands look in a terminal. Rich renderables made of plain rows; text from outside is never markup."""

from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.pretty import Pretty
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from common.text import amount, duration, size, visible

_STATES = {
    "made": "green",
    "damaged": "bold red",
    "running": "cyan",
    "interrupted": "yellow",
    "failed": "bold red",
    "not made": "dim",
}


def relative(path: Path) -> Path:
    """The path as short as it can be said from here."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def status_table(rows: list[dict[str, Any]]) -> Table:
    table = _table("stage", "state", "time", "artifacts")
    for row in rows:
        progress = row["progress"]
        detail = row["error"].splitlines()[0] if row["error"] else ""
        if not detail and row["state"] in ("running", "interrupted") and progress.get("done") is not None:
            total = f"/{amount(progress['total'])}" if progress.get("total") else ""
            detail = f"{amount(progress['done'])}{total} {progress.get('unit', '')}"
        took = duration(row["seconds"]) if row["seconds"] is not None and row["state"] == "made" else ""
        state = Text(row["state"], style=_STATES[row["state"]])
        table.add_row(row["label"], state, took, Text(detail or "  ".join(row["artifacts"])))
    return table


def waiting_table(rows: list[dict[str, Any]]) -> Table:
    table = _table("run", "stage", "since", "asks")
    for row in rows:
        since = datetime.fromisoformat(row["since"]).astimezone().strftime("%Y-%m-%d %H:%M")
        table.add_row(row["run"][:8], row["label"], since, Text(visible(row["message"]), overflow="fold"))
    return table


def file_table(paths: list[str]) -> Table:
    table = _table("file", "size")
    for path in paths:
        table.add_row(path, size(Path(path).stat().st_size))
    return table


def artifact_table(rows: list[dict[str, Any]]) -> Table:
    table = _table("artifact", "stage", "size", "files", "made")
    for row in rows:
        made = datetime.fromisoformat(row["created"]).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        table.add_row(row["id"], row["stage"], size(row["bytes"]), str(row["files"]), made)
    return table


def manifest_view(manifest: dict[str, Any]) -> RenderableType:
    """The facts and inputs first; files and configuration after."""
    head = Table.grid(padding=(0, 2))
    for name in ("id", "stage", "version", "created", "commit", "host", "execution", "path", "at"):
        head.add_row(Text(name, style="dim"), Text(str(manifest.get(name))))
    damaged = manifest["damaged"]
    whole = Text("whole", style="green") if not damaged else Text(f"damaged: {', '.join(damaged)}", style="bold red")
    head.add_row(Text("digests", style="dim"), whole)
    for name, full_id in manifest["inputs"].items():
        kind, _, key = full_id.partition("/")
        head.add_row(Text(f"input {name}", style="dim"), Text(f"{kind}/{key[:12]}"))
    files = _table("file", "size", "sha256")
    for name, told in manifest["files"].items():
        files.add_row(Text(name), size(told["bytes"]), told["sha256"][:16])
    title = Text("facts", style="bold")
    return Group(head, Text(), title, Pretty(manifest["facts"]), Text(), files)


def lineage_tree(rows: list[dict[str, Any]]) -> RenderableType:
    """The artifact with what it was made from below it. One that several read is told once, and pointed to after."""
    readers: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        readers.setdefault(row["made"] or "", []).append(row)
    told: set[str] = set()

    def grow(branch: Tree, artifact_id: str) -> None:
        for row in sorted(readers.get(artifact_id, ()), key=lambda row: row["id"]):
            again = row["id"] in told
            told.add(row["id"])
            child = branch.add(_lineage_line(row, again))
            if not again:
                grow(child, row["id"])

    root = rows[0]
    tree = Tree(_lineage_line(root, False))
    grow(tree, root["id"])
    return tree


def query_table(columns: list[str], rows: list[tuple[Any, ...]]) -> Table:
    table = _table(*columns)
    for row in rows:
        table.add_row(*(Text("" if value is None else visible(value)) for value in row))
    return table


def parameter_table(counts: dict[str, int]) -> Table:
    return count_table({**counts, "total": sum(counts.values())})


def count_table(counts: dict[str, int]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    for name, count in counts.items():
        table.add_row(name, f"{count:,}")
    return table


def settled_view(lines: list[str]) -> Text:
    return Text("\n".join(map(visible, lines)) or "nothing was left behind")


def service_table(running: list[Any]) -> Table:
    table = _table("what", "where", "process", "log")
    for one in running:
        table.add_row(one.name, one.url.removesuffix("/api"), str(one.pid), one.log)
    return table


def verify_table(found: dict[str, Any]) -> RenderableType:
    table = _table("artifact", "damaged files", "what to do")
    for name, files in found["damaged"].items():
        table.add_row(name, Text("; ".join(files), style="bold red"), Text(found["remedies"][name]))
    if not found["damaged"]:
        return Text(f"{found['artifacts']} artifacts, all whole")
    return Group(table, Text(f"{found['artifacts']} artifacts, {len(found['damaged'])} damaged"))


def garbage_table(rows: list[dict[str, Any]], dry_run: bool) -> RenderableType:
    table = _table("what", "size", "why")
    for row in rows:
        table.add_row(row["path"], size(row["bytes"]), row["why"])
    total = size(sum(row["bytes"] for row in rows))
    return Group(table, Text(f"{total} would be freed" if dry_run else f"{total} freed"))


def _lineage_line(row: dict[str, Any], again: bool) -> Text:
    line = Text(row["id"], style="dim" if again else "bold")
    line.append(f"  {row['stage']}", style="dim")
    if row["name"]:
        line.append(f", read as {row['name']}", style="dim")
    if again:
        line.append(", as above", style="dim")
    elif row["calls"]:
        line.append(f", {row['calls']:,} calls", style="dim")
    return line


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        right = name in ("size", "files", "time")
        table.add_column(name, justify="right" if right else "left", no_wrap=right, overflow="fold")
    return table
