"""A process that runs a distillation, to be killed by a test: `python distilling_process.py URL FOLDER PROMPTS`.

FOLDER keeps everything between its runs: `retrieval/`, `replies`, `work/` and `out/`, and `counts.json` once
one has finished.
"""

import json
import sys
from pathlib import Path

from nautile.common.events import silent
from nautile.configs.distill import DistillConfig, IndexConfig, TeacherConfig
from nautile.configs.endpoint import EndpointConfig
from nautile.data.distill.run import distill_prompts
from nautile.data.endpoints.pool import EndpointPool
from nautile.data.records import SynthRecord
from nautile.data.retrieval.embedders import Encoder
from nautile.data.retrieval.exemplar_index import ExemplarIndex, build_index
from nautile.data.tokens.build import write_exemplars

PRICES = (0.5, 1.5)  # dollars per million tokens in and out
QUERIES = ("How many legs have 2 cats?", "What is 3 + 4?", "Spell cat backward.", "What is 2 * 3?", "9 - 1?")


def endpoint(url: str) -> EndpointConfig:
    """The teacher: patient with a busy machine, and with many attempts."""
    fields = {"concurrency": 256, "timeout_s": 10.0, "attempts": 9}
    fields |= {"dollars_per_million_in": PRICES[0], "dollars_per_million_out": PRICES[1]}
    return EndpointConfig(kind="openai", model="fake", url=url, **fields)


def write_index(folder: Path) -> None:
    """Five exemplars and their vectors in `folder/retrieval`."""
    (folder / "retrieval").mkdir(parents=True)
    records = [SynthRecord(query, "One. Two.", "3", synth_id=f"e/{n}") for n, query in enumerate(QUERIES)]
    write_exemplars(folder / "exemplars.jsonl", records)
    build_index(folder / "exemplars.jsonl", Encoder(), IndexConfig(), folder / "retrieval")


def distil(url: str, folder: Path, prompts: int) -> None:
    """Run what is left of the distillation."""
    config = DistillConfig(prompts=prompts, chunk=max(8, prompts // 20), teachers=(TeacherConfig(endpoint="teacher"),))
    index = ExemplarIndex(folder / "retrieval", Encoder())
    with EndpointPool({"teacher": endpoint(url)}, folder / "replies", silent) as pool:
        output = distill_prompts(config, pool, index, folder / "out", folder / "work", 1, silent)
        counts = {"prompts": output.stats.prompts, "accepted": output.stats.accepted, "dollars": pool.spent}
    (folder / "counts.json").write_text(json.dumps({**counts, "rejected": dict(output.stats.rejected)}))


if __name__ == "__main__":
    distil(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
