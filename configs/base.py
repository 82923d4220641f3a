"""What the sections of the configuration share: the frozen base class, its canonical JSON, and types used by several.

The canonical JSON (sorted keys, no spaces, ASCII) is what content keys hash, so it must not depend on the platform,
the process or the order in which a file lists its keys.
"""

import hashlib
import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat


class Section(BaseModel):
    """A frozen part of the configuration; an unknown key or a value out of range is refused at load."""

    # Built when first used: a validator of each section, and again in each that holds it, is 0.05 s of every process.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, defer_build=True)


def refuse_removed(section: str, values: Any, removed: tuple[str, ...]) -> None:
    """Raise `ValueError` if `values`, a section as the operator wrote it, sets an option that was removed."""
    for name in removed if isinstance(values, dict) else ():
        if name in values:
            raise ValueError(f"{section}.{name} was removed, and nothing replaces it: delete the key")


class NotInKey:
    """Marks a field that changes how or at what price a stage works, and not what it writes."""


Value = TypeVar("Value")
Operational = Annotated[Value, NotInKey()]
"""The type of a field that no key contains: `concurrency: Operational[PositiveInt]`. Every other field is semantic."""


def canonical(value: Any) -> str:
    """The JSON text of `value` (a `Section`, or plain JSON data) that keys and fingerprints hash."""
    plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def fingerprint(value: Any) -> str:
    """sha256 of the canonical JSON, as 64 hexadecimal digits."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


Share = Annotated[float, Field(ge=0.0, le=1.0)]


class TaskConfig(Section):
    """One generator of verifiable problems (`data/sources/reasoning_gym.py`)."""

    name: str  # in the registry of generators
    weight: PositiveFloat = 1.0  # its share of a draw, relative to the weights of the others
    parameters: dict[str, int | float | str] = {}  # its own, such as the number of digits


class OptimizerConfig(Section):
    """The optimizer and the schedule of its learning rate."""

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: PositiveFloat = 1e-3  # the highest, reached at the end of the warm-up
    final_learning_rate: NonNegativeFloat = 1e-5  # at the last step; unused by "constant"
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"  # wsd: warm-up, stable, decay
    warmup_steps: NonNegativeInt = 0  # updates over which the rate rises linearly from zero
    decay_share: Share = 0.2  # wsd only: the share of all steps in which the rate falls
    beta1: Share = 0.9  # decay of the mean of gradients
    beta2: Share = 0.99  # decay of the mean of squared gradients
    weight_decay: NonNegativeFloat = 0.01
    clip: PositiveFloat = 1.0  # largest norm of the whole gradient
    grid_rate: PositiveFloat | None = None  # factor on the rate of the spectral grid θ, of an experiment; None: 1
