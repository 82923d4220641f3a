"""The command `nautile publish`: write the folder, show the files to upload, ask for confirmation, upload."""

import contextlib
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from nautile.common.errors import ConfigError
from nautile.common.text import size, visible
from nautile.flows.cli.terminal import Json, console_for, show_as, the_store

FOLDER = "published"  # in the working folder


def publish(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="An artifact id or a folder.")],
    repository: Annotated[str, typer.Argument(metavar="REPO", help="OWNER/NAME on the Hugging Face Hub.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the files; keep them only in --out, make no request.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where to write them. Default: published/OWNER--NAME.")
    ] = None,
    format_: Annotated[
        str,
        typer.Option("--format", metavar="FORMAT", help="transformers or nautile, as `nautile export` writes them."),
    ] = "transformers",
    onnx: Annotated[
        int | None, typer.Option(metavar="BITS", help="Also publish an ONNX export: 32, 8 or 4 bits per weight.")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(metavar="REPO", help="Also publish the distilled documents, with a dataset card.")
    ] = None,
    license_: Annotated[
        str | None, typer.Option("--license", metavar="ID", help="Licence of the weights: an identifier of the Hub.")
    ] = None,
    dataset_license: Annotated[
        str | None, typer.Option(metavar="ID", help="Licence of the documents: an identifier of the Hub.")
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Create a public repository. Default: a private one.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Upload without asking for confirmation.")] = False,
    as_json: Json = False,
) -> None:
    """Publish a checkpoint on the Hugging Face Hub, with a model card written from the run's records.

    Needs a token with write access: HF_TOKEN, or `hf auth login`. Files that the repository already has are not sent.
    """
    from nautile.flows.named import checkpoint_artifact
    from nautile.flows.operate.publish import (
        LIBRARIES,
        HubUploader,
        RepositoryKind,
        check_repository,
        documents_of,
        hub_token,
        write_dataset,
        write_model,
    )

    repositories: list[tuple[RepositoryKind, str]] = [("model", repository)]
    repositories += [("dataset", dataset)] if dataset else []
    # All refusals that need no work come first; writing the folders takes minutes.
    for _, name in repositories:
        check_repository(name)
    if format_ not in LIBRARIES:
        raise ConfigError(f"--format {format_}: not one of {', '.join(LIBRARIES)}")
    token = None if dry_run else hub_token()
    if not dry_run and token is None:
        raise ConfigError(
            "publishing needs a token: set HF_TOKEN to one with write access (https://huggingface.co/settings/tokens), "
            "or pass --dry-run to see what would be published"
        )
    if not (dry_run or yes) and (as_json or not sys.stdin.isatty()):
        raise ConfigError("there is no terminal to confirm the upload: pass --yes, or --dry-run to upload nothing")
    store = the_store()
    artifact, folder = checkpoint_artifact(store, checkpoint)
    documents = documents_of(store, artifact) if dataset else None
    uploader = HubUploader(token, os.environ.get("HF_ENDPOINT")) if token else None
    if uploader:
        uploader.user()  # detects an invalid token before minutes of work
    # Without --out a dry run keeps nothing: the folder is removed after it has been listed.
    kept = not dry_run or out is not None
    place = contextlib.nullcontext(FOLDER) if kept else tempfile.TemporaryDirectory(prefix="nautile-publish-")
    with place as parent:
        main = out or Path(parent) / repository.replace("/", "--")
        # A dataset that cannot be written must leave no model on the Hub that links to it.
        folders = [
            write_model(
                store, artifact, folder, main, repository, format_, onnx_bits=onnx, license_=license_, dataset=dataset
            )
        ]
        if documents and dataset:
            second = main.with_name(f"{main.name}-documents") if out else Path(parent) / dataset.replace("/", "--")
            folders.append(write_dataset(store, documents, second, dataset, license_=dataset_license))
        message = f"Nautile {artifact.id}" if artifact else "Nautile"
        results = [
            publish_folder(
                uploader, path, name, kind, private=not public, message=message, yes=yes, quiet=as_json, kept=kept
            )
            for (kind, name), path in zip(repositories, folders, strict=True)
        ]
    if as_json:
        show_as(results, True, str)


def publish_folder(
    uploader: Any,
    folder: Path,
    repository: str,
    kind: Any,
    *,
    private: bool,
    message: str,
    yes: bool,
    quiet: bool,
    kept: bool,
) -> dict[str, Any]:
    """Show the upload plan, and upload after confirmation if files are missing there; returns the result as JSON data.

    `uploader` None: make no request. `quiet`: print nothing. `kept`: the folder stays after the command.
    """
    from nautile.flows.operate.publish import UploadPlan, planned_files
    from nautile.flows.render import relative

    if uploader is None:
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
        result |= {"address": uploader.upload(plan, message), "uploaded": True}
        note = f"published: {result['address']}"
    else:
        note = "nothing was uploaded"
    if not quiet:
        console.print(note, soft_wrap=True)
    return result


def upload_view(plan: Any, *, compared: bool) -> Any:
    """The repository, and each file with its size and state. `compared`: the plan was compared with the Hub."""
    from rich.console import Group
    from rich.text import Text

    from nautile.flows.render import relative, text_table

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
