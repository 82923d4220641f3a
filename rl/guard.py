"""The guard: accuracy on problems that training never sees, to keep a run's best policy and to stop when it falls.

The guard split is apart from the training split and from everything that is evaluated. Every reading asks the same
problems, so two policies are compared by McNemar's exact test on the problems whose outcome differs: far fewer of
those are needed than for two intervals apart. A policy has fallen when two readings in a row are worse than the best
one. One reading is not enough, for the best of many readings was lucky as well (tests/rl/test_guard.py has the rates).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from configs.training import RolloutConfig
from data.chat_template import encode_prompt, parse_completion
from data.tokenizer import tokenizer_for
from evals.scoring.intervals import paired
from model.layers.common import Params
from model.nautile import shapes
from model.processes import arrays_of_first, on_first
from model.sharding import whole_on_hosts
from model.weights.files import load_weights, save_weights
from rl.rewards import verifiable
from rl.rollouts import generator
from rl.stage_inputs import StageInputs

LEVEL = 0.01  # a reading is worse than the best one below this probability, two-sided
IN_A_ROW = 2  # worse readings that end a run, or send it back


@dataclass(frozen=True)
class GuardReading:
    """Greedy outcomes on the guard problems after `step` updates: "1" for each solved problem, "0" for each other.

    `p`: McNemar's exact test against the best reading before, if this one solves fewer; else None. `went_back`: the run
    restored its best policy after this reading.
    """

    step: int
    outcomes: str
    p: float | None = None
    went_back: bool = False

    @property
    def correct(self) -> int:
        return self.outcomes.count("1")

    @property
    def accuracy(self) -> float:
        return self.correct / len(self.outcomes)

    def row(self) -> dict[str, Any]:
        """What a manifest says of it."""
        fields = {"step": self.step, "correct": self.correct, "n": len(self.outcomes), "p": self.p}
        return {**fields, "went_back": self.went_back, "outcomes": self.outcomes}


def best_of(readings: Sequence[GuardReading]) -> GuardReading:
    """The reading with most problems solved; the later of equals, which is trained longer."""
    return max(readings, key=lambda reading: (reading.correct, reading.step))


def compared(step: int, outcomes: str, earlier: Sequence[GuardReading]) -> GuardReading:
    """The reading of these outcomes, tested against the best of the earlier ones."""
    reading = GuardReading(step, outcomes)
    if not earlier or reading.correct >= best_of(earlier).correct:
        return reading
    return replace(reading, p=paired([*map(int, best_of(earlier).outcomes)], [*map(int, outcomes)]).p)


def has_fallen(readings: Sequence[GuardReading]) -> bool:
    """Whether the last readings in a row were all worse than the best one, and none led to a return."""
    last = readings[-IN_A_ROW:]
    return len(last) == IN_A_ROW and all(r.p is not None and r.p < LEVEL and not r.went_back for r in last)


class Guard:
    """Measures the policy and keeps the best one in `folder`, on disk, so that a resumed run has it as well.

    Of several processes each samples its share, and the first one grades and keeps the folder.
    """

    def __init__(self, inputs: StageInputs, rollout: RolloutConfig, folder: Path, mesh: Mesh) -> None:
        self.inputs, self.folder, self.mesh = inputs, folder, mesh
        self._tokenizer = tokenizer_for(inputs.tokenizer)
        greedy = rollout.model_copy(update={"temperature": 0.0})
        self._generate = generator(inputs.model, self._tokenizer, greedy, mesh)
        self.readings: list[GuardReading] = []

    def read(self, params: Params, step: int) -> GuardReading:
        """Measure, and keep these parameters if none before were better. Reading a step again changes nothing."""
        problems = self.inputs.guard_problems
        prompts = [encode_prompt(self._tokenizer, problem.question) for problem in problems]
        completions = self._generate(params, prompts, [(0, index) for index in range(len(prompts))])

        def grade() -> str:
            replies = [parse_completion(self._tokenizer, completion.ids) for completion in completions]
            solved = [verifiable(p, reply) == 1.0 for p, reply in zip(problems, replies, strict=True)]
            return "".join("1" if right else "0" for right in solved)

        earlier = [reading for reading in self.readings if reading.step < step]
        reading = compared(step, on_first(grade), earlier)
        self.readings = [*earlier, reading]
        if self.best == reading:
            whole = whole_on_hosts(params, self.mesh)
            if jax.process_index() == 0:
                save_weights(self.folder, whole, self.inputs.model, self.inputs.tokenizer)
        return reading

    @property
    def best(self) -> GuardReading:
        return best_of(self.readings)

    def fell(self) -> bool:
        """Whether the policy has fallen, and the run has not gone back since."""
        return has_fallen(self.readings)

    @property
    def returns(self) -> int:
        """How often the run restored its best policy."""
        return sum(reading.went_back for reading in self.readings)

    def go_back(self) -> Params:
        """Mark the last reading as fallen; returns the best policy."""
        self.readings[-1] = replace(self.readings[-1], went_back=True)
        return self.best_params()

    def best_params(self) -> Params:
        """The best policy, in the memory of every process."""
        if jax.process_index() == 0:
            return arrays_of_first(load_weights(self.folder)[0])
        return arrays_of_first(jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes(self.inputs.model)))
