"""Rollouts and a whole reason step of this checkout against another one, in turns.

    git worktree add /tmp/before COMMIT
    python bench/rl/rollouts.py /tmp/before [--settings table1 long] [--prompts 0] [--repeats 3] [--json FILE]

`table1` is the reason stage of `bench/rl/table1.toml`: 32 prompts by 8, prompts and completions of up to 48 tokens.
`long` is the same with 16 prompts and completions of up to 768. The model is untrained and would never stop, so each
sample is stopped at a length of its own, the same in both checkouts: the first of its random numbers picks it from the
lengths of the problems' own solutions (`table1`), or from a lognormal distribution with a median of 64 tokens and σ = 1
(`long`). A reason step is rollouts, rewards (the share of even ids, so that groups carry a signal) and the balanced
update.

The first step of a checkout compiles and is not counted; the others repeat its draw, at a learning rate that changes
nothing, so that all do the same work. Two processes take turns; medians, with CPU time because the machine may be
shared. Each step is printed as it ends, and each setting is added to FILE as it ends: the settings may be run apart.
"""

import argparse
import importlib
import inspect
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from measure import options, write_results

ROOT = Path(__file__).parents[2]
LONG_TOKENS, LONG_CONTEXT = 768, 1024
QUANTILES = 4096
PROMPTS = {"table1": 32, "long": 16}


def stop_at_lengths(lengths: list[int], stop: int) -> None:
    """Make every sample end with `stop` at one of `lengths` that its first random number picks."""
    import jax.numpy as jnp

    from model.decoding import sampling

    table, draw, uniforms = jnp.asarray(sorted(lengths)), sampling.draw, sampling.uniforms

    def marked(keys_B2: Any, count: int) -> Any:
        numbers_BT = uniforms(keys_B2, count)
        last_B = table[(numbers_BT[:, 0] * len(lengths)).astype(int)] - 1
        return jnp.where(jnp.arange(count) == last_B[:, None], 2.0, numbers_BT)

    def stopping(logits_BV: Any, uniform_B: Any, settings: Any) -> Any:
        return jnp.where(uniform_B > 1, stop, draw(logits_BV, uniform_B, settings))

    for name in ("generate", "lane"):
        try:
            module = importlib.import_module(f"model.decoding.{name}")
        except ModuleNotFoundError:  # a checkout from before there were lanes
            continue
        if hasattr(module, "draw"):
            module.draw, module.uniforms = stopping, marked


def serve(setting: str, prompts: int) -> None:
    """The worker: a step for each line of standard input, what it took as JSON on standard output."""
    import jax
    import numpy as np

    from configs.load import load
    from data.tokenizer import tokenizer_for
    from model.nautile import initialise
    from model.sharding import make_mesh
    from rl import objectives
    from rl.learner import Learner
    from rl.rewards import advantages
    from rl.rollouts import RolloutEngine

    try:
        from rl.problems.load import load as load_problems
    except ModuleNotFoundError:  # a checkout in which the problems are one file
        from rl.problems import load as load_problems

    config = load(ROOT / "bench" / "rl" / "table1.toml")
    model, rollout, tokenizer = config.model, config.reason.rollout, tokenizer_for(config.tokenizer)
    rollout = rollout.model_copy(update={"prompts": prompts})
    asked = load_problems(config.reason.problems.model_copy(update={"count": 4 * prompts}), 1)
    if setting == "long":
        model = model.model_copy(update={"context": LONG_CONTEXT})
        rollout = rollout.model_copy(update={"max_tokens": LONG_TOKENS})
        normal = statistics.NormalDist()
        tail = [64 * np.exp(normal.inv_cdf((i + 0.5) / QUANTILES)) for i in range(QUANTILES)]
        lengths = [int(min(max(2, length), LONG_TOKENS)) for length in tail]
    else:
        texts = [tokenizer.encode(p.rationale) + tokenizer.encode(f"\n{p.answer}\n") for p in asked]
        lengths = [min(len(ids) + 2, rollout.max_tokens) for ids in texts]  # with the ends of thinking and of the turn
    stop_at_lengths(lengths, tokenizer.im_end)
    mesh, length = make_mesh(1), rollout.prompt_length + rollout.max_tokens
    engine = RolloutEngine(model, tokenizer, rollout, 1, mesh)
    optimizer = config.reason.policy.optimizer.model_copy(update={"learning_rate": 1e-12})
    policy = config.reason.policy.model_copy(update={"optimizer": optimizer})
    params, balance = initialise(model, 1), config.reason.balance
    if "rollout" in inspect.signature(Learner).parameters:
        learner = Learner(model, policy, rollout, params, objectives.Balance.of(config.reason), mesh)
    else:  # the checkout to compare with: from before the learner computed prompts once
        learner = Learner(model, policy, params, length, balance, mesh)
    chosen = list(enumerate(asked[:prompts]))
    for _ in sys.stdin:
        clocks = [(time.perf_counter(), time.process_time())]
        groups = engine.sample(learner.params, chosen, 0)
        clocks.append((time.perf_counter(), time.process_time()))
        for group in groups:
            rewards = [float((r.ids % 2 == 0).mean()) for r in group.rollouts]
            for made, reward, advantage in zip(group.rollouts, rewards, advantages(rewards), strict=True):
                made.reward, made.advantage = reward, advantage
        learner.update(groups)
        jax.block_until_ready(learner.trained)
        clocks.append((time.perf_counter(), time.process_time()))
        tokens = [len(made.ids) for group in groups for made in group.rollouts]
        taken = {"tokens": sum(tokens), "longest": max(tokens)}
        for index, clock in enumerate(("clock", "cpu")):
            first, middle, last = (moment[index] for moment in clocks)
            taken |= {
                f"rollout_{clock}": middle - first,
                f"update_{clock}": last - middle,
                f"step_{clock}": last - first,
            }
        print(json.dumps(taken), flush=True)


def compare(other: Path, setting: str, prompts: int, repeats: int) -> dict[str, Any]:
    """Seconds of both checkouts, and how many times faster this one is, by the clock and by CPU time."""
    from tasks.engine.child_process import ALLOCATOR

    command = [sys.executable, __file__, str(other), "--serve", setting, "--prompts", str(prompts)]
    workers = {
        name: subprocess.Popen(
            command, env=ALLOCATOR | os.environ | {"PYTHONPATH": str(tree)}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tree,
        )
        for name, tree in (("before", other), ("now", ROOT))
    }  # fmt: skip
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
    try:
        for number in range(repeats + 1):
            for name, worker in workers.items():
                print(file=worker.stdin, flush=True)
                row = json.loads(worker.stdout.readline())
                shown = {key: round(value, 2) for key, value in row.items()}
                print(setting, name, f"step {number}" if number else "compiling", shown, flush=True)
                if number:
                    taken[name].append(row)
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()
    medians = {
        name: {key: round(statistics.median(row[key] for row in rows), 4) for key in rows[0]}
        for name, rows in taken.items()
    }
    before, now = medians["before"], medians["now"]
    times = {key: round(before[key] / now[key], 2) for key in before if key.endswith(("clock", "cpu"))}
    rate = {name: round(part["tokens"] / part["rollout_clock"]) for name, part in medians.items()}
    return {**medians, "rollout_tokens_per_second": rate, "times_faster": times, "rows": taken}


def main() -> None:
    parser = options(__doc__, settings=["table1", "long"], prompts=0, repeats=3)
    parser.add_argument("other", type=Path, help="the checkout to compare with")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve(asked.serve, asked.prompts)
        return
    results = json.loads(asked.json.read_text("utf-8")) if asked.json and asked.json.exists() else {}
    for setting in asked.settings:
        prompts = asked.prompts or PROMPTS[setting]
        results[setting] = compare(asked.other.resolve(), setting, prompts, asked.repeats)
        print(f"{setting}: {prompts} prompts by 8, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        for name in ("before", "now", "rollout_tokens_per_second", "times_faster"):
            print("  ", name, results[setting][name], flush=True)
        write_results(results, asked.json)


if __name__ == "__main__":
    main()
