"""`simulate` with a stand-in for the model, in this process or in one of its own that kills itself after some chunks.

`python -m tests.support.processes.simulating FOLDER CHUNKS`
"""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from nautile.common.events import silent
from nautile.tasks.engine.job import Job
from nautile.uses.simulate import stage as simulate_task
from nautile.uses.simulate.config import SimulateConfig
from nautile.uses.simulate.prompts import option_orders
from nautile.uses.simulate.reading import parse_survey

PEOPLE = 150  # more than two chunks
SURVEY = {
    "name": "parks",
    "title": "Parks",
    "persona": "I am on the {side}.",
    "questions": [
        {"name": "more", "text": "More parks?", "options": ["no", "maybe", "yes"], "ordered": True},
        {"name": "pay", "text": "Who pays?", "options": ["town", "state"], "humans": [0.5, 0.5], "respondents": 100},
    ],
}


class CountingScorer:
    """Opinions that depend on the person alone. Writes down whom it was asked about."""

    def __init__(self, checkpoint, survey, config):
        self.orders = [option_orders(len(q.options), config.orders, config.seed, q.name) for q in survey.questions]
        self._log, self._chunks = checkpoint.parent / "asked.txt", checkpoint.parent / "chunks.txt"

    def opinions(self, people):
        if self._chunks.exists():
            left = int(self._chunks.read_text())
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self._chunks.write_text(str(left - 1))
        with self._log.open("a") as log:
            log.writelines(f"{person.id}\n" for person in people)
        return [self._opinions(person) for person in people]

    def tokens_over(self, person):
        return 4 if person.id == "7" else 0

    def _opinions(self, person):
        if self.tokens_over(person):
            return [None] * len(self.orders)
        draw = np.random.default_rng(int(person.id))
        return [draw.dirichlet(np.ones(len(orders[0])), len(orders)) for orders in self.orders]


def job(folder: Path, **fields: object) -> Job:
    """The job whose staging folder is in `folder`, with margins to draw people from. `fields`: of the survey."""
    margins = folder / "margins.toml"
    margins.write_text("[margins.side]\nleft = 0.5\nright = 0.5\n")
    personas = {"reader": "margins", "path": str(margins)}
    config = SimulateConfig(personas=personas, n=PEOPLE, by=("side",), draws=100)
    section = {
        "survey": parse_survey({**SURVEY, **fields}, "survey").model_dump(mode="json"),
        "simulate": config.model_dump(mode="json"),
    }
    checkpoint = folder / "checkpoint"  # the card has its name
    checkpoint.mkdir(exist_ok=True)
    return Job("simulate", "k" * 64, "e", section, {"checkpoint": checkpoint}, folder / "staging", silent)


def simulate(folder: Path, **fields: object) -> Path:
    """Run the stage; the folder of its artifact. `fields`: of the survey."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulate_task, "OpinionScorer", CountingScorer)
        running = job(folder, **fields)
        simulate_task.simulate.work(running)
    return running.output("opinions")


if __name__ == "__main__":
    (Path(sys.argv[1]) / "chunks.txt").write_text(sys.argv[2])
    simulate(Path(sys.argv[1]))
    json.dump("not killed", sys.stdout)
