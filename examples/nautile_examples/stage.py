"""A stage: the mean length of each source's documents, by which `ingest.row_length` is chosen.

The pipeline has it where `NAUTILE_DAG=nautile_examples.stage:steps` is set.
"""

import json

from nautile.configs.base import Section
from nautile.configs.schema import RunConfig
from nautile.data.tokens.shards import read_index
from nautile.flows.dag import Need, Step, pipeline_steps
from nautile.tasks.engine.job import Job
from nautile.tasks.engine.stage import stage


class LengthsConfig(Section):  # [lengths] in a configuration; its fields are in the key
    digits: int = 1


# Without a `version=` the digest of this file is in its key.
@stage("lengths", outputs=("lengths",), section=LengthsConfig)
def lengths(job: Job) -> None:
    digits, found = job.part("lengths", LengthsConfig).digits, {}
    for source, folder in job.inputs.items():
        index = read_index(folder)
        found[source] = round(index.total("tokens") / max(1, index.total("documents")), digits)
        job.emit("metric", name=f"{source}_tokens", step=0, value=found[source])
    (job.output("lengths") / "lengths.json").write_text(json.dumps(found))
    job.describe("lengths", tokens=found)


def steps(config: RunConfig) -> list[Step]:
    """The pipeline's steps, and this one after the last ingestion."""
    before = pipeline_steps(config)
    sources = [step.label for step in before if step.stage.name == "ingest"]
    section = (config.lengths or LengthsConfig()).model_dump(mode="json")
    own = Step("lengths", lengths, {"lengths": section}, {name: Need(name, "tokens") for name in sources})
    place = [step.label for step in before].index(sources[-1]) + 1
    return [*before[:place], own, *before[place:]]
