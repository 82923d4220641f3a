"""A tiny policy and groups of random completions, shared by the tests of this folder."""

from functools import cache

import numpy as np
import pytest

from nautile.configs.base import OptimizerConfig, TaskConfig
from nautile.configs.model import ModelConfig, TokenizerConfig
from nautile.configs.training import PolicyConfig
from nautile.data.chat_template import ParsedReply
from nautile.data.sources.reasoning_gym import Problem
from nautile.data.tokenizer import tokenizer_for
from nautile.model.nautile import initialise
from nautile.rl.learner import Learner
from nautile.rl.policy_gradient import LearnerProgram
from nautile.rl.rewards import advantages
from nautile.rl.rollouts import Group, Rollout

SUMS = (TaskConfig(name="chain_sum", parameters={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}),)
TOKENIZER = TokenizerConfig(ranks=300)


def policy(**changes) -> PolicyConfig:
    settings = {"steps": 4, "micro_rows": 4, "optimizer": OptimizerConfig(learning_rate=1e-3, schedule="constant")}
    return PolicyConfig(**{**settings, **changes})


def tiny_model() -> ModelConfig:
    return ModelConfig(
        vocabulary=TOKENIZER.vocabulary, width=32, blocks=1, pattern="SA", context=128,
        memory_heads=2, query_heads=2, chunk=8, attention_heads=2, kv_heads=1, feed_forward=40,
        compute_dtype="float32", remat="none",
    )  # fmt: skip


@pytest.fixture(scope="session")
def model() -> ModelConfig:
    return tiny_model()


@pytest.fixture(scope="session")
def params(model):
    return initialise(model, 0)


@pytest.fixture(scope="session")
def tokenizer():
    return tokenizer_for(TOKENIZER)


# What the compiled gradients do not depend on. They are given the defaults, so a test that depends on one would fail.
# (`steps` and `inner_epochs` set the length of a learning rate's schedule, which is constant here.)
NOT_COMPILED = (
    "advantage", "aggregate", "group_weights", "mask_truncated", "ratio", "sync_every", "skip_limit", "refill",
    "save_every", "inner_epochs",
)  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def shared_programs():
    """Learners of equal settings share what they compile: tracing it is most of what a learner costs."""
    program, updates, initialise = cache(LearnerProgram), {}, Learner.__init__

    def shared(model, config, rollout, apart, mesh, tapered):
        defaults = {"steps": 1} | {name: PolicyConfig.model_fields[name].default for name in NOT_COMPILED}
        defaults |= {name: field.default for name, field in PolicyConfig.model_fields.items() if "guard" in name}
        return program(model, config.model_copy(update=defaults), rollout, apart, mesh, tapered)

    def sharing(learner, *arguments):
        initialise(learner, *arguments)
        compiled = updates.setdefault((learner.program, learner.balance), (learner._apply, learner._add_balanced_group))
        learner._apply, learner._add_balanced_group = compiled

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nautile.rl.learner.LearnerProgram", shared)
        patch.setattr(Learner, "__init__", sharing)
        yield


def group(rewards, seed: int = 0, longest: int = 9) -> Group:
    """One group whose completions are random ids, with the advantages of `rewards`."""
    rng = np.random.default_rng(seed)
    problem = Problem("chain_sum", seed, "1 + 1?", "2", "")
    rollouts = []
    for reward, advantage in zip(rewards, advantages(rewards), strict=True):
        length = int(rng.integers(2, longest))
        rollouts.append(
            Rollout(
                prompt_ids=rng.integers(0, 300, 5).tolist(),
                ids=rng.integers(0, 300, length).astype(np.int32),
                logprobs=-rng.random(length).astype(np.float32),
                truncated=False,
                reply=ParsedReply("", "2", True, True),
                text="2",
                reward=reward,
                advantage=advantage,
            )
        )
    return Group(seed, problem, rollouts)
