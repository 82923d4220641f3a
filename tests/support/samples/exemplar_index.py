"""The index of eight exemplars that small distillations read."""

import itertools
from pathlib import Path

from nautile.common.events import silent
from nautile.configs.base import TaskConfig
from nautile.configs.distill import IndexConfig
from nautile.data.sources.corpus_source import synth_record
from nautile.data.sources.reasoning_gym import problems
from nautile.data.tokens.build import write_exemplars
from nautile.tasks.distill import index
from nautile.tasks.engine.job import Job


def index_exemplars(folder: Path, config: IndexConfig | None = None) -> Path:
    """Write the exemplars in `folder` and index them by the index stage. Returns the folder of its output."""
    drawn = itertools.islice(problems([TaskConfig(name="chain_sum")], 1, "train"), 8)
    write_exemplars(folder / "exemplars" / "exemplars.jsonl", map(synth_record, drawn))
    section, inputs = {"index": (config or IndexConfig()).model_dump(mode="json")}, {"exemplars": folder / "exemplars"}
    job = Job("index", "key", "e", section, inputs, folder / "indexing", silent)
    index.work(job)
    return job.output("retrieval")
