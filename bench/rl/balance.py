"""Cost of the gradient balance of stage 2: a balanced step compared with a plain one, interleaved.

    python bench/rl/balance.py [--repeats 7] [--widths 128 512] [--groups 15] [--kl 0]

Both learners use the same completions in a step (groups of 8, random ids with the lengths of rollouts), in
micro-batches of 16 rows. The balanced learner splits them by the sign of their advantage, so it may need one more
micro-batch (the numbers are printed, because with few micro-batches one more is expensive), holds two sums of gradients
and computes two norms. Prints medians over the repeats and their ratio, once with half of the completions right, once
with one in eight. With a KL term (--kl) the balance needs a second backward pass, because the term is outside of the
balance; its cost is then that of the pass.
"""

import statistics
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import numpy as np

from bench.measure import argument_parser, medians, time_interleaved
from configs.base import OptimizerConfig
from configs.model import ModelConfig
from configs.training import PolicyConfig, RolloutConfig
from data.chat_template import ParsedReply
from data.sources.reasoning_gym import Problem
from model.nautile import initialise, parameter_counts
from model.sharding import make_mesh
from rl.learner import Learner
from rl.objective_registry import Balance
from rl.rewards import advantages
from rl.rollouts import Group, Rollout

PROMPT, COMPLETION, VOCABULARY, ROWS = 32, 64, 2053, 16


def random_groups(right: int, of: int = 8, count: int = 8, seed: int = 0) -> list[Group]:
    """`count` groups of `of` completions, `right` of each rewarded."""
    rng = np.random.default_rng(seed)
    result = []
    for number in range(count):
        rewards = [float(member < right) for member in range(of)]
        rollouts = []
        prompt = rng.integers(0, VOCABULARY, PROMPT).tolist()
        for reward, advantage in zip(rewards, advantages(rewards), strict=True):
            ids = rng.integers(0, VOCABULARY, int(rng.integers(COMPLETION // 4, COMPLETION))).astype(np.int32)
            logprobs = -rng.random(len(ids)).astype(np.float32)
            rollouts.append(
                Rollout(prompt, ids, logprobs, False, ParsedReply("", "", True, True), "", reward, {}, advantage)
            )
        result.append(Group(number, Problem("random", number, "", "", ""), rollouts))
    return result


def update_and_wait(learner: Learner, batch: list[Group]) -> None:
    learner.update(batch)
    # JAX returns before the work is done.
    jax.block_until_ready(learner.trained)


def main() -> None:
    arguments = argument_parser(__doc__, repeats=7, widths=[128, 512], groups=15, kl=0.0).parse_args()
    # A constant rate, so that every timed update does the same work.
    policy = PolicyConfig(steps=1000, kl=arguments.kl, micro_rows=ROWS, optimizer=OptimizerConfig(schedule="constant"))
    rollout = RolloutConfig(prompts=arguments.groups, group=8, prompt_length=PROMPT, max_tokens=COMPLETION)
    for width in arguments.widths:
        model = ModelConfig(
            vocabulary=VOCABULARY, width=width, blocks=1, context=256, memory_heads=4, query_heads=4,
            attention_heads=4, kv_heads=2, feed_forward=width * 8 // 3, compute_dtype="float32", remat="none",
        )  # fmt: skip
        params = initialise(model, 0)
        modes = {"plain": None, "balanced": Balance(over="step")}
        learners = {name: Learner(model, policy, rollout, params, mode, make_mesh(1)) for name, mode in modes.items()}
        millions = sum(parameter_counts(model).values()) / 1e6
        for right in (4, 1):
            batch = random_groups(right, count=arguments.groups)
            calls = {name: partial(update_and_wait, learner, batch) for name, learner in learners.items()}
            timings = time_interleaved(calls, arguments.repeats)
            seconds = medians(timings)
            ratio = statistics.median(b / a for (a, _), (b, _) in zip(*timings.values(), strict=True))
            sides = [arguments.groups * count for count in (right, 8 - right)]
            batches = -(-sum(sides) // ROWS), sum(-(-side // ROWS) for side in sides)
            print(
                f"width {width}, {millions:.2f}M parameters, {right} of 8 right, KL {arguments.kl:g}: plain "
                f"{seconds['plain'] * 1e3:.0f} ms, balanced {seconds['balanced'] * 1e3:.0f} ms, ratio {ratio:.2f} "
                f"({batches[0]} micro-batches and {batches[1]})"
            )


if __name__ == "__main__":
    main()
