"""The stages of reinforcement: from a `checkpoint` to a better one, with every rollout or the best traces.

- `align` (paper §4.2): Dr. GRPO with rewards from an LLM judge.
- `reason` (§4.3): gradient-balanced GRPO on problems with checkable answers.
- `self_distill` (§4.4): training on the best of the model's own completions.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from nautile.common.files import write_json
from nautile.common.text import counted
from nautile.configs.endpoint import EndpointConfig
from nautile.configs.rewards import DEFAULT_REWARD
from nautile.configs.training import (
    SMALLEST_GUARD,
    TRAINED,
    AlignConfig,
    JudgeConfig,
    ReasonConfig,
    SelfDistillConfig,
)
from nautile.data.endpoints.pool import EndpointPool
from nautile.data.sources.reasoning_gym import derived_seed
from nautile.rl.calibration import KINDS, calibrate
from nautile.rl.judge import Judge, JudgeItem
from nautile.rl.objective_registry import Balance, objective_named
from nautile.rl.problems import ProblemScreen, check_files, load_references
from nautile.rl.reward_runner import RewardRunner
from nautile.rl.rewards import Score, is_mastered, judged, reward_named, verifiable
from nautile.tasks.engine.job import Job
from nautile.tasks.engine.stage import Calls, Curve, Stage
from nautile.tasks.rehearsal import STEPS, few_problems, short_rollout

if TYPE_CHECKING:  # JAX takes seconds to import, and every command imports this file for the DAG
    from nautile.rl.reinforce import Reinforcement
    from nautile.rl.rollouts import Group, StageInputs

_LEARNS, _SOUND, _UPDATES, _SPEED = "Does it learn?", "Does it stay sound?", "The updates", "Speed"


def _curves(loss: Curve) -> tuple[Curve, ...]:
    """The curves of a reinforcement stage, in the order of the questions that they answer; `loss`: the chart of it."""
    return (
        Curve("reward", ("reward",), "reward", _LEARNS),
        Curve("solve rate of its samples", ("solve_rate",), "share right", _LEARNS),
        Curve("accuracy on the guard problems", ("guard_accuracy",), "share right", _LEARNS),
        loss,
        Curve("overall mark", ("reward_overall",), "0 to 100", _LEARNS, in_report=False),
        Curve("judge's marks", ("reward_reason", "reward_answer", "reward_follow"), "1 to 5", _LEARNS),
        Curve("spread of the reward", ("reward_deviation",), "reward", _LEARNS, in_report=False),
        Curve("KL to the start", ("kl",), "nats per token", _SOUND),
        Curve("entropy", ("entropy",), "nats per token", _SOUND),
        Curve("length of completions", ("length", "length_positive", "length_negative"), "tokens", _SOUND),
        Curve("rollouts that end", ("truncated_share", "finished_thinking_share"), "share", _SOUND),
        Curve("groups that teach nothing", ("zero_signal_share", "mastered_share", "dropped_share"), "share", _SOUND),
        Curve("groups drawn in place of those", ("refilled",), "groups", _SOUND, in_report=False),
        Curve("unscored completions", ("unscored",), "completions", _SOUND),
        Curve("p of the guard's test", ("guard_p",), "p", _SOUND, in_report=False),
        Curve("the sampler's log-probabilities against the learner's", ("sampler_gap",), "nats per token", _SOUND),
        Curve("learning rate", ("learning_rate",), "", _UPDATES, in_report=False),
        Curve("gradient", ("grad_norm",), "norm", _UPDATES),
        Curve("update", ("update_norm",), "norm", _UPDATES),
        Curve("norms of g+ and g-", ("norm_positive", "norm_negative"), "norm", _UPDATES),
        Curve("factor on g-", ("balance_factor",), "factor", _UPDATES),
        Curve("cosine of g+ and g-", ("gradient_cosine",), "cosine", _UPDATES),
        Curve(
            "log-probability above and below the mean",
            ("logprob_positive", "logprob_negative"), "nats per token", _UPDATES,
        ),
        Curve("clipped tokens", ("clip_share",), "share", _UPDATES),
        Curve("updates that were not finite", ("skipped_updates",), "updates", _UPDATES),
        Curve("speed of rollouts", ("rollout_tokens_per_second",), "tokens/s", _SPEED),
        Curve("speed of updates", ("update_tokens_per_second",), "tokens/s", _SPEED),
    )  # fmt: skip


# That of a policy gradient does not show whether anything is learnt.
LOSS = Curve("loss", ("loss",), "nats per token", _LEARNS, in_report=False)
TRACES_LOSS = Curve("advantage-scaled loss", ("loss",), "nats per token", _LEARNS)


def _steps_and_completions(part: Mapping[str, Any]) -> list[str]:
    """The limits of a stage of policy gradients: its steps, and the completions of each."""
    rows = part["rollout"]["prompts"] * part["rollout"]["group"]
    return [f"{counted(part['policy']['steps'], 'step')} of {counted(rows, 'completion')}"]


def reinforcement_stage(name: str, version: int, outputs: tuple[str, ...], loss: Curve = LOSS, **more: Any) -> Stage:
    """`@stage` of a reinforcement stage; `loss`: the chart of it; `more`: what the stage declares beyond the others."""
    return Stage(
        name,
        version,
        outputs,
        accelerator=True,
        multihost=True,
        trains=True,
        page="reinforcement",
        samples="rollouts",
        heading="Reinforcement and self-distillation",
        curves=_curves(loss),
        **more,
    )


def _problem_seed(job: Job) -> int:
    return derived_seed(job.seed("data"), job.stage)


def _reinforcement(job: Job, config: AlignConfig | ReasonConfig, inputs: "StageInputs") -> "Reinforcement":
    """A run of policy gradients without a scorer."""
    from nautile.rl.reinforce import Reinforcement

    return Reinforcement(
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


def _describe(
    job: Job,
    start: Any,
    params: Any,
    inputs: "StageInputs",
    facts: dict[str, Any],
    texts: str,
    screen: ProblemScreen,
    **about: str,
) -> None:
    """Save the weights, and describe them and the artifact `texts`. `start`: the parameters before the stage."""
    from nautile.model.training.optimizer import distance
    from nautile.model.weights.files import save_weights

    facts["distance"] = distance(start, params)

    # All processes hold the same weights; the first writes them.
    if job.process == 0:
        save_weights(job.output("checkpoint"), params, inputs.model, inputs.tokenizer)
    job.describe("checkpoint", **about, **facts)
    job.describe(texts, **about, **facts, **screen.facts())


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


def _judge_calls(section: Mapping[str, Any], endpoints: Mapping[str, EndpointConfig]) -> Iterator[Calls]:
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


def _check_align(config: AlignConfig) -> None:
    check_files(config.problems, "align")
    if config.answered is not None:
        check_files(config.answered, "align", "answered")


def _rehearsed_stage(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Two steps of a few short completions, and a guard of the fewest problems that one may have.

    A checkpoint of the store has another shape than the model of a rehearsal: the stage continues the one before it.
    """
    part = settings[name]
    few: dict[str, Any] = {"rollout": short_rollout(part["rollout"]), "problems": few_problems(part["problems"])}
    few["start"] = part["start"] if part["start"] in TRAINED else None
    if "least_success" in part:
        few["least_success"] = None  # an untrained model solves nothing
    if part.get("answered"):
        few["answered"] = few_problems(part["answered"])
    if policy := part.get("policy"):
        guarded = few.get("answered") or few["problems"]
        steps = {"steps": min(STEPS, policy["steps"]), "refill": min(1, policy["refill"]), "inner_epochs": 1}
        steps |= {"save_every": 1, "fsdp": 1, "guard_every": policy["guard_every"] and 1}
        few["policy"] = policy | steps | {"guard_problems": max(SMALLEST_GUARD, len(guarded["sources"] or ()))}
    else:
        few |= {"rounds": 1, "epochs": 1, "batch_rows": min(STEPS, part["batch_rows"]), "fsdp": 1}
    if judge := part.get("judge"):
        # One answer of each kind, and a pair of hostile ones.
        few["judge"] = judge | {
            "calibration_items": min(len(KINDS), judge["calibration_items"]),
            "hostile_items": min(2, judge["hostile_items"]),
        }
    return {name: part | few}


@reinforcement_stage(
    "align",
    version=11,
    outputs=("checkpoint", "rollouts", "calibration"),
    limits=lambda section: _steps_and_completions(section["align"]),
    calls=_judge_calls,
    check=_check_align,
    compile_ahead="nautile.rl.ahead_of_time:compile_align",
    rehearsal=partial(_rehearsed_stage, "align"),
)
def align(job: Job) -> None:
    """Calibrate the judge, train the input checkpoint by reinforcement, publish the policy and every rollout."""
    from nautile.model.processes import on_first
    from nautile.rl.reinforce import check, reinforce
    from nautile.rl.rollouts import load_inputs

    config = job.part("align", AlignConfig)
    params, inputs, screen = load_inputs(
        job.inputs, config.problems, config.rollout, config.policy, _problem_seed(job), "keep", config.answered
    )
    run = _reinforcement(job, config, inputs)
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
        trained, run_facts = reinforce(replace(run, scorer=scorer), params)
    _describe(job, params, trained, inputs, facts | run_facts, "rollouts", screen)


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


class AnswerScorer:
    """Reward completions by `score`, by default 1 for an answer that the strict grader accepts, else 0.

    None for one that could not be graded, or that the reward gives no number. `parts` has the strict grader's verdict
    whatever the reward is, so that the solve rate means the same. No group counts as mastered: one whose rewards are
    all equal has no advantage and drops out by itself.
    """

    def __init__(self, score: Score | None = None) -> None:
        self._score = score

    def score(self, groups: "Sequence[Group]") -> None:
        from nautile.rl.rollouts import score_groups

        for group, verdicts in zip(groups, score_groups(groups, self._score), strict=True):
            for rollout, correct in zip(group.rollouts, verdicts, strict=True):
                rollout.parts["correct"] = correct

    def mastered(self, group: "Group") -> bool:
        return False


@contextmanager
def rewarding(job: Job, name: str) -> Iterator[Score | None]:
    """Run the reward of that name during the block; None for the default, and where another process scores."""
    if name == DEFAULT_REWARD or job.process:
        yield None
        return
    with RewardRunner(name, job.reply_source, job.emit) as runner:
        yield runner.score


def _check_reason(config: ReasonConfig) -> None:
    check_files(config.problems, "reason")
    objective_named(config.objective)
    reward_named(config.reward)  # imported, so that one that is broken shows before anything runs


@reinforcement_stage(
    "reason",
    version=10,
    outputs=("checkpoint", "rollouts"),
    limits=lambda section: _steps_and_completions(section["reason"]),
    check=_check_reason,
    compile_ahead="nautile.rl.ahead_of_time:compile_reason",
    rehearsal=partial(_rehearsed_stage, "reason"),
)
def reason(job: Job) -> None:
    """Train the input checkpoint by reinforcement; publish the policy and every rollout."""
    from nautile.rl.reinforce import reinforce
    from nautile.rl.rollouts import load_inputs

    config = job.part("reason", ReasonConfig)
    params, inputs, screen = load_inputs(job.inputs, config.problems, config.rollout, config.policy, _problem_seed(job))
    run = replace(_reinforcement(job, config, inputs), balance=Balance.of(config), least_success=config.least_success)
    with rewarding(job, config.reward) as score:
        trained, facts = reinforce(replace(run, scorer=AnswerScorer(score)), params)
    _describe(job, params, trained, inputs, facts, "rollouts", screen, objective=config.objective, reward=config.reward)


def _check_self_distill(config: SelfDistillConfig) -> None:
    check_files(config.problems, "self_distill")
    reward_named(config.reward)


def _completions(section: Mapping[str, Any]) -> list[str]:
    part = section["self_distill"]
    return [f"{part['problems']['count'] * part['rollout']['group'] * part['rounds']:,} completions to draw"]


@reinforcement_stage(
    "self_distill",
    version=10,
    outputs=("traces", "checkpoint"),
    loss=TRACES_LOSS,
    limits=_completions,
    check=_check_self_distill,
    compile_ahead="nautile.rl.ahead_of_time:compile_self_distillation",
    rehearsal=partial(_rehearsed_stage, "self_distill"),
)
def self_distill(job: Job) -> None:
    """Sample completions, keep those better than their group's mean, and train on them, weighted by advantage."""
    from nautile.rl.rollouts import load_inputs
    from nautile.rl.self_distillation import SelfDistillation, self_distil

    config = job.part("self_distill", SelfDistillConfig)
    params, inputs, screen = load_inputs(job.inputs, config.problems, config.rollout, None, _problem_seed(job))
    run = SelfDistillation(
        inputs=inputs,
        config=config,
        identity={"execution": job.key},
        work=job.scratch,
        traces=job.output("traces") / "traces.jsonl",
        sampling_seed=job.seed("sampling"),
        emit=job.emit,
        shared_disk=job.shared_disk,
    )
    with rewarding(job, config.reward) as score:
        trained, facts = self_distil(replace(run, score=score), params)
    _describe(job, params, trained, inputs, facts, "traces", screen, reward=config.reward)
