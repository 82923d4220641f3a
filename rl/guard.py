"""The guard: accuracy on problems that training never sees, to keep a run's best policy and to stop when it falls.

The guard split is apart from the training split and from everything that is evaluated.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from jax.sharding import Mesh

from configs.training import RolloutConfig
from data.chat_template import encode_prompt, parse_completion
from data.tokenizer import tokenizer_for
from evals.scoring.intervals import wilson
from model.decoding.generate import Generator
from model.decoding.sampling import Sampling
from model.layers.common import Params
from model.weights.files import load_weights, save_weights
from rl.rewards import verifiable
from rl.stage_inputs import StageInputs


@dataclass(frozen=True)
class GuardReading:
    """Greedy accuracy on the guard problems after `step` updates, with its 95 % Wilson interval.

    `went_back`: it was so low that the run restored the best policy before it.
    """

    step: int
    correct: int
    n: int
    went_back: bool = False

    @property
    def accuracy(self) -> float:
        return self.correct / self.n

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.correct, self.n)


class Guard:
    """Measures the policy and keeps the best one in `folder`, on disk, so that a resumed run has it as well."""

    def __init__(self, inputs: StageInputs, rollout: RolloutConfig, folder: Path, mesh: Mesh | None = None) -> None:
        self.inputs, self.folder = inputs, folder
        self._tokenizer = tokenizer_for(inputs.tokenizer)
        sampling = Sampling(
            max_tokens=rollout.max_tokens,
            temperature=0.0,
            stop_ids=(self._tokenizer.im_end, self._tokenizer.end_of_text),
            think_end=self._tokenizer.think_end,
            thinking_budget=rollout.thinking_budget,
        )
        self._generate = Generator(inputs.model, sampling, rollout.prompts * rollout.group, rollout.prompt_length, mesh)
        self.readings: list[GuardReading] = []

    def read(self, params: Params, step: int) -> GuardReading:
        """Measure, and keep these parameters if none before were better. Reading a step again changes nothing."""
        problems = self.inputs.guard_problems
        prompts = [encode_prompt(self._tokenizer, problem.question) for problem in problems]
        completions = self._generate(params, prompts, [(0, index) for index in range(len(prompts))])
        replies = [parse_completion(self._tokenizer, completion.ids) for completion in completions]
        correct = sum(verifiable(p, reply) == 1.0 for p, reply in zip(problems, replies, strict=True))
        reading = GuardReading(step, correct, len(problems))
        self.readings = [*(r for r in self.readings if r.step < step), reading]
        if self.best == reading:
            save_weights(self.folder, params, self.inputs.model, self.inputs.tokenizer)
        return reading

    @property
    def best(self) -> GuardReading:
        """The best reading; the later of equals, which is trained longer."""
        return max(self.readings, key=lambda r: (r.correct, r.step))

    def fell(self) -> bool:
        """Whether the last reading is below the interval of the best one."""
        return self.readings[-1].accuracy < self.best.interval[0]

    @property
    def returns(self) -> int:
        """How often the run restored its best policy."""
        return sum(reading.went_back for reading in self.readings)

    def go_back(self) -> Params:
        """Mark the last reading as fallen; returns the best policy."""
        self.readings[-1] = replace(self.readings[-1], went_back=True)
        return self.best_params()

    def best_params(self) -> Params:
        return load_weights(self.folder)[0]
