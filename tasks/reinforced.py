"""What the three reinforcement stages declare alike: how they run, and what is shown of them (`tasks.engine.stage`)."""

from collections.abc import Mapping
from typing import Any

from nautile.common.text import counted
from nautile.tasks.engine.stage import Curve, Stage

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
        Curve("length of completions", ("length",), "tokens", _SOUND),
        Curve("rollouts that end", ("truncated_share", "finished_thinking_share"), "share", _SOUND),
        Curve("groups that teach nothing", ("zero_signal_share", "mastered_share", "dropped_share"), "share", _SOUND),
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


def steps_and_completions(part: Mapping[str, Any]) -> list[str]:
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
