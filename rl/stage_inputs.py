"""Inputs of the stages align, reason and self_distill: a checkpoint, the training problems and the guard problems."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from nautile.configs.model import ModelConfig, TokenizerConfig
from nautile.configs.training import PolicyConfig, ProblemsConfig, RolloutConfig
from nautile.data.chat_template import encode_prompt
from nautile.data.screening.contamination import load_contamination_index
from nautile.data.sources.reasoning_gym import Problem
from nautile.data.tokenizer import tokenizer_for
from nautile.model.layers.common import Params
from nautile.model.weights.files import load_weights
from nautile.rl.problems import ProblemScreen, Unanswered, load, load_guard


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
    rollout: RolloutConfig,
    policy: PolicyConfig | None,
    seed: int,
    unanswered: Unanswered = "refuse",
    guarded_by: ProblemsConfig | None = None,
) -> tuple[Params, StageInputs, ProblemScreen]:
    """Load a stage's inputs: the parameters of `inputs["checkpoint"]`, the rest, and the screen with its rejections.

    Problems that overlap the benchmarks in `inputs["questions"]` are left out; without that input nothing is. `policy`
    None: no guard problems. `unanswered`: what to do with training problems without an answer; guard problems always
    have one, and are those of `guarded_by` (None: of `problems`). `seed`: of the training problems; the guard problems
    are the same with all seeds.
    """
    params, model, tokenizer = load_weights(inputs["checkpoint"])
    encoder = tokenizer_for(tokenizer)

    def fits(prompt: str) -> bool:
        return len(encode_prompt(encoder, prompt)) <= rollout.prompt_length

    screen = ProblemScreen(load_contamination_index(inputs.get("questions")))
    training = load(problems, seed, "train", screen, unanswered, fits)
    guard = load_guard(guarded_by or problems, policy, screen, fits) if policy else []
    return params, StageInputs(model, tokenizer, training, guard), screen


def on_device(params: Params) -> Params:
    """Parameters as JAX arrays on the default device."""
    return jax.tree.map(jax.numpy.asarray, params)
