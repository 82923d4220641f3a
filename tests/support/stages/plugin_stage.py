"""A stage of a plug-in in one file, as a user of the project would write it, and a DAG with one line more."""

from dataclasses import replace

from nautile.configs.base import Section, Share
from nautile.configs.schema import RunConfig
from nautile.flows.dag import Need, Step, all_outputs
from nautile.tasks.engine.job import Job
from nautile.tasks.engine.stage import Curve, stage

PLUGIN = {
    "NAUTILE_PLUGINS": "stages=tests.support.stages.plugin_stage:dedupe",
    "NAUTILE_DAG": "tests.support.stages.plugin_stage:plugin_dag",
}


class DedupeConfig(Section):
    threshold: Share = 0.8


@stage(
    "dedupe",
    version=1,
    outputs=("documents",),
    section=DedupeConfig,
    page="training",
    heading="Deduplication",
    curves=(Curve("share that is kept", ("kept_share",), "share"),),
    limits=lambda section: [f"a similarity of {section['dedupe']['threshold']:.0%}"],
)
def dedupe(job: Job) -> None:
    config = job.part("dedupe", DedupeConfig)
    for step in (1, 2, 3):
        job.emit("metric", name="kept_share", step=step, value=config.threshold / step)
    job.emit("sample", set="kept", index=0, text="a text that was kept")
    (job.output("documents") / "documents.jsonl").write_text("{}\n")
    job.describe("documents", kept=41)


def plugin_dag(config: RunConfig) -> list[Step]:
    """The first steps of the stand-ins, that stage, and the report."""
    from tests.support.stages.toy_dag import toy_dag  # loads every stage, which the child processes do not need

    *steps, last = toy_dag(config)
    steps = [step for step in steps if step.stage.name in ("held_out", "ingest")]
    needs = {"tokens": Need(steps[-1].label, "tokens")}
    steps.append(Step("dedupe", dedupe, {"dedupe": config.dedupe.model_dump(mode="json")}, needs))
    return [*steps, replace(last, needs=all_outputs(steps))]
