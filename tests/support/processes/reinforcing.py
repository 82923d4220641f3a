"""A tiny alignment as a separate process: `python -m tests.support.processes.reinforcing FOLDER URL [UPDATE]`.

The judge is the chat endpoint at URL. With UPDATE the process stops amid that update's micro-batches, writes
FOLDER/stopped and waits to be killed.
"""

import sys
import time
from pathlib import Path
from typing import Any

from nautile.common.events import Emit, silent
from nautile.common.processes import relax_collector
from nautile.common.retry import Backoff
from nautile.configs.endpoint import EndpointConfig
from nautile.configs.training import JudgeConfig, ProblemsConfig, RolloutConfig
from nautile.data.endpoints import circuit_breaker
from nautile.data.endpoints.pool import EndpointPool
from nautile.model.nautile import initialise
from nautile.model.weights.files import save_weights
from nautile.rl.judge import Judge
from nautile.rl.learner import Learner
from nautile.rl.problems import load, load_guard
from nautile.rl.reinforce import Reinforcement, reinforce
from nautile.rl.rollouts import StageInputs
from nautile.tasks.reinforce import JudgeScorer
from tests.rl.conftest import SUMS, TOKENIZER, policy, tiny_model

JUDGE = JudgeConfig(endpoint="judge")


def run(folder: Path, url: str, steps: int = 4, emit: Emit = silent, **changes: Any) -> dict:
    """Align, in this process. `changes` are of the policy."""
    circuit_breaker.BACKOFF, circuit_breaker.OUTAGE_S = Backoff(first_s=0.01), 0.1
    folder.mkdir(parents=True, exist_ok=True)
    endpoint = EndpointConfig(kind="openai", model="fake", url=url, timeout_s=60, concurrency=2)
    model = tiny_model()
    with EndpointPool({"judge": endpoint}, folder / "replies", emit) as pool:
        reinforcement = Reinforcement(
            inputs=StageInputs(
                model,
                TOKENIZER,
                load(ProblemsConfig(tasks=SUMS, count=12), 0),
                load_guard(ProblemsConfig(tasks=SUMS), policy(steps=steps, **changes)),
            ),
            rollout=RolloutConfig(prompts=2, group=4, prompt_length=60, max_tokens=6),
            policy=policy(steps=steps, kl=0.1, **{"save_every": 2, "refill": 1, "sync_every": 3, **changes}),
            scorer=JudgeScorer(Judge(pool, JUDGE), JUDGE, 6),
            identity={"run": 1},
            work=folder,
            rollouts=folder / "rollouts.jsonl",
            data_seed=7,
            sampling_seed=7,
            emit=emit,
        )
        params, facts = reinforce(reinforcement, initialise(model, 0))
    save_weights(folder / "final", params, model, TOKENIZER)
    return facts


def stop_in(folder: Path, update: int) -> None:
    """Make this process stop at the first micro-batch of an update (1: the first one), for good."""
    accumulate = Learner._accumulate

    def stopping(learner: Learner, *arguments: Any) -> None:
        if learner.steps + 1 == update:
            (folder / "stopped").touch()
            time.sleep(600)
        accumulate(learner, *arguments)

    Learner._accumulate = stopping


def main(folder: Path, url: str, update: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if update:
        stop_in(folder, update)
    run(folder, url)


if __name__ == "__main__":
    relax_collector()
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
