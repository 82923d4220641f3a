"""Parts of reinforcement on one device and on eight; prints the results as JSON.

As a program, with JAX_NUM_CPU_DEVICES=8: `python -m tests.support.processes.reinforced_mesh FOLDER PART...`, of which
PART is a function here. The eight split parameters over four (`fsdp`), rows over all.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from nautile.common.processes import relax_collector
from nautile.configs.base import OptimizerConfig
from nautile.configs.training import PolicyConfig, ProblemsConfig, RolloutConfig, SelfDistillConfig
from nautile.data.tokenizer import tokenizer_for
from nautile.model.decoding.generate import Generator
from nautile.model.decoding.sampling import Sampling
from nautile.model.nautile import initialise
from nautile.model.sharding import make_mesh
from nautile.rl import rollouts, self_distillation
from nautile.rl.ahead_of_time import estimate_memory
from nautile.rl.learner import Learner
from nautile.rl.objective_registry import Balance
from nautile.rl.problems import load
from nautile.rl.rewards import advantages
from nautile.rl.rollouts import RolloutEngine, StageInputs
from tests.rl.conftest import SUMS, TOKENIZER, policy, tiny_model

ROLLOUT = RolloutConfig(prompts=4, group=4, prompt_length=60, max_tokens=6)


def plan(folder: Path, mesh: Any, fsdp: int) -> Any:
    """The memory of a step, estimated."""
    return estimate_memory(tiny_model(), ROLLOUT, policy_of(fsdp), Balance(over="step"), mesh)


def policy_of(fsdp: int) -> PolicyConfig:
    return policy(kl=0.1, micro_rows=8, fsdp=fsdp)


def updates(folder: Path, mesh: Any, fsdp: int) -> dict[str, Any]:
    """Two updates, each from fresh rollouts rewarded by their share of even ids."""
    model = tiny_model()
    start = jax.tree.map(np.asarray, initialise(model, 0))  # as weights are read; of a device's arrays each part is cut
    problems = list(enumerate(load(ProblemsConfig(tasks=SUMS, count=4), 0)))
    engine = RolloutEngine(model, tokenizer_for(TOKENIZER), ROLLOUT, 3, mesh)
    learner = Learner(model, policy_of(fsdp), ROLLOUT, start, Balance(over="step"), mesh)
    results: dict[str, Any] = {"ids": [], "logprobs": [], "measured": []}
    for draw in range(2):
        groups = engine.sample(learner.params, problems, draw)
        for group in groups:
            rewards = [float((rollout.ids % 2 == 0).mean()) for rollout in group.rollouts]
            for rollout, reward, advantage in zip(group.rollouts, rewards, advantages(rewards), strict=True):
                rollout.reward, rollout.advantage = reward, advantage
                results["ids"].append(rollout.ids.tolist())
                results["logprobs"].append(rollout.logprobs.tolist())
        results["measured"].append(learner.update(groups))
    table = learner.trained["embedding"]
    results["share"] = table.addressable_shards[0].data.size / table.size
    return results


def distilled_loss(folder: Path, mesh: Any, fsdp: int) -> float:
    """A round of self-distillation that grades completions by their length; returns the last loss."""
    self_distillation.make_mesh = lambda fsdp, part: mesh
    rollouts.verifiable = lambda problem, reply: float(len(reply.reasoning or "") % 2)
    optimizer = OptimizerConfig(learning_rate=1e-3)
    problems = ProblemsConfig(tasks=SUMS, count=8)
    config = SelfDistillConfig(rollout=ROLLOUT, problems=problems, batch_rows=8, optimizer=optimizer, fsdp=fsdp)
    folder.mkdir(parents=True)
    inputs = StageInputs(tiny_model(), TOKENIZER, load(problems, 0))
    run = self_distillation.SelfDistillation(inputs, config, {}, folder, folder / "traces.jsonl", 5)
    _, facts = self_distillation.self_distil(run, jax.tree.map(np.asarray, initialise(inputs.model, 0)))
    return facts["rounds"][0]["last_loss"]


def fused_samples(folder: Path, mesh: Any, fsdp: int) -> list[list[int]]:
    """Completions of two prompts, fewer than the devices, by the operator that runs on each device's own rows."""
    model = tiny_model().model_copy(update={"mixing": "fused"})
    params = jax.tree.map(np.asarray, initialise(model, 0))
    generator = Generator(model, Sampling(4), rows=8, prompt_length=16, mesh=mesh)
    completions = generator(params, [[5, 6, 7]] * 4 + [[8, 9]] * 4, [(row,) for row in range(8)])
    return [completion.ids.tolist() for completion in completions]


def main(folder: Path, *parts: str) -> None:
    meshes = {"one": (make_mesh(1, jax.devices()[:1]), 1), "many": (make_mesh(4), 4)}
    results = {
        part: {name: globals()[part](folder / name, mesh, fsdp) for name, (mesh, fsdp) in meshes.items()}
        for part in parts
    }
    sys.stdout.write(json.dumps(results, default=np.ndarray.tolist))


if __name__ == "__main__":
    relax_collector()
    main(Path(sys.argv[1]), *sys.argv[2:])
