"""`nautile distill --label`: label texts with a teacher model, as a single step."""

from typing import TYPE_CHECKING, Annotated

import typer

from nautile.common.commands import config_words, shell_command
from nautile.common.errors import ConfigError
from nautile.flows.cli.terminal import Json, SetOption, console_for, print_markdown, show_as, the_store

if TYPE_CHECKING:
    from nautile.store.artifacts import Artifact, Store
    from nautile.uses.labelled.config import LabelRun


def distill(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A TOML file with the tables [label] and [endpoints.NAME].")
    ],
    label: Annotated[
        bool, typer.Option("--label", help="Label the texts of `label.data` with the teacher `label.teacher`.")
    ] = False,
    questions: Annotated[
        str | None,
        typer.Option("--questions", metavar="ID", help="Leave out texts that overlap with these benchmark questions."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Label again; stored replies are reused.")] = False,
    settings: SetOption = None,
    as_json: Json = False,
) -> None:
    """Label texts with a teacher model, and measure its agreement with rows that people have labelled."""
    if not label:
        command = shell_command("nautile", "run", config, "--only", "distill")
        raise ConfigError(f"distill: pass --label; to distil documents, use `{command}`")
    from nautile.configs.load import load_part
    from nautile.uses.labelled.config import LabelRun

    words = shell_command("nautile", "distill", "--label", *(["--questions", questions] if questions else []))
    command = f"{words} {config_words(config, settings)}" + " --force" * force
    run_config = load_part(config, LabelRun, settings)
    artifact = label_texts(the_store(), run_config, questions, command, force, as_json)
    if as_json:
        show_as({"id": artifact.id, "path": str(artifact.path), **artifact.manifest["facts"]}, True, str)
        return
    print_markdown((artifact.path / "card.md").read_text(encoding="utf-8"))
    console_for().print(f"{artifact.id}: use it as data of `nautile tune`", soft_wrap=True)


def label_texts(
    store: "Store", run: "LabelRun", questions: str | None, command: str, force: bool, as_json: bool
) -> "Artifact":
    """Run the labelling, or reuse it; returns the artifact of labels.

    `questions`: id of an artifact with benchmark questions; texts that overlap with them are left out.
    """
    from nautile.configs.endpoint import with_fallbacks
    from nautile.uses.label.stage import check_gold
    from nautile.uses.label.stage import label as stage
    from nautile.uses.labelled.rows import read_rows
    from nautile.uses.step import run_step

    if run.label.gold.reader != "hub":  # what needs no network is checked before the step's process starts
        check_gold(run.label, read_rows(run.label.gold, "label", store.root))
    # Only the endpoints that may be called are in the section: a change of another one is no reason to label again.
    names = with_fallbacks([run.label.teacher], run.endpoints)
    section = {
        "label": run.label.model_dump(mode="json"),
        "endpoints": {name: run.endpoints[name].model_dump(mode="json") for name in names},
    }
    inputs = {}
    if questions is not None:
        artifact = store.get(questions)
        if artifact.kind != "questions":
            raise ConfigError(f"--questions {questions}: is an artifact of kind {artifact.kind!r}, not 'questions'")
        inputs["questions"] = artifact.id
    return run_step(stage, section, inputs, store, command=command, force=force, as_json=as_json)["labels"]
