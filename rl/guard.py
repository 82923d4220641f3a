"""The guard: accuracy on problems that training never sees, so that a run keeps its best policy and stops a bad turn.

The guard split is apart from the training split and from everything that is evaluated.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jax.sharding import Mesh

from configs.model import ModelConfig, TokenizerConfig
from configs.training import RolloutConfig
from data.chat_template import encode_prompt, parse_completion
from data.sources.reasoning_gym import Problem
from data.tokenizer import tokenizer_for
from evals.scoring.intervals import wilson
from model.decoding.generate import Generator
from model.decoding.sampling import Sampling
from model.layers.common import Params
from model.weights.files import load_weights, save_weights
from rl.rewards import verifiable


@dataclass(frozen=True)
class GuardReading:
    """Greedy accuracy on the guard problems after `step` updates, with its 95 % Wilson interval.

    `went_back`: it was so low that the run went back to the best policy before it.
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
    """Measures, remembers and keeps the best on disk in `folder`, so that a resumed run knows it too."""

    def __init__(
        self,
        model: ModelConfig,
        tokenizer: TokenizerConfig,
        rollout: RolloutConfig,
        problems: Sequence[Problem],
        folder: Path,
        mesh: Mesh | None = None,
    ) -> None:
        self.model, self.tokenizer, self.problems, self.folder = model, tokenizer, problems, folder
        self._words = tokenizer_for(tokenizer)
        sampling = Sampling(
            max_tokens=rollout.max_tokens,
            temperature=0.0,
            stop_ids=(self._words.im_end, self._words.end_of_text),
            think_end=self._words.think_end,
            thinking_budget=rollout.thinking_budget,
        )
        self._generate = Generator(model, sampling, rollout.prompts * rollout.group, rollout.prompt_length, mesh)
        self.readings: list[GuardReading] = []

    def read(self, params: Params, step: int) -> GuardReading:
        """Measure, and keep these parameters if none before were better. Reading a step again changes nothing."""
        prompts = [encode_prompt(self._words, problem.question) for problem in self.problems]
        completions = self._generate(params, prompts, [(0, index) for index in range(len(prompts))])
        replies = [parse_completion(self._words, completion.ids) for completion in completions]
        correct = sum(verifiable(p, reply) == 1.0 for p, reply in zip(self.problems, replies, strict=True))
        reading = GuardReading(step, correct, len(self.problems))
        self.readings = [*(r for r in self.readings if r.step < step), reading]
        if self.best == reading:
            save_weights(self.folder, params, self.model, self.tokenizer)
        return reading

    @property
    def best(self) -> GuardReading:
        """The best reading; the later of equals, for it has seen more."""
        return max(self.readings, key=lambda r: (r.correct, r.step))

    def fell(self) -> bool:
        """Whether the last reading lies under the interval of the best one."""
        return self.readings[-1].accuracy < self.best.interval[0]

    @property
    def returns(self) -> int:
        """How often the run went back."""
        return sum(reading.went_back for reading in self.readings)

    def go_back(self) -> Params:
        """Mark the last reading as the one to turn back from, and give the best policy."""
        self.readings[-1] = replace(self.readings[-1], went_back=True)
        return self.best_params()

    def best_params(self) -> Params:
        return load_weights(self.folder)[0]
