"""The inputs of the reinforcement stages, and the rollout engine, which samples groups of completions of prompts.

Training uses the sampled ids and their log-probabilities. The text is decoded from them for graders, judges and readers
only, and is never tokenised again. A sample is determined by (seed, draw, position of the problem, member of the
group), so a resumed run samples the same completions.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from nautile.common.errors import ConfigError
from nautile.common.files import append_durably, write_atomically
from nautile.configs.model import ModelConfig, TokenizerConfig
from nautile.configs.training import PolicyConfig, ProblemsConfig, RolloutConfig
from nautile.data.chat_template import ParsedReply, encode_prompt, parse_completion
from nautile.data.screening.contamination import load_contamination_index
from nautile.data.sources.reasoning_gym import Problem
from nautile.data.tokenizer import Tokenizer, tokenizer_for
from nautile.model.decoding.generate import Generator, SharedGenerator
from nautile.model.decoding.sampling import Sampling
from nautile.model.layers.common import Params
from nautile.model.program_thread import working_seconds
from nautile.model.weights.files import load_weights
from nautile.rl.problems import ProblemScreen, Unanswered, load, load_guard
from nautile.rl.rewards import Score, sampled_reply, verifiable

# Of a problem, beside those that a row has anyway: what another reward needs.
PROBLEM_FIELDS = ("index", "kind", "options", "rationale", "origin")


@dataclass
class Rollout:
    """One completion of a prompt. `reward` and `advantage` are None until set, and stay None without a score.

    `ids` and `logprobs`: [tokens], as sampled. `truncated`: cut off at `max_tokens`. `parts`: the values that the
    reward was computed from. `forced`: index of the id that the thinking budget inserted instead of sampling it.
    """

    prompt_ids: list[int]
    ids: np.ndarray
    logprobs: np.ndarray
    truncated: bool
    reply: ParsedReply
    text: str
    reward: float | None = None
    parts: dict[str, Any] = field(default_factory=dict)
    advantage: float | None = None
    forced: int | None = None


@dataclass
class Group:
    """The completions of one problem. `position`: of the problem in the run's order."""

    position: int
    problem: Problem
    rollouts: list[Rollout]

    def trained(self, mask_truncated: bool = False) -> list[Rollout]:
        """The rollouts that an update takes: those with an advantage; `mask_truncated`: of these, those not cut off."""
        return [r for r in self.rollouts if r.advantage is not None and not (mask_truncated and r.truncated)]

    def row(self, member: int) -> dict[str, Any]:
        """The row of one rollout in a JSON-lines log."""
        rollout = self.rollouts[member]
        return {
            "task": self.problem.task,
            "question": self.problem.question,
            "expected": self.problem.answer or None,
            "text": rollout.text,
            "prompt_ids": rollout.prompt_ids,
            "ids": rollout.ids.tolist(),
            "logprobs": [round(float(x), 6) for x in rollout.logprobs],
            "reward": rollout.reward,
            "parts": rollout.parts,
            "advantage": rollout.advantage,
            "length": len(rollout.ids),
            "truncated": rollout.truncated,
            "forced": rollout.forced,
            "problem": {name: value for name in PROBLEM_FIELDS if (value := getattr(self.problem, name))},
        }

    @classmethod
    def of_rows(cls, position: int, rows: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> "Group":
        """The group of some rows of a log, without rewards; of an earlier version's row the problem is as it shows."""
        row, rollouts = rows[0], []
        fields = {name: value for name, value in row.get("problem", {}).items() if name in PROBLEM_FIELDS}
        fields = {"index": 0, "rationale": ""} | fields | {"options": tuple(fields.get("options", ()))}
        problem = Problem(task=row["task"], question=row["question"], answer=row["expected"] or "", **fields)
        for each in rows:
            ids, logprobs = np.array(each["ids"], np.int32), np.array(each["logprobs"], np.float32)
            reply = parse_completion(tokenizer, ids)
            rollouts.append(Rollout(each["prompt_ids"], ids, logprobs, each["truncated"], reply, each["text"]))
        return cls(position, problem, rollouts)


def generator(model: ModelConfig, tokenizer: Tokenizer, config: RolloutConfig, mesh: Mesh | None) -> SharedGenerator:
    """The generator of a stage's completions, `prompts` x `group` at a time over all devices of the mesh."""
    sampling = Sampling(
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        stop_ids=(tokenizer.im_end, tokenizer.end_of_text),
        think_end=tokenizer.think_end,
        thinking_budget=config.thinking_budget,
    )
    rows = config.prompts * config.group
    return SharedGenerator(lambda rows, own: Generator(model, sampling, rows, config.prompt_length, own), rows, mesh)


class RolloutEngine:
    """Samples groups of completions; compiles once for each of a few batch shapes. `tokens`, `seconds`: totals of
    sampling.
    """

    def __init__(
        self, model: ModelConfig, tokenizer: Tokenizer, config: RolloutConfig, seed: int, mesh: Mesh | None = None
    ) -> None:
        self.config, self.tokenizer, self.seed = config, tokenizer, seed
        self.tokens, self.seconds = 0, 0.0
        rows = config.prompts * config.group
        if mesh is not None and rows % mesh.size:
            raise ConfigError(
                f"rollout.prompts x rollout.group is {rows} completions at once, which is not a multiple of the "
                f"{mesh.size} devices of this run"
            )
        self._generate = generator(model, tokenizer, config, mesh)

    def check(self, problems: Sequence[Problem]) -> None:
        """Raise `ConfigError` if the prompt of a problem has more than `rollout.prompt_length` tokens."""
        for problem in problems:
            length = len(encode_prompt(self.tokenizer, problem.question))
            if length > self.config.prompt_length:
                raise ConfigError(
                    f"rollout.prompt_length is {self.config.prompt_length}, but {problem.task} #{problem.index} has a "
                    f"prompt of {length} tokens; raise it, or remove the task"
                )

    def sample(self, params: Params, problems: Sequence[tuple[int, Problem]], draw: int) -> list[Group]:
        """Sample a group for each (position, problem). `draw`: number of the draw in the run; it seeds the samples."""
        start_time = working_seconds()
        prompts = [encode_prompt(self.tokenizer, problem.question) for _, problem in problems]
        # The members of a group are adjacent; the generator computes their common prompt once.
        rows = [ids for ids in prompts for _ in range(self.config.group)]
        seeds = [(self.seed, draw, position, member) for position, _ in problems for member in range(self.config.group)]
        rollouts = [
            Rollout(
                prompt_ids=ids,
                ids=completion.ids,
                logprobs=completion.logprobs,
                truncated=completion.truncated,
                reply=parse_completion(self.tokenizer, completion.ids),
                text=self.tokenizer.decode(completion.ids),
                forced=completion.forced,
            )
            for ids, completion in zip(rows, self._generate(params, rows, seeds), strict=True)
        ]
        # Compilation is excluded by the clock, so the first draw does not distort the speed.
        self.tokens += sum(len(rollout.ids) for rollout in rollouts)
        self.seconds += working_seconds() - start_time
        size = self.config.group
        return [Group(*problem, rollouts[i * size : (i + 1) * size]) for i, problem in enumerate(problems)]


def score_groups(groups: Sequence[Group], score: Score | None) -> list[list[float | None]]:
    """Set the reward of every rollout, in one call of `score`; returns the strict grader's verdicts by group.

    `score` None: the verdict is the reward.
    """
    verdicts = [[verifiable(group.problem, rollout.reply) for rollout in group.rollouts] for group in groups]
    rollouts = [(group.problem, rollout) for group in groups for rollout in group.rollouts]
    if score is None:
        rewards = [verdict for of_group in verdicts for verdict in of_group]
    else:
        rewards = score([(problem, sampled_reply(r.reply, len(r.ids), r.truncated)) for problem, r in rollouts])
    for (_, rollout), reward in zip(rollouts, rewards, strict=True):
        rollout.reward = reward
    return verdicts


def append_rows(log: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Append rows to a JSON-lines log and fsync it, so that a checkpoint saved afterwards never has more steps."""
    append_durably(log, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())


def truncate_log(log: Path, steps: int) -> None:
    """Truncate a JSON-lines log to the rows of the first `steps` steps; an incomplete last line is removed too."""
    if not log.exists():
        return
    complete_lines = []
    # Bytes, because an incomplete line may end within a character. Iterate over the file, not over `splitlines`: a
    # completion may contain a line separator other than a line feed.
    with log.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n") or json.loads(line)["step"] >= steps:
                break
            complete_lines.append(line)
    write_atomically(log, b"".join(complete_lines), create_folder=False)


@dataclass(frozen=True)
class StageInputs:
    """The model, its tokenizer and the problems. Parameters are passed separately: training replaces them."""

    model: ModelConfig
    tokenizer: TokenizerConfig
    problems: Sequence[Problem]
    guard_problems: Sequence[Problem] = ()


def load_inputs(
    inputs: Mapping[str, Path],
    problems: ProblemsConfig,
    rollout: RolloutConfig | None,
    policy: PolicyConfig | None,
    seed: int,
    unanswered: Unanswered = "refuse",
    guarded_by: ProblemsConfig | None = None,
) -> tuple[Params, StageInputs, ProblemScreen]:
    """Load a stage's inputs: the parameters of `inputs["checkpoint"]`, the rest, and the screen with its rejections.

    Problems that overlap the benchmarks in `inputs["questions"]` are left out; without that input nothing is. `policy`
    None: no guard problems; they are those of `guarded_by` (None: of `problems`), have an answer, and are the same with
    every `seed`. `rollout` None: prompts of any length. `unanswered`: what to do with training problems without an
    answer.
    """
    params, model, tokenizer = load_weights(inputs["checkpoint"])
    encoder = tokenizer_for(tokenizer)

    def fits(prompt: str) -> bool:
        return rollout is None or len(encode_prompt(encoder, prompt)) <= rollout.prompt_length

    screen = ProblemScreen(load_contamination_index(inputs.get("questions")))
    training = load(problems, seed, "train", screen, unanswered, fits)
    guard = load_guard(guarded_by or problems, policy, screen, fits) if policy else []
    return params, StageInputs(model, tokenizer, training, guard), screen


def on_device(params: Params) -> Params:
    """Parameters as JAX arrays on the default device."""
    return jax.tree.map(jax.numpy.asarray, params)
