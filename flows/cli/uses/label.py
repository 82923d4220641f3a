"""`nautile distill --label`: label texts with a teacher model, as a single step."""

from nautile.common.errors import ConfigError
from nautile.configs.endpoint import with_fallbacks
from nautile.configs.label import LabelRun
from nautile.data.labelled.rows import read_rows
from nautile.flows.cli.uses.step import run_step
from nautile.store.artifacts import Artifact, Store
from nautile.tasks.label import check_gold, label


def label_texts(
    store: Store, run: LabelRun, questions: str | None, command: str, force: bool, as_json: bool
) -> Artifact:
    """Run the labelling, or reuse it; returns the artifact of labels.

    `questions`: id of an artifact with benchmark questions; texts that overlap with them are left out.
    """
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
    return run_step(label, section, inputs, store, command=command, force=force, as_json=as_json)["labels"]
