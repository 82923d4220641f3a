"""Base of all configuration sections: the frozen model class, canonical JSON for keys, and shared field types.

Content keys hash the canonical JSON (sorted keys, no spaces, ASCII), so it must not depend on the platform, the
process or the order of the keys in a file.
"""

import hashlib
import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat


class Section(BaseModel):
    """A frozen section of the configuration; unknown keys and values out of range raise an error when it is loaded."""

    # Built when first used: a validator of each section, and again in each that holds it, is 0.05 s of every process.
    # Errors do not repeat the input, which may be a key in the wrong place.
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        validate_default=True,
        defer_build=True,
        hide_input_in_errors=True,
    )


class NotInKey:
    """Marks a field that changes how a stage works or what it costs, but not what it writes."""


Value = TypeVar("Value")
Operational = Annotated[Value, NotInKey()]
"""Type of a field that is not hashed into keys: `concurrency: Operational[PositiveInt]`. All others are semantic."""


class WorkersOwn:
    """Marks a field that belongs to the machine that does the work: a form may not set it (`configs.forms`)."""


Worker = Annotated[Value, WorkersOwn()]
"""Type of a gate, a budget, an address, a local path, or a choice of who is sent what: `path: Worker[str] = ""`.

Runs that are started through Prefect's server have its value from the worker's configuration, with all that is in it.
"""


def canonical(value: Any) -> str:
    """The canonical JSON text of a `Section` or of JSON data, which keys and fingerprints hash."""
    plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def fingerprint(value: Any) -> str:
    """The sha256 of the canonical JSON, as 64 hexadecimal digits."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


Delimiter = Annotated[str, Field(pattern=r"^(,|;|\||\t)$")]  # between the columns of a CSV
Encoding = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$", max_length=40)]  # of a text file, by its name in Python
Share = Annotated[float, Field(ge=0.0, le=1.0)]

# Strict, because otherwise `true` would be read as 1 and 2.0 as 2. Below 2**31, which JAX and every vendor's API take.
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
SeedName = Literal["data", "weights", "sampling", "evaluation"]
TRAINING_SEEDS = ("data", "weights", "sampling")  # of `[seeds]`
TrainOn = Literal["replies", "all"]
"""Which targets of a source are trained on: those of the replies alone, or those of the prompts as well."""


class TaskConfig(Section):
    """One generator of verifiable problems (`data/sources/reasoning_gym.py`)."""

    name: str  # in the registry of generators
    weight: PositiveFloat = 1.0  # its share of a draw, relative to the weights of the others
    parameters: dict[str, int | float | str] = {}  # of this generator, such as the number of digits


class OptimizerConfig(Section):
    """The optimizer and its learning-rate schedule."""

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: PositiveFloat = 1e-3  # the highest, reached at the end of the warm-up
    final_learning_rate: NonNegativeFloat = 1e-5  # at the last step; unused by "constant"
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"  # wsd: warm-up, stable, decay
    warmup_steps: NonNegativeInt = 0  # updates before the peak; the rate rises linearly, from peak / (warmup_steps + 1)
    decay_share: Share = 0.2  # wsd only: the share of all steps in which the rate falls
    beta1: Share = 0.9  # decay of the mean of gradients
    beta2: Share = 0.99  # decay of the mean of squared gradients
    weight_decay: NonNegativeFloat = 0.01
    clip: PositiveFloat = 1.0  # largest norm of the whole gradient
    grid_rate: PositiveFloat | None = None  # experimental: factor on the learning rate of the spectral grid θ; None: 1
