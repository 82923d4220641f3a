"""Alignment as a stage (paper §4.2): Dr. GRPO with rewards from an LLM judge."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from configs.schema import AlignConfig, EndpointConfig, JudgeConfig
from data.endpoints import EndpointPool
from data.held_out import contamination_of
from data.reasoning import Problem
from rl.advantages import is_mastered
from rl.judge import Judge, JudgeItem
from rl.problems import Screen, load
from rl.rewards import judged, verifiable
from tasks.job import Job
from tasks.stage import stage

if TYPE_CHECKING:
    from rl.rollouts import Group, Rollout


class Scorer:
    """Asks the judge about every completion at once. What it could not score stays unscored."""

    def __init__(self, judge: Judge, config: JudgeConfig) -> None:
        self.judge, self.config = judge, config

    def score(self, groups: "Sequence[Group]") -> None:
        rollouts = [(group, rollout) for group in groups for rollout in group.rollouts]
        scores = self.judge.score([self._item(group, rollout) for group, rollout in rollouts])
        for (group, rollout), score in zip(rollouts, scores, strict=True):
            rollout.reward = judged(score, self.config, rollout.truncated)
            # Not part of the reward: it shows beside it whether the judge prefers right answers.
            rollout.parts["correct"] = verifiable(group.problem, rollout.reply)
            if score is not None:
                rollout.parts |= {
                    "reason": score.reason,
                    "answer": score.answer,
                    "follow": score.follow,
                    "overall": score.overall,
                }

    def mastered(self, group: "Group") -> bool:
        overalls = [rollout.parts.get("overall") for rollout in group.rollouts]
        return is_mastered(overalls, self.config.mastered_mean, self.config.mastered_minimum)

    @staticmethod
    def _item(group: "Group", rollout: "Rollout") -> JudgeItem:
        return JudgeItem(group.problem.question, rollout.text, group.problem.answer)


@stage("align", version=2, outputs=("checkpoint", "rollouts"), accelerator=True)
def align(job: Job) -> None:
    """Check the judge, reinforce from the input checkpoint, publish the policy, every rollout and the calibration."""
    # Imported here, not above: every command reads this file for the plan, and JAX takes seconds.
    from model.weights import load_weights, save_weights
    from rl.calibration import calibrate
    from rl.reinforce import Plan, on_device, reinforce

    config = job.part("align", AlignConfig)
    endpoints = {name: EndpointConfig.model_validate(one) for name, one in job.section["endpoints"].items()}
    screen = Screen(contamination_of(job.inputs.get("questions")))
    problems = load(config.problems, job.seed, screen=screen)
    params, model, tokenizer = load_weights(job.inputs["checkpoint"])
    plan = Plan(model, tokenizer, config.rollout, config.policy, None, 0.0, job.seed)
    rollouts = job.output("rollouts") / "rollouts.jsonl"
    with EndpointPool(endpoints, job.scratch / "replies.jsonl", job.emit) as pool:
        pool.check()
        judge = Judge(pool, config.judge)
        calibration = calibrate(judge, _worked(problems[: config.judge.calibration_items // 2]), job.seed)
        scorer = Scorer(judge, config.judge)
        params, facts = reinforce(
            plan,
            on_device(params),
            problems,
            scorer,
            [],
            {"execution": job.key},
            job.scratch,
            rollouts,
            job.emit,
        )
    asked = endpoints[config.judge.endpoint]
    facts["judge"] = {"model": asked.model, "rubric": config.judge.rubric, "stand_in": asked.stand_in}
    facts["calibration"] = calibration
    save_weights(job.output("checkpoint"), params, model, tokenizer)
    job.describe("checkpoint", **facts)
    job.describe("rollouts", **facts, **screen.facts())


def _worked(problems: Sequence[Problem]) -> list[JudgeItem]:
    """Replies that are right: each problem's worked rationale and its answer."""
    return [JudgeItem(p.question, f"{p.rationale}\n{p.answer}", p.answer) for p in problems]
