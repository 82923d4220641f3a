"""A tiny reinforcement run as a process of its own: `python -m tests.support.reinforcing FOLDER`.

The reward is the share of even ids, so that random completions of an untrained model already differ.
"""

import sys
from pathlib import Path

from configs.reinforcement import RolloutConfig
from model.nautile import initialise
from model.weights import save_weights
from rl.problems import ProblemsConfig, load
from rl.reinforce import Plan, reinforce
from tests.rl.conftest import SUMS, TOKENIZER, policy, tiny_model


class Even:
    def score(self, groups):
        for group in groups:
            for number, rollout in enumerate(group.rollouts):
                lost = group.position % 3 == 0 and number == 1
                rollout.reward = None if lost else float((rollout.ids % 2 == 0).mean())

    def mastered(self, group):
        return False


def run(folder: Path, steps: int = 6) -> dict:
    model = tiny_model()
    rollout = RolloutConfig(prompts=2, group=3, prompt_length=60, max_tokens=6)
    folder.mkdir(parents=True, exist_ok=True)
    plan = Plan(
        model=model,
        tokenizer=TOKENIZER,
        rollout=rollout,
        policy=policy(steps=steps, save_every=2, refill=1),
        problems=load(ProblemsConfig(tasks=SUMS, count=12), 0),
        scorer=Even(),
        identity={"run": 1},
        work=folder,
        rollouts=folder / "rollouts.jsonl",
        seed=7,
        mode="equalise",
    )
    params, facts = reinforce(plan, initialise(model, 0))
    save_weights(folder / "final", params, model, TOKENIZER)
    return facts


if __name__ == "__main__":
    run(Path(sys.argv[1]))
