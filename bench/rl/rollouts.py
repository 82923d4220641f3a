"""Rollouts and a whole reason step, of this checkout and of another one, interleaved.

    git worktree add /tmp/before COMMIT
    python bench/rl/rollouts.py /tmp/before [--settings table1 long] [--repeats 3] [--json FILE]

`table1` is the reason stage of bench/studies/table1.toml: 32 prompts by 8, prompts and completions of up to 48 tokens.
`long` is the same with 16 prompts and completions of up to 768. The model is untrained and would never stop, so each
sample is stopped at a certain length, the same in both checkouts: its first random number selects the length from those
of the problems' own solutions (`table1`), or from a lognormal distribution with a median of 64 tokens and σ = 1
(`long`). A reason step is rollouts, rewards (the share of even ids, so that groups have a signal) and the balanced
update.

The first step of a checkout compiles and is not counted. The others repeat its draw at a learning rate that changes
nothing, so that all do the same work. The two processes alternate; medians, with CPU time because the machine may be
shared. Each step is printed and each setting is added to FILE as it ends, so settings can be run separately.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

# Not the root: PYTHONPATH names the checkout that a worker measures, and this file's own helpers are beside it.
sys.path.insert(0, str(Path(__file__).parents[1]))

from measure import argument_parser, workers, write_results

ROOT = Path(__file__).parents[2]
LONG_TOKENS, LONG_CONTEXT = 768, 1024
QUANTILES = 4096
PROMPTS = {"table1": 32, "long": 16}


def stop_at_lengths(lengths: list[int], stop: int) -> None:
    """Patch sampling so that each sample ends with `stop`, at one of `lengths` selected by its first random number."""
    import jax.numpy as jnp

    from nautile.model.decoding import generate, lane, sampling

    table, draw, uniforms = jnp.asarray(sorted(lengths)), sampling.draw, sampling.uniforms

    def uniforms_with_stop(keys_B2: Any, count: int) -> Any:
        numbers_BT = uniforms(keys_B2, count)
        last_B = table[(numbers_BT[:, 0] * len(lengths)).astype(int)] - 1
        # A number above 1 cannot be drawn: it is the mark by which `draw_or_stop` knows that this sample ends here.
        return jnp.where(jnp.arange(count) == last_B[:, None], 2.0, numbers_BT)

    def draw_or_stop(logits_BV: Any, uniform_B: Any, settings: Any) -> Any:
        return jnp.where(uniform_B > 1, stop, draw(logits_BV, uniform_B, settings))

    modules: tuple[Any, ...] = (generate, lane)
    for module in modules:
        if hasattr(module, "draw"):
            module.draw, module.uniforms = draw_or_stop, uniforms_with_stop


def serve(setting: str) -> None:
    """The worker: one step for each line of standard input; writes its times as JSON to standard output."""
    import jax
    import numpy as np

    import nautile
    from nautile.configs.load import load
    from nautile.data.tokenizer import tokenizer_for
    from nautile.model.nautile import initialise
    from nautile.model.sharding import make_mesh
    from nautile.rl import objectives
    from nautile.rl.learner import Learner
    from nautile.rl.problems import load as load_problems
    from nautile.rl.rewards import advantages
    from nautile.rl.rollouts import RolloutEngine

    if not Path(nautile.__file__).is_relative_to(Path.cwd()):  # else both workers would be the installed package
        raise SystemExit(f"{Path.cwd()} has no src/nautile: only checkouts with the package `nautile` are compared")
    config = load(ROOT / "bench" / "studies" / "table1.toml")
    model, rollout, tokenizer = config.model, config.reason.rollout, tokenizer_for(config.tokenizer)
    prompts = PROMPTS[setting]
    rollout = rollout.model_copy(update={"prompts": prompts})
    problem_list = load_problems(config.reason.problems.model_copy(update={"count": 4 * prompts}), 1)
    # The lengths at which samples are stopped.
    if setting == "long":
        model = model.model_copy(update={"context": LONG_CONTEXT})
        rollout = rollout.model_copy(update={"max_tokens": LONG_TOKENS})
        normal = statistics.NormalDist()
        tail = [64 * np.exp(normal.inv_cdf((i + 0.5) / QUANTILES)) for i in range(QUANTILES)]
        lengths = [int(min(max(2, length), LONG_TOKENS)) for length in tail]
    else:
        texts = [tokenizer.encode(p.rationale) + tokenizer.encode(f"\n{p.answer}\n") for p in problem_list]
        lengths = [min(len(ids) + 2, rollout.max_tokens) for ids in texts]  # plus two end markers
    stop_at_lengths(lengths, tokenizer.im_end)
    mesh = make_mesh(1)
    engine = RolloutEngine(model, tokenizer, rollout, 1, mesh)
    # A learning rate that changes nothing, so that every step does the same work.
    optimizer = config.reason.policy.optimizer.model_copy(update={"learning_rate": 1e-12})
    policy = config.reason.policy.model_copy(update={"optimizer": optimizer})
    learner = Learner(model, policy, rollout, initialise(model, 1), objectives.Balance.of(config.reason), mesh)
    step_problems = list(enumerate(problem_list[:prompts]))
    # One step per line: sample, score by the share of even ids, update.
    for _ in sys.stdin:
        clocks = [(time.perf_counter(), time.process_time())]
        # Sampling and the update are timed apart; the scoring between them counts as part of the update, and takes
        # microseconds.
        groups = engine.sample(learner.params, step_problems, 0)
        clocks.append((time.perf_counter(), time.process_time()))
        for group in groups:
            rewards = [float((r.ids % 2 == 0).mean()) for r in group.rollouts]
            for completion, reward, advantage in zip(group.rollouts, rewards, advantages(rewards), strict=True):
                completion.reward, completion.advantage = reward, advantage
        learner.update(groups)
        jax.block_until_ready(learner.trained)
        clocks.append((time.perf_counter(), time.process_time()))
        tokens = [len(completion.ids) for group in groups for completion in group.rollouts]
        row: dict[str, float] = {"tokens": sum(tokens), "longest": max(tokens)}
        for clock, (begin, middle, end) in zip(("clock", "cpu"), zip(*clocks, strict=True), strict=True):
            row |= {f"rollout_{clock}": middle - begin, f"update_{clock}": end - middle, f"step_{clock}": end - begin}
        print(json.dumps(row), flush=True)


def compare(other: Path, setting: str, repeats: int) -> dict[str, Any]:
    """Seconds of both checkouts, and the speed-up of this one by wall time and by CPU time."""
    from nautile.tasks.engine.child_process import ALLOCATOR

    command = [sys.executable, __file__, str(other), "--serve", setting]
    places = {
        name: ({**ALLOCATOR, **os.environ, "PYTHONPATH": str(tree / "src")}, tree)
        for name, tree in (("before", other), ("now", ROOT))
    }
    timings: dict[str, list[dict[str, Any]]] = {name: [] for name in places}
    with workers(command, places) as ask:
        for number in range(repeats + 1):
            for name in places:
                row = json.loads(ask(name, ""))
                rounded = {key: round(value, 2) for key, value in row.items()}
                print(setting, name, f"step {number}" if number else "compiling", rounded, flush=True)
                if number:
                    timings[name].append(row)
    medians = {
        name: {key: round(statistics.median(row[key] for row in rows), 4) for key in rows[0]}
        for name, rows in timings.items()
    }
    before, now = medians.values()
    speed_up = {key: round(before[key] / now[key], 2) for key in before if key.endswith(("clock", "cpu"))}
    rate = {name: round(part["tokens"] / part["rollout_clock"]) for name, part in medians.items()}
    return {**medians, "rollout_tokens_per_second": rate, "times_faster": speed_up, "rows": timings}


def main() -> None:
    parser = argument_parser(__doc__, settings=["table1", "long"], repeats=3)
    parser.add_argument("other", type=Path, help="the checkout to compare with")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    results = json.loads(arguments.json.read_text("utf-8")) if arguments.json and arguments.json.exists() else {}
    for setting in arguments.settings:
        results[setting] = compare(arguments.other.resolve(), setting, arguments.repeats)
        print(f"{setting}: {PROMPTS[setting]} prompts by 8, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        for name in ("before", "now", "rollout_tokens_per_second", "times_faster"):
            print("  ", name, results[setting][name], flush=True)
        write_results(results, arguments.json)


if __name__ == "__main__":
    main()
