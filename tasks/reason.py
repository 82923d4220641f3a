"""Reasoning as a stage (paper §4.3): gradient-balanced GRPO on problems with checkable answers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from configs.training import ReasonConfig
from data.screening.contamination import load_contamination_index
from rl.problems import Screen, load, load_guard
from rl.rewards import verifiable
from tasks.engine.job import Job
from tasks.engine.stage import stage

if TYPE_CHECKING:
    from rl.rollouts import Group


class AnswerScorer:
    """Rewards 1 for what the strict grader accepts; no group is ever mastered, for one without a signal drops out."""

    def score(self, groups: "Sequence[Group]") -> None:
        for group in groups:
            for rollout in group.rollouts:
                rollout.reward = verifiable(group.problem, rollout.reply)
                rollout.parts["correct"] = rollout.reward

    def mastered(self, group: "Group") -> bool:
        return False


@stage("reason", version=2, outputs=("checkpoint", "rollouts"), accelerator=True)
def reason(job: Job) -> None:
    """Reinforce from the input checkpoint and publish the policy with every rollout."""
    # Imported here, not above: every command reads this file for the plan, and JAX takes seconds.
    from model.weights.files import load_weights, save_weights
    from rl.reinforce import Reinforcement, on_device, reinforce

    config = job.part("reason", ReasonConfig)
    screen = Screen(load_contamination_index(job.inputs.get("questions")))
    problems = load(config.problems, job.seed, screen=screen)
    guard = load_guard(config.problems, config.policy, job.seed, screen)
    params, model, tokenizer = load_weights(job.inputs["checkpoint"])
    plan = Reinforcement(
        model=model,
        tokenizer=tokenizer,
        rollout=config.rollout,
        policy=config.policy,
        problems=problems,
        scorer=AnswerScorer(),
        identity={"execution": job.key},
        work=job.scratch,
        rollouts=job.output("rollouts") / "rollouts.jsonl",
        seed=job.seed,
        mode=config.balance,
        epsilon=config.balance_epsilon,
        guard_problems=guard,
        emit=job.emit,
    )
    params, facts = reinforce(plan, on_device(params))
    save_weights(job.output("checkpoint"), params, model, tokenizer)
    job.describe("checkpoint", balance=config.balance, **facts)
    job.describe("rollouts", **facts, **screen.facts())
