"""The `reason` stage (paper §4.3): gradient-balanced GRPO on problems with checkable answers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nautile.configs.training import ReasonConfig
from nautile.data.sources.reasoning_gym import derived_seed
from nautile.rl.objective_registry import Balance, objective_named
from nautile.rl.problems.files import check_files
from nautile.rl.rewards import verifiable
from nautile.tasks.engine.job import Job
from nautile.tasks.reinforced import reinforcement_stage, steps_and_completions

if TYPE_CHECKING:
    from nautile.rl.rollouts import Group


class AnswerScorer:
    """Reward 1 for an answer that the strict grader accepts, else 0; None for one that could not be graded.

    No group counts as mastered: one whose rewards are all equal has no advantage and drops out by itself.
    """

    def score(self, groups: "Sequence[Group]") -> None:
        for group in groups:
            for rollout in group.rollouts:
                rollout.reward = verifiable(group.problem, rollout.reply)
                rollout.parts["correct"] = rollout.reward

    def mastered(self, group: "Group") -> bool:
        return False


def _check(config: ReasonConfig) -> None:
    check_files(config.problems, "reason")
    objective_named(config.objective)


@reinforcement_stage(
    "reason",
    version=9,
    outputs=("checkpoint", "rollouts"),
    limits=lambda section: steps_and_completions(section["reason"]),
    check=_check,
    rehearse="nautile.rl.rehearsal:rehearse_reason",
)
def reason(job: Job) -> None:
    """Train the input checkpoint by reinforcement; publish the policy and every rollout."""
    # Imported here because every command imports this file for the DAG, and JAX takes seconds.
    from nautile.model.weights.files import save_weights
    from nautile.rl.reinforce import Reinforcement, reinforce
    from nautile.rl.stage_inputs import load_inputs

    config = job.part("reason", ReasonConfig)
    seed = derived_seed(job.seed("data"), job.stage)
    params, inputs, screen = load_inputs(job.inputs, config.problems, config.rollout, config.policy, seed)
    run = Reinforcement(
        inputs=inputs,
        rollout=config.rollout,
        policy=config.policy,
        scorer=AnswerScorer(),
        identity={"execution": job.key},
        work=job.scratch,
        rollouts=job.output("rollouts") / "rollouts.jsonl",
        data_seed=job.seed("data"),
        sampling_seed=job.seed("sampling"),
        balance=Balance.of(config),
        emit=job.emit,
        shared_disk=job.shared_disk,
    )
    params, facts = reinforce(run, params)
    if job.process == 0:
        save_weights(job.output("checkpoint"), params, inputs.model, inputs.tokenizer)
    job.describe("checkpoint", objective=config.objective, **facts)
    job.describe("rollouts", **facts, **screen.facts())
