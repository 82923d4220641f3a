"""The cells of bench/rl/study.py in the order in which they run, each as its changes to a common setting.

A cell is one training from the start S, with one seed. The experiments E0 to E7 ask where plain GRPO could fail while
the gradient-balanced form does not; docs/results/rl.md has the question, the decision rule and the answers.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from configs.base import OptimizerConfig
from configs.training import PolicyConfig, RolloutConfig
from rl.objective_registry import Balance

PROMPTS, GROUP, STEPS = 16, 8, 40
SEEDS = (1, 2, 3, 4, 5)

PLAIN, STEP, EACH_GROUP = {"mode": "plain"}, {"mode": "balanced"}, {"mode": "balanced", "over": "group"}
CAP, POSITIVES = {"mode": "capped"}, {"mode": "positives"}


@dataclass(frozen=True)
class Cell:
    """One training; the defaults are the common setting: on-policy Dr. GRPO, one pass, no KL term.

    `push`: β of the author's KL term, β (log π - c), whose gradient lowers the probability of every sampled completion,
    whatever the reference. `stale_spectra`: the sampler keeps the start's convolution, θ, ω, λ, γ, β and η, as the
    author's cache did.
    """

    experiment: str
    mode: str  # the name of an objective
    over: Literal["step", "group"] = "step"
    rate: float = 1e-4
    seed: int = 1
    steps: int = STEPS
    prompts: int = PROMPTS
    group: int = GROUP
    passes: int = 1
    sync_every: int = 1
    ratio: bool = True
    advantage: Literal["dr", "std"] = "dr"
    aggregate: Literal["group_tokens", "sequence_mean"] = "group_tokens"
    kl: float = 0.0
    push: float = 0.0
    temperature: float = 1.0
    top_k: int = 0
    stale_spectra: bool = False
    train: tuple[str, ...] = ()

    @property
    def setting(self) -> str:
        """The fields that differ from the common setting, without mode and seed; shared by the arms of a setting."""
        changes = [
            f"{field.name}={_text(getattr(self, field.name))}"
            for field in fields(self)
            if field.name not in ("experiment", "mode", "over", "rate", "seed")
            and getattr(self, field.name) != field.default
        ]
        return " ".join([f"rate={self.rate:g}", *changes])

    @property
    def arm(self) -> str:
        """The mode, and for the paper's rule whether it balances a step or each group."""
        # The names under which the results were published.
        return {"balanced": f"balanced-{self.over}", "capped": "cap"}.get(self.mode, self.mode)

    @property
    def name(self) -> str:
        """Identifies the cell in the results."""
        return f"{self.experiment} {self.arm} {self.setting} seed={self.seed}"

    @property
    def balance(self) -> Balance:
        """The balance. Plain GRPO is also computed from its two parts, with factor 1, so that their norms are known."""
        return Balance(self.mode, self.over)

    @property
    def policy(self) -> PolicyConfig:
        """The learner's settings: Adam as in bench/rl/table1.toml, five updates of warm-up, a constant rate."""
        return PolicyConfig(
            steps=self.steps, kl=self.kl, advantage=self.advantage, aggregate=self.aggregate, ratio=self.ratio,
            inner_epochs=self.passes, sync_every=self.sync_every, micro_rows=4, refill=0, train=self.train,
            optimizer=OptimizerConfig(
                learning_rate=self.rate, schedule="constant", warmup_steps=5, beta2=0.98, weight_decay=0.0
            ),
        )  # fmt: skip

    @property
    def rollout(self) -> RolloutConfig:
        """How its completions are drawn."""
        return RolloutConfig(
            prompts=self.prompts, group=self.group, prompt_length=48, max_tokens=48,
            temperature=self.temperature, top_k=self.top_k,
        )  # fmt: skip


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return "+".join(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


# E0: one draw each of groups of 4, 8 and 16 at the start.
PREMISE = [Cell("E0", "plain", group=group, prompts=prompts) for group, prompts in ((4, 96), (8, 64), (16, 48))]


def screen() -> Iterator[Cell]:
    """Every cell with the first seed, the most decisive ones first."""
    yield from _cells("E2", PLAIN, STEP, POSITIVES, EACH_GROUP)  # the common setting, which all others compare with
    yield from _cells("E7", PLAIN, STEP, POSITIVES, stale_spectra=True)
    for rate in (1e-4, 5e-5):
        yield from _cells("E2", PLAIN, STEP, EACH_GROUP, POSITIVES, rate=rate, passes=4, ratio=False)
    for rate in (1e-4, 5e-5):
        yield from _cells("E2", PLAIN, STEP, EACH_GROUP, POSITIVES, rate=rate, sync_every=10, ratio=False)
    yield from _cells("E2", PLAIN, STEP, EACH_GROUP, POSITIVES, rate=5e-5)
    for temperature, top_k in ((1.0, 0), (0.7, 50)):
        for push in (0.1, 0.05):
            yield from _cells("E3", PLAIN, CAP, push=push, temperature=temperature, top_k=top_k)
    # Added after the stale sampler had turned out to be harmful: does the ratio repair it?
    yield from _cells("E2", PLAIN, STEP, sync_every=10)
    standard = {"advantage": "std", "aggregate": "sequence_mean", "kl": 0.04}
    for passes in (1, 4):
        yield from _cells("E1", PLAIN, STEP, EACH_GROUP, POSITIVES, passes=passes, **standard)


def later() -> Iterator[Cell]:
    """The cells that run after all of `screen` and the further seeds of its results."""
    small = {"prompts": 4, "group": 6, "steps": 4 * STEPS}
    yield from _cells("E4", PLAIN, STEP, EACH_GROUP, CAP, **small)
    yield from _cells("E6", PLAIN, STEP, train=("blocks",))
    yield from _cells("E5", PLAIN, STEP, EACH_GROUP, rate=3e-5, steps=500)


def repeated(cells: Iterable[Cell]) -> Iterator[Cell]:
    """The cells with each further seed."""
    first_seed_cells = list(cells)
    for seed in SEEDS[1:]:
        yield from (replace(cell, seed=seed) for cell in first_seed_cells)


def _cells(experiment: str, *modes: dict[str, Any], **changes: Any) -> Iterator[Cell]:
    yield from (Cell(experiment, **mode, **changes) for mode in modes)
