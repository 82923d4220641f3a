"""Upload of `nautile publish`: show the files to upload, ask for confirmation, upload."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from nautile.common.text import size, visible
from nautile.flows.cli.terminal import console_for
from nautile.flows.operate.hub_upload import HubUploader, RepositoryKind, UploadPlan, planned_files
from nautile.flows.render import relative, text_table


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
    kept: bool = True,
) -> dict[str, Any]:
    """Show the upload plan, and upload after confirmation if files are missing there; returns the result as JSON data.

    `uploader` None: make no request. `quiet`: print nothing. `kept`: the folder stays after the command.
    """
    if uploader is None:
        # Compared with nothing, every file counts as new.
        plan = UploadPlan(repository, kind, folder, planned_files(folder, {}), (), None, private)
    else:
        plan = uploader.plan(folder, repository, kind, private)
    result: dict[str, Any] = {
        "repository": repository,
        "kind": kind,
        "folder": str(folder) if kept else None,
        "private": plan.private,
    }
    result |= {"files": [asdict(file) for file in plan.files], "uploaded": False, "address": None}
    console = console_for()
    if not quiet:
        console.print(upload_view(plan, compared=uploader is not None))
    if uploader is None:
        note = f"nothing was uploaded: {relative(folder)} holds what would be published"
        if not kept:
            note = "nothing was uploaded or kept: with --out FOLDER the files stay there"
    elif not plan.to_send:
        note = f"nothing was uploaded: {repository} already has all of these files"
    elif yes or typer.confirm(f"Upload {len(plan.to_send)} files to {repository}?"):
        # The question comes after the table, so that the operator has seen names, sizes and whether the repository is
        # public.
        result |= {"address": uploader.upload(plan, message), "uploaded": True}
        note = f"published: {result['address']}"
    else:
        note = "nothing was uploaded"
    if not quiet:
        console.print(note, soft_wrap=True)
    return result


def upload_view(plan: UploadPlan, *, compared: bool) -> RenderableType:
    """The repository, and each file with its size and state. `compared`: the plan was compared with the Hub."""
    table = text_table("file", "size", "state")
    for file in plan.files:
        table.add_row(file.path, size(file.bytes), "unchanged" if file.state == "same" else file.state)
    existence = ("exists" if plan.head else "will be created") if compared else "not compared with the Hub"
    total = size(sum(file.bytes for file in plan.to_send))
    lines = [
        f"{plan.kind} {plan.repository}: {existence}, {'private' if plan.private else 'PUBLIC'}",
        f"from {relative(plan.folder)}: {len(plan.to_send)} files to send, {total}",
    ]
    if plan.others:
        names = ", ".join(visible(name, 80) for name in plan.others[:5])
        lines.append(f"only in the repository, not changed: {names}{', ...' if len(plan.others) > 5 else ''}")
    return Group(Text("\n".join(lines)), table)
