"""The guard: validation accuracy during reinforcement, to save the best policy and to stop or roll back when it drops.

The guard problems are a split of their own, disjoint from the training problems and from all benchmarks. Every reading
uses the same problems, so two policies can be compared by McNemar's exact test on the problems whose outcome differs,
which needs far fewer problems than separate confidence intervals. A policy "has fallen" when two readings in a row are
significantly worse than the best one. One reading is not enough, because the maximum of many readings is biased upwards
(tests/rl/test_guard.py measures the error rates).
"""

import shutil
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from nautile.configs.training import RolloutConfig
from nautile.data.chat_template import encode_prompt, parse_completion
from nautile.data.tokenizer import tokenizer_for
from nautile.evals.scoring.intervals import paired
from nautile.model.layers.common import Params
from nautile.model.nautile import shapes
from nautile.model.processes import arrays_of_first, on_first
from nautile.model.sharding import whole_on_hosts
from nautile.model.weights.files import load_weights, save_weights
from nautile.rl.rewards import verifiable
from nautile.rl.rollouts import generator
from nautile.rl.stage_inputs import StageInputs

NOT_GRADED = "-"  # the outcome of a problem whose reply could not be graded
LEVEL = 0.01  # significance level of the two-sided test against the best reading
IN_A_ROW = 2  # consecutive worse readings that stop a run or roll it back
CHECKPOINTS = 3  # from which a run may resume: two are kept, and a third is being written


@dataclass(frozen=True)
class GuardReading:
    """Outcomes of greedy decoding on the guard problems after `step` updates: "1" for solved, "0" for not solved.

    A reply that could not be graded is `NOT_GRADED`: it counts neither way. `p`: p-value of McNemar's exact test
    against the best earlier reading on the problems that both graded, if this one solves fewer of them; else None.
    `went_back`: the run rolled back to its best policy after this reading.
    """

    step: int
    outcomes: str
    p: float | None = None
    went_back: bool = False

    @property
    def correct(self) -> int:
        return self.outcomes.count("1")

    @property
    def graded(self) -> int:
        return len(self.outcomes) - self.outcomes.count(NOT_GRADED)

    @property
    def accuracy(self) -> float | None:
        """The share solved of the problems whose replies were graded; None if none was."""
        return self.correct / self.graded if self.graded else None

    def row(self) -> dict[str, Any]:
        """The reading as a row of the checkpoint's manifest."""
        fields = {"step": self.step, "correct": self.correct, "n": self.graded, "p": self.p}
        return {**fields, "went_back": self.went_back, "outcomes": self.outcomes}


def best_of(readings: Sequence[GuardReading]) -> GuardReading:
    """The reading with the largest share of solved problems; of equal ones the latest, which is trained longer."""
    return max(readings, key=lambda reading: (-1.0 if reading.accuracy is None else reading.accuracy, reading.step))


def compare_reading(step: int, outcomes: str, earlier: Sequence[GuardReading]) -> GuardReading:
    """Make the reading of these outcomes and test it against the best of the earlier ones."""
    reading = GuardReading(step, outcomes)
    if not earlier:
        return reading
    both = [
        (int(a), int(b)) for a, b in zip(best_of(earlier).outcomes, outcomes, strict=True) if NOT_GRADED not in (a, b)
    ]
    best, own = [a for a, _ in both], [b for _, b in both]
    # Only the problems with different outcomes count: many that both solve say nothing about the difference.
    return replace(reading, p=paired(best, own).p) if sum(own) < sum(best) else reading


def has_fallen(readings: Sequence[GuardReading]) -> bool:
    """Whether the last `IN_A_ROW` readings were all worse than the best one, with no roll-back since."""
    last = readings[-IN_A_ROW:]
    return len(last) == IN_A_ROW and all(r.p is not None and r.p < LEVEL and not r.went_back for r in last)


class Guard:
    """Measures the policy on the guard problems, and saves the best one in `folder`, so that a resumed run has it.

    A policy is saved under the number of its step, and removed when neither the readings nor those of a checkpoint have
    it as the best: a run that is killed and resumed must find the best policy of its checkpoint, not a later one.

    In a run of several processes each one samples its share, and the first one grades and writes the folder.
    """

    def __init__(self, inputs: StageInputs, rollout: RolloutConfig, folder: Path, mesh: Mesh) -> None:
        self.inputs, self.folder, self.mesh = inputs, folder, mesh
        self._tokenizer = tokenizer_for(inputs.tokenizer)
        # Greedy decoding has no sampling noise, so a difference is one of the policies.
        greedy = rollout.model_copy(update={"temperature": 0.0})
        self._generate = generator(inputs.model, self._tokenizer, greedy, mesh)
        self.readings: list[GuardReading] = []
        # Steps of the policies that the checkpoints have as the best, and of those that an earlier attempt left here.
        self._of_checkpoints: deque[int] = deque(maxlen=CHECKPOINTS)
        self._left: set[int] = self._saved_steps()

    def read(self, params: Params, step: int) -> GuardReading:
        """Measure `params`, and save them if no earlier reading is better. A step can be read again."""
        problems = self.inputs.guard_problems
        prompts = [encode_prompt(self._tokenizer, problem.question) for problem in problems]
        completions = self._generate(params, prompts, [(0, index) for index in range(len(prompts))])

        def grade() -> str:
            replies = [parse_completion(self._tokenizer, completion.ids) for completion in completions]
            rewards = [verifiable(problem, reply) for problem, reply in zip(problems, replies, strict=True)]
            return "".join(NOT_GRADED if reward is None else str(int(reward)) for reward in rewards)

        # A resumed run may have readings of steps that it repeats: they are replaced.
        earlier = [reading for reading in self.readings if reading.step < step]
        reading = compare_reading(step, on_first(grade), earlier)
        self.readings = [*earlier, reading]
        # Saved before the checkpoint of the step. A run killed in between repeats the step, and with it this reading.
        if self.best == reading:
            whole = whole_on_hosts(params, self.mesh)
            if jax.process_index() == 0:
                save_weights(self.folder / str(step), whole, self.inputs.model, self.inputs.tokenizer)
                self._remove_others()
        return reading

    def checkpointed(self) -> None:
        """Keep the best policy for as long as the run may resume from the checkpoint that is saved now."""
        self._of_checkpoints.append(self.best.step)
        if len(self._of_checkpoints) == CHECKPOINTS:  # the earlier attempt's checkpoints are gone by now
            self._left = set()

    @property
    def best(self) -> GuardReading:
        return best_of(self.readings)

    def has_fallen(self) -> bool:
        """Whether the policy has fallen, and the run has not rolled back since."""
        return has_fallen(self.readings)

    @property
    def roll_backs(self) -> int:
        """How often the run rolled back to its best policy."""
        return sum(reading.went_back for reading in self.readings)

    def roll_back(self) -> Params:
        """Record a roll-back in the last reading; returns the best policy."""
        self.readings[-1] = replace(self.readings[-1], went_back=True)
        return self.best_params()

    def best_params(self) -> Params:
        """The parameters of the best policy, in the host memory of every process."""
        if jax.process_index() == 0:
            return arrays_of_first(load_weights(self.folder / str(self.best.step))[0])
        # The other processes pass arrays of the same shapes and receive the values of the first.
        return arrays_of_first(jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes(self.inputs.model)))

    def _saved_steps(self) -> set[int]:
        return {int(path.name) for path in self.folder.glob("*") if path.name.isdigit()}

    def _remove_others(self) -> None:
        """Remove the policies that neither the readings nor a checkpoint have as the best."""
        for step in self._saved_steps() - {self.best.step, *self._of_checkpoints, *self._left}:
            shutil.rmtree(self.folder / str(step))
