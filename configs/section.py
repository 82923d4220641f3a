"""The base of every configuration section: frozen, unknown keys refused, one canonical form.

The canonical JSON (sorted keys, no spaces, ASCII) is what content keys hash, so it must not depend on the platform,
the process or the order in which a file lists its keys.
"""

import hashlib
import json
from typing import Any

from pydantic import BaseModel, ConfigDict


class ConfigError(ValueError):
    """Bad input from the operator: one message that names the field, file or artifact. The CLI exits with code 2."""


class Retryable(RuntimeError):
    """A failure that may pass by itself (a broken connection, an outage, a preemption): the stage is tried again."""


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
