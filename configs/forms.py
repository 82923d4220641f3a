"""Restrictions on runs that are started through Prefect's server, by a form or by anyone who can reach the server.

A form names a configuration that its worker knows, and overrides in the syntax of `--set`. The run has the permissions
and the environment of the worker. So overrides may not change a field that belongs to the worker (its type is
`Worker`): gates, budgets, how processes are started, endpoints and who is asked, local paths, and where metrics go.
`nautile deploy` passes the configuration that it serves to the worker in the environment variable NAUTILE_WORKER, so
that its name means the same on another machine. The gates and budgets of that configuration also hold for the runs of
other configurations that a form names.
"""

import os
from collections.abc import Mapping
from typing import Any, Self

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from nautile.common.errors import ConfigError
from nautile.configs.base import Section, WorkersOwn
from nautile.configs.operation import OperationConfig
from nautile.configs.schema import RunConfig
from nautile.configs.stages import STAGES

WORKER = "NAUTILE_WORKER"
_BUDGETS = {"distill": ("budget_dollars", "budget_tokens"), "evaluate": ("budget_dollars",)}


class ServedConfig(Section):
    """The configuration that a worker serves: its name in forms, its table, and the table of its base configuration."""

    name: str
    table: dict[str, Any]
    base: dict[str, Any]

    @classmethod
    def of(cls, name: str, config: RunConfig, base: RunConfig) -> Self:
        """Two loaded configurations as tables, with what was set: for some fields that decides what others mean."""
        table, base_table = (settings.model_dump(mode="json", exclude_unset=True) for settings in (config, base))
        return cls(name=name, table=table, base=base_table)


def served_here() -> ServedConfig | None:
    """The configuration in NAUTILE_WORKER; None if it is not set. Raises `ConfigError` if it is invalid."""
    text = os.environ.get(WORKER)
    try:
        return ServedConfig.model_validate_json(text) if text else None
    except ValidationError as error:
        raise ConfigError(f"{WORKER} is not a value that `nautile deploy` sets: {error.errors()[0]['msg']}") from None


def is_workers(field: FieldInfo) -> bool:
    """Whether a field belongs to the worker."""
    return any(isinstance(marker, WorkersOwn) for marker in field.metadata)


WORKERS_SECTIONS = tuple(name for name, field in RunConfig.model_fields.items() if is_workers(field))
"""The sections of which a form may change nothing."""


def refuse_in_form(before: Section, after: Section) -> None:
    """Raise `ConfigError` with the path of the first field of the worker's that overrides have changed.

    `before`, `after`: the named configuration without and with the overrides.
    """
    if path := _changed_path(before, after, ""):
        raise ConfigError(not_in_forms(path))


def not_in_forms(path: str) -> str:
    """The message about a field that a form may not set."""
    return f"overrides: {path}: a form may not set it: it comes from the configuration that `nautile deploy` serves"


def with_gates_of(config: RunConfig, served: RunConfig) -> RunConfig:
    """`config` with every approval of both configurations, and with the lower of their budgets."""
    stages: dict[str, Any] = {}
    for stage in STAGES:
        own, other = config.operation.of(stage), served.operation.of(stage)
        at_budget = "pause" if "pause" in (own.at_budget, other.at_budget) else "go_on"
        stages[stage] = own.model_copy(update={"approve": own.approve or other.approve, "at_budget": at_budget})
    operation: OperationConfig = config.operation.model_copy(update=stages)
    sections: dict[str, Any] = {"operation": operation}
    for name, fields in _BUDGETS.items():
        own_section, other_section = getattr(config, name), getattr(served, name)
        if own_section is None or other_section is None:
            continue
        # Zero is no limit.
        limits = {field: [getattr(section, field) for section in (own_section, other_section)] for field in fields}
        lower = {field: min(filter(None, values), default=values[0]) for field, values in limits.items()}
        sections[name] = own_section.model_copy(update=lower)
    return config.model_copy(update=sections)


def _changed_path(before: Any, after: Any, path: str) -> str:
    """The path of the first field of the worker's in `after` that is not as in `before`; empty if there is none.

    An entry of a list may have moved, or be new: its fields of the worker's must then be those of another entry of the
    same list, or have their defaults, which name nothing.
    """
    if isinstance(after, Section):
        for name, field in type(after).model_fields.items():
            value, place = getattr(after, name), f"{path}.{name}" if path else name
            # Of a section that is new, the default: for a field that must be set, pydantic's mark of having none.
            default = field.get_default(call_default_factory=True, validated_data={})
            known = getattr(before, name) if isinstance(before, type(after)) else default
            if is_workers(field):
                if value != known:
                    return place
            elif changed := _changed_path(known, value, place):
                return changed
    elif isinstance(after, Mapping):
        for name, value in after.items():
            known = before.get(name) if isinstance(before, Mapping) else None
            if changed := _changed_path(known, value, f"{path}.{name}"):
                return changed
    elif isinstance(after, (list, tuple)):
        entries = list(before) if isinstance(before, (list, tuple)) else []
        for number, value in enumerate(after):
            # First the entry at the same place, which the message is about.
            known_entries = [*entries[number : number + 1], *entries, None]
            places = [_changed_path(known, value, f"{path}.{number}") for known in known_entries]
            if all(places):
                return places[0]
    return ""
