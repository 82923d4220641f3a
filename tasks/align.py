"""Alignment as a stage (paper §4.2): Dr. GRPO with rewards from an LLM judge."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from common.files import write_json
from configs.training import AlignConfig, JudgeConfig
from data.endpoints.pool import EndpointPool
from rl.calibration import KINDS, calibrate
from rl.judge import Judge, JudgeItem
from rl.rewards import is_mastered, judged, verifiable
from tasks.engine.job import Job
from tasks.engine.stage import stage

if TYPE_CHECKING:
    from rl.rollouts import Group


class JudgeScorer:
    """Has the judge score every completion in one batch of requests. A completion without a score stays unscored."""

    def __init__(self, judge: Judge, config: JudgeConfig) -> None:
        self.judge, self.config = judge, config

    def score(self, groups: "Sequence[Group]") -> None:
        rollouts = [(group, rollout) for group in groups for rollout in group.rollouts]
        # The parts of the reply, not the text of the ids: that spells out the markers that the policy sampled.
        items = [
            JudgeItem(problem.question, reply.answer or "", problem.answer or None, reply.reasoning)
            for problem, reply in ((group.problem, rollout.reply) for group, rollout in rollouts)
        ]
        scores = self.judge.score(items)
        for (group, rollout), score in zip(rollouts, scores, strict=True):
            rollout.reward = judged(score, self.config, rollout.truncated)
            # Not part of the reward: shows whether the judge prefers right answers, where there is an answer key.
            if group.problem.answer:
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


@stage("align", version=7, outputs=("checkpoint", "rollouts", "calibration"), accelerator=True, multihost=True)
def align(job: Job) -> None:
    """Check the judge and measure it, reinforce from the input checkpoint, publish the policy and every rollout."""
    # Imported here because every command imports this file for the DAG, and JAX takes seconds.
    from model.processes import on_first
    from model.weights.files import save_weights
    from rl.reinforce import Reinforcement, check, reinforce
    from rl.stage_inputs import load_inputs

    config = job.part("align", AlignConfig)
    params, inputs, screen = load_inputs(job.inputs, config.problems, config.rollout, config.policy, job.seed, "keep")
    run = Reinforcement(
        inputs=inputs,
        rollout=config.rollout,
        policy=config.policy,
        scorer=None,
        identity={"execution": job.key},
        work=job.scratch,
        rollouts=job.output("rollouts") / "rollouts.jsonl",
        seed=job.seed,
        emit=job.emit,
        shared_disk=job.shared_disk,
    )
    # Everything that can be refused is checked before the first call is paid for.
    check(run)
    # Only the first of several processes asks judges. If they cannot be asked, all processes end with its error.
    with EndpointPool(job.endpoints, job.reply_source, job.emit) if job.process == 0 else nullcontext() as pool:
        # That of the rewards, and those that are only measured beside it.
        endpoints = config.judge.endpoints if pool else ()
        judges = [Judge(pool, config.judge.model_copy(update={"endpoint": name})) for name in endpoints]

        def measure() -> dict[str, Any]:
            assert pool is not None
            pool.check()
            right = [JudgeItem(p.question, p.answer, p.answer, p.rationale) for p in inputs.problems if p.answer]
            return _measured(job, judges, config.judge, right)

        facts = on_first(measure)
        scorer = JudgeScorer(judges[0], config.judge) if judges else None
        params, run_facts = reinforce(replace(run, scorer=scorer), params)
    facts |= run_facts
    if job.process == 0:
        save_weights(job.output("checkpoint"), params, inputs.model, inputs.tokenizer)
    job.describe("checkpoint", **facts)
    job.describe("rollouts", **facts, **screen.facts())


def _measured(job: Job, judges: list[Judge], config: JudgeConfig, right: Sequence[JudgeItem]) -> dict[str, Any]:
    """Measure the judges by what they make of `right` answers, and write that; returns facts about the first."""
    judge, *others = judges
    known = right[: config.calibration_items // len(KINDS)]
    calibration = calibrate(judge, known, config.hostile_items, job.seed)
    known = right[: config.compare_items // 2]
    compared = [
        {"judge": other.facts(), **calibrate(other, known, seed=job.seed, kinds=("right", "wrong"))} for other in others
    ]
    judged_by = judge.facts()
    write_json(
        job.output("calibration") / "calibration.json", {"judge": judged_by, **calibration, "compared": compared}
    )
    for figures in (calibration, *compared):
        del figures["answers"]  # those are in the file
    job.describe("calibration", judge=judged_by, **calibration, compared=compared)
    calibration.pop("hostile")  # a table of its own, with the calibration
    return {"judge": judged_by, "calibration": calibration}
