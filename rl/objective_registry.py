"""The registry of objectives: how g+ and g-, the gradients of the completions above and below the mean of their group,
become the gradient of an update (paper §4.3).

Each is a function decorated with `objective` that computes the factor on g-, with what other places show of it as data.
Nothing here imports JAX, so that a command can refuse an unknown name at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from nautile.common.errors import ConfigError
from nautile.configs.training import ReasonConfig

EPSILON = 1e-8  # added to ||g-||, which is zero where no completion is below its group's mean

# (||g+||, ||g-||, the settings) -> the factor on g-. The norms are scalars of NumPy or JAX.
Factor = Callable[[Any, Any, "Balance"], Any]


@dataclass(frozen=True)
class Objective:
    """How g+ and g- become the gradient of an update: g+ + f * g-. An entry of `OBJECTIVES`.

    `meaning`: what the factor f does, in words. `by_norms`: f depends on the norms, so that it matters whether they are
    those of a group or of the whole step. `drops_negative`: g- is left out rather than multiplied by zero. `tapered`:
    where the sampler's policy is an older one, in place of the clipped ratio of each token, a completion below the mean
    counts by the ratio of the whole completion, at most 1, and one above it fully.
    """

    name: str
    title: str
    formula: str
    source: str
    meaning: str
    factor: Factor
    by_norms: bool = True
    drops_negative: bool = False
    tapered: bool = False


OBJECTIVES: dict[str, Objective] = {}


def objective(
    name: str, *, title: str, formula: str, source: str, meaning: str, **properties: bool
) -> Callable[[Factor], Factor]:
    """Enter a factor on g- into `OBJECTIVES` under `name`, which `reason.objective` then selects."""

    def enter(factor: Factor) -> Factor:
        OBJECTIVES[name] = Objective(name, title, formula, source, meaning, factor, **properties)
        return factor

    return enter


def objective_named(name: str) -> Objective:
    """The entry of that name. Raises `ConfigError`, which lists the known ones, for another name."""
    if name not in OBJECTIVES:
        raise ConfigError(f"reason.objective: unknown objective {name!r}; the known ones are {', '.join(OBJECTIVES)}")
    return OBJECTIVES[name]


@dataclass(frozen=True)
class Balance:
    """How g+ and g- are combined (paper §4.3): the name of an objective and the settings of its factor.

    `over`: the norms are those of each group, as in the paper, or of the whole step. `negative_weight`: the factor of
    the objective "constant". Raises `ConfigError` for an unknown name.
    """

    name: str = "balanced"
    over: Literal["step", "group"] = "group"
    negative_weight: float = 0.5

    def __post_init__(self) -> None:
        objective_named(self.name)

    @classmethod
    def of(cls, config: ReasonConfig) -> "Balance":
        return cls(config.objective, config.balance_over, config.negative_weight)

    @property
    def objective(self) -> Objective:
        return objective_named(self.name)

    @property
    def by_group(self) -> bool:
        """Whether each group is balanced by itself; a factor that no norm enters is the same for all of them."""
        return self.over == "group" and self.objective.by_norms


@objective(
    "balanced",
    title="gradient-balanced GRPO",
    formula="g+ + ‖g+‖ / (‖g-‖ + ε) · g-",
    source="paper §4.3",
    meaning="the ratio of the norms: both parts have the same norm; above 1 it amplifies the negative part",
)
def _balanced(positive: Any, negative: Any, settings: Balance) -> Any:
    return positive / (negative + EPSILON)


@objective(
    "capped",
    title="gradient-balanced GRPO, never amplified",
    formula="g+ + min(1, ‖g+‖ / (‖g-‖ + ε)) · g-",
    source="the author's train_grpo",
    meaning="the ratio of the norms, at most 1: it only ever damps the negative part",
)
def _capped(positive: Any, negative: Any, settings: Balance) -> Any:
    return (positive / (negative + EPSILON)).clip(max=1.0)


@objective(
    "plain",
    title="plain Dr. GRPO",
    formula="g+ + g-",
    source="Dr. GRPO, arXiv:2503.20783; paper §4.1",
    meaning="1: the policy gradient itself",
    by_norms=False,
)
def _plain(positive: Any, negative: Any, settings: Balance) -> Any:
    return 1.0


@objective(
    "constant",
    title="a constant weight of the negatives",
    formula="g+ + negative_weight · g-",
    source="a control: less of the negative part, with no norm in it (W-REINFORCE, arXiv:2506.01347, weighs the other)",
    meaning="`reason.negative_weight`, the same in every step",
    by_norms=False,
)
def _constant(positive: Any, negative: Any, settings: Balance) -> Any:
    return settings.negative_weight


@objective(
    "positives",
    title="positives alone",
    formula="g+",
    source="RAFT, arXiv:2504.11343",
    meaning="0: completions below the mean of their group are left out",
    by_norms=False,
    drops_negative=True,
)
def _positives(positive: Any, negative: Any, settings: Balance) -> Any:
    return 0.0


@objective(
    "tapered",
    title="tapered off-policy",
    formula="g+ + g-",
    source="TOPR, arXiv:2503.14286",
    meaning="1; off-policy g- has each completion by its probability ratio, at most 1, and nothing is clipped",
    by_norms=False,
    tapered=True,
)
def _tapered(positive: Any, negative: Any, settings: Balance) -> Any:
    return 1.0
