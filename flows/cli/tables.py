"""Rich tables and trees for the terminal, built from plain rows. Text in them is never interpreted as markup."""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from nautile.common.commands import shell_command
from nautile.common.text import amount, counted, duration, size, visible
from nautile.flows.render import FittingTable, query_table, relative, text_table
from nautile.store.manifest import short_commit

SHOWN_INPUTS = 3  # differing inputs printed per step
DEEPEST = 100  # levels of a printed lineage: drawing more takes a time that is quadratic in them
STATES = {
    "made": "green",
    "damaged": "bold red",
    "running": "cyan",
    "reused": "blue",
    "waiting": "yellow",
    "cancelled": "yellow",
    "done": "green",
    "coming": "dim",
    "not started": "dim",
    "interrupted": "yellow",
    "silent": "yellow",
    "failed": "bold red",
    "not made": "dim",
}


def why_text(rows: list[dict[str, Any]]) -> Text:
    """A paragraph for each step that is not in the store: the artifact it was compared with, and the differences."""
    lines = [f"{sum(row['state'] == 'made' for row in rows)} of {len(rows)} steps are in the store"]
    for row in rows:
        if row["state"] == "made":
            continue
        lines.append(f"{row['label']}: " + (f"compared with {row['nearest']}" if row["nearest"] else "never made here"))
        lines += [f"    {difference}" for difference in row["differences"]]
        first_inputs = row["inputs"][:SHOWN_INPUTS]
        lines += [f"    input {difference}" for difference in first_inputs]
        if more := len(row["inputs"]) - len(first_inputs):
            lines.append(f"    and {more} more inputs")
    return Text("\n".join(lines))


def count_table(counts: dict[str, int]) -> Table:
    """A table of names and counts."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    for name, count in counts.items():
        table.add_row(name, f"{count:,}")
    return table


def status_table(rows: list[dict[str, Any]]) -> Table:
    """The steps with their state, time, and the first line of the error, the progress, or the artifacts."""
    table = text_table("stage", "state", "time", "artifacts")
    for row in rows:
        progress = row["progress"]
        detail = visible(row["error"]).splitlines()[0] if row["error"] else ""
        if row["state"] == "waiting":
            detail = visible(progress["note"])
        if not detail and row["state"] in ("running", "interrupted") and progress.get("done") is not None:
            total = f"/{amount(progress['total'])}" if progress.get("total") else ""
            detail = f"{amount(progress['done'])}{total} {progress.get('unit', '')}"
        if row.get("upload"):
            detail = "  ".join(part for part in (detail, f"({visible(row['upload'])})") if part)
        elapsed = duration(row["seconds"]) if row["seconds"] is not None and row["state"] == "made" else ""
        state = Text(row["state"], style=STATES[row["state"]])
        start = [f"(from {row['start']})"] if row["start"] else []
        if row["state"] == "made" and progress.get("note"):
            start.append(visible(progress["note"]))
        table.add_row(row["label"], state, elapsed, Text("  ".join([detail] if detail else row["artifacts"] + start)))
    return table


def waiting_table(rows: list[dict[str, Any]]) -> FittingTable:
    """The runs that wait for an approval, with their questions."""
    table = FittingTable("run", "stage", "since", "question")
    for row in rows:
        since = datetime.fromisoformat(row["since"]).astimezone().strftime("%Y-%m-%d %H:%M")
        table.add_row(row["run"][:8], row["label"], since, row["message"])
    return table


def file_table(paths: list[str]) -> Table:
    """Files with their sizes."""
    table = text_table("file", "size")
    for path in paths:
        table.add_row(path, size(Path(path).stat().st_size))
    return table


def how_to_try(format_: str, out: Path) -> str:
    """A line with the commands that use an export; "" for a format that needs programs of the user's own."""
    from nautile.data.label_set import read_label_set  # numpy takes a quarter of a second

    labels = read_label_set(out)
    if format_ == "onnx" and labels is not None and labels.classes:
        use = "classify" if labels.form == "label" else "extract"
        added = shell_command("nautile", "store", "add", out, "--kind", "export")
        return f"use it: `{added}`, then `nautile {use} ID TABLE --runtime onnx` with the id shown\n"
    if format_ == "transformers" and labels is not None and labels.classes:
        task = "text-classification" if labels.form == "label" else "token-classification"
        return f"use it: pipeline({task!r}, {str(out)!r}, trust_remote_code=True)\n"
    if format_ == "onnx":
        commands = shell_command("nautile", "chat", out, "--runtime", "onnx"), shell_command("python", out / "chat.py")
        return "try it: `{}`, or without this project `{}`\n".format(*commands)
    if format_ == "web":
        options = ("--bind", "127.0.0.1", "--directory", out, 8000)
        command = shell_command("python", "-m", "http.server", *options)
        return f"serve it with `{command}`, and open http://127.0.0.1:8000/\n"
    return ""


def artifact_table(rows: list[dict[str, Any]]) -> Table:
    """Artifacts with their stage, size, number of files and time."""
    table = text_table("artifact", "stage", "size", "files", "made")
    for row in rows:
        created = datetime.fromisoformat(row["created"]).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        table.add_row(row["id"], row["stage"], size(row["bytes"]), str(row["files"]), created)
    return table


def last_artifacts(rows: list[dict[str, Any]], total: int, command: str) -> RenderableType:
    """`artifact_table` of the last artifacts of a list, of how many they are, and the command that lists all."""
    table = artifact_table(rows)
    if len(rows) == total:
        return table
    return Group(table, Text(f"the last {len(rows):,} of {total:,} artifacts: `{command}` lists all", "dim"))


def manifest_view(manifest: dict[str, Any]) -> RenderableType:
    """Origin and inputs of an artifact, then its facts, then its files."""
    from rich.pretty import Pretty  # imports attrs, which no list needs

    head = Table.grid(padding=(0, 2))
    for name in ("id", "stage", "version", "created", "commit", "host", "execution", "path", "at"):
        head.add_row(Text(name, style="dim"), Text(str(manifest.get(name))))
    damaged = manifest["damaged"]
    digests = Text(f"damaged: {', '.join(damaged)}", "bold red") if damaged else Text("all files match", "green")
    head.add_row(Text("digests", style="dim"), digests)
    for name, full_id in manifest["inputs"].items():
        kind, _, key = full_id.partition("/")
        head.add_row(Text(f"input {name}", style="dim"), Text(f"{kind}/{key[:12]}"))
    files = text_table("file", "size", "sha256")
    for name, record in manifest["files"].items():
        files.add_row(Text(name), size(record["bytes"]), record["sha256"][:16])
    facts: list[RenderableType] = [Pretty(manifest["facts"])]
    if manifest["stage"] == "tokenizer":
        from nautile.data.bpe_training import bytes_per_token_rows

        columns, rows = bytes_per_token_rows(manifest["facts"])
        facts += [Text(), Text("bytes of text in a token", style="bold"), query_table(list(columns), rows)]
    return Group(head, Text(), Text("facts", style="bold"), *facts, Text(), files)


def lineage_tree(rows: list[dict[str, Any]]) -> RenderableType:
    """A tree of the artifact and its inputs. An input that several artifacts read is expanded only once.

    Configuration and commit are shown where they differ from those of the artifact above.
    """
    inputs: dict[str, dict[str, dict[str, Any]]] = {}  # id of the reader -> id of the input -> its row
    for row in rows:
        of_reader = inputs.setdefault(row["made"] or "", {})
        earlier = of_reader.get(row["id"])
        of_reader[row["id"]] = row | {"name": f"{earlier['name']} and {row['name']}"} if earlier else row
    root = rows[0]
    expanded = {root["id"]}

    def inputs_of(artifact_id: str) -> Iterator[dict[str, Any]]:
        return iter(sorted(inputs.get(artifact_id, {}).values(), key=lambda row: row["id"]))

    tree = Tree(_lineage_line(root, False, {}))
    # Depth first, without recursion: a chain of artifacts may be longer than Python's stack.
    branches = [(tree, root, inputs_of(root["id"]))]
    while branches:
        branch, above, rest = branches[-1]
        input_row = next(rest, None)
        if input_row is None:
            branches.pop()
            continue
        repeated = input_row["id"] in expanded
        expanded.add(input_row["id"])
        child = branch.add(_lineage_line(input_row, repeated, above))
        if len(branches) >= DEEPEST and inputs.get(input_row["id"]):
            child.add(Text("… (`--json` has all of it)", style="dim"))
        elif not repeated:
            branches.append((child, input_row, inputs_of(input_row["id"])))
    return tree


def calls_text(calls: int, cached: int) -> str:
    """The number of calls, and how many of them were answered from the store, as text."""
    return f"{calls:,} calls" + (f", {cached:,} of them cached" if cached else "")


def _lineage_line(row: dict[str, Any], repeated: bool, above: dict[str, Any]) -> Text:
    line = Text(row["id"], style="dim" if repeated else "bold")
    line.append(f"  {row['stage']}", style="dim")
    if row["name"]:
        line.append(f", read as {row['name']}", style="dim")
    if repeated:
        return line.append(", as above", style="dim")
    parts = [f"{counted(len(row['files']), 'file')}, {size(row['bytes'])}"]
    parts += [calls_text(row["calls"], row["cached_calls"])] if row["calls"] else []
    if row["configuration"] and row["configuration"] != above.get("configuration"):
        parts.append(f"configuration {visible(row['configuration'])}")
    if row["commit"] and row["commit"] != above.get("commit"):
        parts.append(f"commit {visible(short_commit(row['commit']))}")
    return line.append("".join(f", {part}" for part in parts), style="dim")


def reconciled_view(lines: list[str]) -> Text:
    """The results of `nautile reconcile`, a line each."""
    return Text("\n".join(map(visible, lines)) or "nothing to clean up")


def service_table(services: list[Any]) -> FittingTable:
    """The services of `nautile up`. The paths of their logs are not wrapped, so that they can be copied."""
    table = FittingTable("service", "address", "process", "log", whole="log")
    for service in services:
        table.add_row(service.name, service.url.removesuffix("/api"), service.pid, relative(Path(service.log)))
    return table


def verify_table(result: dict[str, Any]) -> RenderableType:
    """The damaged artifacts, the remedy for each, and the number of checked artifacts."""
    left_out = [f"{visible(name)}: {left_out_text(count)}" for name, count in result["events_left_out"].items()]
    if not result["damaged"]:
        return Text("\n".join([f"{counted(result['artifacts'], 'artifact')}, none damaged", *left_out]))
    table = text_table("artifact", "damaged files", "what to do")
    for name, files in result["damaged"].items():
        table.add_row(name, Text("; ".join(files), style="bold red"), Text(result["remedies"][name]))
    closing = f"{counted(result['artifacts'], 'artifact')}, {len(result['damaged'])} damaged"
    return Group(table, Text("\n".join([closing, *left_out])))


def left_out_text(count: int) -> str:
    """The number of events that the catalog leaves out."""
    return f"{count:,} {'event is' if count == 1 else 'events are'} left out: this version does not know the form"


def garbage_table(rows: list[dict[str, Any]], dry_run: bool) -> RenderableType:
    """The paths that `nautile store gc` removed, or with `dry_run` would remove."""
    table = text_table("path", "size", "reason")
    for row in rows:
        table.add_row(row["path"], size(row["bytes"]), row["why"])
    total = size(sum(row["bytes"] for row in rows))
    return Group(table, Text(f"{total} would be freed" if dry_run else f"{total} freed"))
