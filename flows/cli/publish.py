"""The command `nautile publish`: write the folder, show the files to upload, ask for confirmation, upload."""

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from nautile.common.errors import ConfigError
from nautile.flows.cli.terminal import Json, show_as, the_store

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
    from nautile.flows.cli.upload import publish_folder
    from nautile.flows.named import checkpoint_artifact
    from nautile.flows.operate.hub_upload import HubUploader, RepositoryKind, check_repository, hub_token
    from nautile.flows.operate.publish import LIBRARIES, documents_of, write_dataset, write_model

    repositories: list[tuple[RepositoryKind, str]] = [("model", repository)]
    repositories += [("dataset", dataset)] if dataset else []
    # All refusals that need no work come first: names, format, token, terminal. Then the folders are written, which
    # takes minutes, and only then is anything sent.
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
        # Both folders exist before the first upload: a dataset that cannot be written leaves no model on the Hub that
        # links to it.
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
