"""The second half of `nautile publish`: show what would go where, ask, upload."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from common.text import size, visible
from flows.cli.tables import relative, text_table
from flows.cli.terminal import console_for
from flows.operate.hub_upload import HubUploader, RepositoryKind, UploadPlan, planned_files


def publish_folder(
    uploader: HubUploader | None,
    folder: Path,
    repository: str,
    kind: RepositoryKind,
    *,
    private: bool,
    message: str,
    yes: bool,
    quiet: bool,
) -> dict[str, Any]:
    """Show what would go, and upload it if there is something to send and it is confirmed; what was done, as JSON data.

    `uploader` None: no request is made. `quiet`: nothing is printed.
    """
    if uploader is None:
        plan = UploadPlan(repository, kind, folder, planned_files(folder, {}), (), None, private)
    else:
        plan = uploader.plan(folder, repository, kind, private)
    done: dict[str, Any] = {"repository": repository, "kind": kind, "folder": str(folder), "private": plan.private}
    done |= {"files": [asdict(file) for file in plan.files], "uploaded": False, "address": None}
    console = console_for()
    if not quiet:
        console.print(upload_view(plan, asked=uploader is not None))
    if uploader is None:
        note = f"nothing was uploaded: {relative(folder)} holds what would go"
    elif not plan.to_send:
        note = f"{repository} has all of this already: nothing was uploaded"
    elif yes or typer.confirm(f"Upload {len(plan.to_send)} files to {repository}?"):
        done |= {"address": uploader.upload(plan, message), "uploaded": True}
        note = f"published: {done['address']}"
    else:
        note = "nothing was uploaded"
    if not quiet:
        console.print(note, soft_wrap=True)
    return done


def upload_view(plan: UploadPlan, *, asked: bool) -> RenderableType:
    """Each file with its size, and where it goes. `asked`: the plan was compared with the Hub."""
    table = text_table("file", "size", "state")
    for file in plan.files:
        table.add_row(file.path, size(file.bytes), "there already" if file.state == "same" else file.state)
    there = ("exists" if plan.head else "will be created") if asked else "the Hub was not asked"
    total = size(sum(file.bytes for file in plan.to_send))
    lines = [
        f"{plan.kind} {plan.repository}: {there}, {'private' if plan.private else 'PUBLIC'}",
        f"from {relative(plan.folder)}: {len(plan.to_send)} files to send, {total}",
    ]
    if plan.others:
        some = ", ".join(visible(name, 80) for name in plan.others[:5])
        lines.append(f"of the repository alone, and left as they are: {some}{', ...' if len(plan.others) > 5 else ''}")
    return Group(Text("\n".join(lines)), table)
