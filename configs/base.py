"""The base of every configuration section: frozen, unknown keys refused, one canonical form.

The canonical JSON (sorted keys, no spaces, ASCII) is what content keys hash, so it must not depend on the platform,
the process or the order in which a file lists its keys.
"""

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat


class Section(BaseModel):
    """A frozen part of the configuration; an unknown key or a value out of range is refused at load."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)


def canonical(value: Any) -> str:
    """The one JSON text of `value` (a `Section`, or plain JSON data) that keys and fingerprints are taken of."""
    plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def fingerprint(value: Any) -> str:
    """sha256 of the canonical JSON, as 64 hexadecimal digits."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


Share = Annotated[float, Field(ge=0.0, le=1.0)]


class TaskConfig(Section):
    """One generator of verifiable problems: its name in the registry, its share of a draw, its own parameters."""

    name: str
    weight: PositiveFloat = 1.0
    parameters: dict[str, int | float | str] = {}


class OptimizerConfig(Section):
    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: PositiveFloat = 1e-3
    final_learning_rate: NonNegativeFloat = 1e-5
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: NonNegativeInt = 0
    decay_share: Share = 0.2  # wsd only: the share of steps spent going down
    beta1: Share = 0.9
    beta2: Share = 0.99
    weight_decay: NonNegativeFloat = 0.01
    clip: PositiveFloat = 1.0
