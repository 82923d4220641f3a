"""The `align` stage (paper §4.2): Dr. GRPO with rewards from an LLM judge."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nautile.common.files import write_json
from nautile.configs.endpoint import EndpointConfig
from nautile.configs.training import AlignConfig, JudgeConfig
from nautile.data.endpoints.pool import EndpointPool
from nautile.data.sources.reasoning_gym import derived_seed
from nautile.rl.calibration import KINDS, calibrate
from nautile.rl.judge import Judge, JudgeItem
from nautile.rl.problems.files import check_files
from nautile.rl.problems.load import load_references
from nautile.rl.rewards import is_mastered, judged, verifiable
from nautile.tasks.engine.job import Job
from nautile.tasks.engine.stage import Calls
from nautile.tasks.reinforced import reinforcement_stage, steps_and_completions

if TYPE_CHECKING:
    from nautile.rl.rollouts import Group


class JudgeScorer:
    """Have the judge score all completions in one batch of requests.

    The reward of a completion of at most `max_tokens` tokens is None where the judge gave no score.
    """

    def __init__(self, judge: Judge, config: JudgeConfig, max_tokens: int) -> None:
        self.judge, self.config, self.max_tokens = judge, config, max_tokens

    def score(self, groups: "Sequence[Group]") -> None:
        rollouts = [(group, rollout) for group in groups for rollout in group.rollouts]
        # The parsed reply, not the decoded ids: their text would contain the special tokens that the policy sampled.
        items = [
            JudgeItem(problem.question, reply.answer or "", problem.answer or None, reply.reasoning)
            for problem, reply in ((group.problem, rollout.reply) for group, rollout in rollouts)
        ]
        scores = self.judge.score(items)
        for (group, rollout), score in zip(rollouts, scores, strict=True):
            rollout.reward = judged(score, self.config, len(rollout.ids), self.max_tokens, rollout.truncated)
            # Not part of the reward. Shows whether the judge prefers correct answers, for problems with an answer key.
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


COMPARED = 12  # reference answers that each of `judge.compare` marks, once right and once wrong
RUBRIC_TOKENS = 600  # an estimate of the judge's instructions around what it marks


def _calls(section: Mapping[str, Any], endpoints: Mapping[str, EndpointConfig]) -> Iterator[Calls]:
    """The judge's requests: for every rollout, and for its calibration."""
    align = AlignConfig.model_validate(section["align"])
    rollout, judge = align.rollout, align.judge
    rollouts = align.policy.steps * rollout.prompts * rollout.group
    # Calibration items are balanced over the kinds of flaw, hostile items come in pairs.
    calibration = judge.calibration_items // len(KINDS) * len(KINDS)
    calibration += judge.hostile_items // 2 * 2 if calibration else 0
    tokens = (RUBRIC_TOKENS + rollout.prompt_length + rollout.max_tokens, judge.max_tokens)
    # Every group may be refilled as often as the configuration allows, if all of its answers get equal marks.
    most = rollouts * (1 + align.policy.refill) + calibration
    yield Calls("judge", judge.endpoint, rollouts + calibration, most, tokens)


def _check(config: AlignConfig) -> None:
    check_files(config.problems, "align")
    if config.answered is not None:
        check_files(config.answered, "align", "answered")


@reinforcement_stage(
    "align",
    version=10,
    outputs=("checkpoint", "rollouts", "calibration"),
    limits=lambda section: steps_and_completions(section["align"]),
    calls=_calls,
    check=_check,
    rehearse="nautile.rl.rehearsal:rehearse_align",
)
def align(job: Job) -> None:
    """Calibrate the judge, train the input checkpoint by reinforcement, publish the policy and every rollout."""
    # Imported here because every command imports this file for the DAG, and JAX takes seconds.
    from nautile.model.processes import on_first
    from nautile.model.weights.files import save_weights
    from nautile.rl.reinforce import Reinforcement, check, reinforce
    from nautile.rl.stage_inputs import load_inputs

    config = job.part("align", AlignConfig)
    seed = derived_seed(job.seed("data"), job.stage)
    params, inputs, screen = load_inputs(
        job.inputs, config.problems, config.rollout, config.policy, seed, "keep", config.answered
    )
    run = Reinforcement(
        inputs=inputs,
        rollout=config.rollout,
        policy=config.policy,
        scorer=None,
        identity={"execution": job.key},
        work=job.scratch,
        rollouts=job.output("rollouts") / "rollouts.jsonl",
        data_seed=job.seed("data"),
        sampling_seed=job.seed("sampling"),
        emit=job.emit,
        shared_disk=job.shared_disk,
    )
    # Everything that can be wrong is checked before the first call is paid for.
    check(run)
    # Only process 0 calls judges. If a judge is unreachable, all processes end with its error (`on_first`).
    with EndpointPool(job.endpoints, job.reply_source, job.emit) if job.process == 0 else nullcontext() as pool:
        # The first judge gives the rewards; the others are only calibrated, for comparison.
        judges: list[Judge] = []
        if pool:
            judges += [
                Judge(pool, config.judge.model_copy(update={"endpoint": name})) for name in config.judge.endpoints
            ]

        def measure() -> dict[str, Any]:
            assert pool is not None
            pool.check()
            # The answer key as an answer, with the problem's own rationale: a judge should mark it high.
            most = max(config.judge.calibration_items // len(KINDS), COMPARED)
            known = load_references(config.answered or config.problems, most)
            references = [JudgeItem(p.question, p.answer, p.answer, p.rationale) for p in known]
            return _calibrate_judges(job, judges, config.judge, references)

        facts = on_first(measure)
        scorer = JudgeScorer(judges[0], config.judge, config.rollout.max_tokens) if judges else None
        params, run_facts = reinforce(replace(run, scorer=scorer), params)
    facts |= run_facts
    # All processes hold the same weights; the first writes them.
    if job.process == 0:
        save_weights(job.output("checkpoint"), params, inputs.model, inputs.tokenizer)
    job.describe("checkpoint", **facts)
    job.describe("rollouts", **facts, **screen.facts())


def _calibrate_judges(
    job: Job, judges: list[Judge], config: JudgeConfig, references: Sequence[JudgeItem]
) -> dict[str, Any]:
    """Calibrate the judges on reference answers and write the `calibration` artifact; returns facts about the first."""
    judge, *other_judges = judges
    # The limits count requests; each item makes one of every kind.
    items = references[: config.calibration_items // len(KINDS)]
    calibration = calibrate(judge, items, config.hostile_items)
    items = references[:COMPARED]
    compared = [{"judge": other.facts(), **calibrate(other, items, kinds=("right", "wrong"))} for other in other_judges]
    judged_by = judge.facts()
    write_json(
        job.output("calibration") / "calibration.json", {"judge": judged_by, **calibration, "compared": compared}
    )
    for figures in (calibration, *compared):
        del figures["answers"]  # long; calibration.json has them
    job.describe("calibration", judge=judged_by, **calibration, compared=compared)
    calibration.pop("hostile")  # only in the facts of the `calibration` artifact
    return {"judge": judged_by, "calibration": calibration}
