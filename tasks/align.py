"""Alignment as a stage (paper §4.2): Dr. GRPO with rewards from an LLM judge."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from common.files import write_json
from configs.endpoint import EndpointConfig
from configs.training import AlignConfig, JudgeConfig
from data.endpoints.pool import EndpointPool
from data.screening.contamination import load_contamination_index
from data.sources.reasoning_gym import Problem
from rl.advantages import is_mastered
from rl.judge import Judge, JudgeItem
from rl.problems import Screen, load, load_guard
from rl.rewards import judged, verifiable
from tasks.engine.job import Job
from tasks.engine.stage import stage

if TYPE_CHECKING:
    from rl.rollouts import Group, Rollout


class JudgeScorer:
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


@stage("align", version=2, outputs=("checkpoint", "rollouts", "calibration"), accelerator=True)
def align(job: Job) -> None:
    """Check the judge and measure it, reinforce from the input checkpoint, publish the policy and every rollout."""
    # Imported here, not above: every command reads this file for the plan, and JAX takes seconds.
    from model.weights.files import load_weights, save_weights
    from rl.reinforce import Reinforcement, check, on_device, reinforce

    config = job.part("align", AlignConfig)
    endpoints = {name: EndpointConfig.model_validate(one) for name, one in job.section["endpoints"].items()}
    screen = Screen(load_contamination_index(job.inputs.get("questions")))
    problems = load(config.problems, job.seed, screen=screen)
    guard = load_guard(config.problems, config.policy, job.seed, screen)
    asked = endpoints[config.judge.endpoint]
    facts: dict[str, Any] = {"judge": {"model": asked.model, "rubric": config.judge.rubric, "stand_in": asked.stand_in}}
    params, model, tokenizer = load_weights(job.inputs["checkpoint"])
    with EndpointPool(endpoints, job.scratch / "replies.jsonl", job.emit) as pool:
        judge = Judge(pool, config.judge)
        plan = Reinforcement(
            model=model,
            tokenizer=tokenizer,
            rollout=config.rollout,
            policy=config.policy,
            problems=problems,
            scorer=JudgeScorer(judge, config.judge),
            identity={"execution": job.key},
            work=job.scratch,
            rollouts=job.output("rollouts") / "rollouts.jsonl",
            seed=job.seed,
            guard_problems=guard,
            emit=job.emit,
        )
        check(plan)
        pool.check()
        facts["calibration"] = _calibrated(job, judge, problems, config.judge, facts["judge"])
        params, found = reinforce(plan, on_device(params))
    facts |= found
    save_weights(job.output("checkpoint"), params, model, tokenizer)
    job.describe("checkpoint", **facts)
    job.describe("rollouts", **facts, **screen.facts())


def _calibrated(
    job: Job, judge: Judge, problems: Sequence[Problem], config: JudgeConfig, asked: dict[str, Any]
) -> dict[str, Any]:
    """Measure the judge, write the `calibration` artifact, and return its figures without the answers."""
    from rl.calibration import KINDS, calibrate

    right = [JudgeItem(p.question, f"{p.rationale}\n{p.answer}", p.answer) for p in problems]
    found = calibrate(judge, right[: config.calibration_items // len(KINDS)], job.seed)
    answers = found.pop("answers")
    write_json(job.output("calibration") / "calibration.json", {"judge": asked, **found, "answers": answers})
    job.describe("calibration", judge=asked, **found)
    return found
