"""`nautile distill --label`: a teacher labels texts, as a step by itself."""

from common.errors import ConfigError
from configs.endpoint import with_fallbacks
from configs.label import LabelRun
from flows.cli.uses.step import run_step
from store.artifacts import Artifact, Store
from tasks.label import label


def label_texts(
    store: Store, run: LabelRun, questions: str | None, command: str, force: bool, as_json: bool
) -> Artifact:
    """The artifact of labels. `questions`: the one with the benchmarks' questions, which no text may overlap."""
    names = with_fallbacks([run.label.teacher], run.endpoints)
    section = {
        "label": run.label.model_dump(mode="json"),
        "endpoints": {name: run.endpoints[name].model_dump(mode="json") for name in names},
    }
    inputs = {}
    if questions is not None:
        screened = store.get(questions)
        if screened.kind != "questions":
            raise ConfigError(f"--questions {questions}: is an artifact of kind {screened.kind!r}, not 'questions'")
        inputs["questions"] = screened.id
    return run_step(label, section, inputs, store, command=command, force=force, as_json=as_json)["labels"]
