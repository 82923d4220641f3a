"""The catalogue of stages: what each declares for pages, reports, approvals and commands, by its name.

A stage is imported when it is first asked for, by reference, so a module that a stage itself imports can use this one.
"""

import pkgutil
from collections.abc import Callable
from functools import cache
from typing import Any

from nautile.common.errors import ConfigError
from nautile.configs.stages import STAGES
from nautile.tasks.engine.stage import Stage


@cache
def declared(name: str) -> Stage | None:
    """The stage of that name; None if there is none in this installation, as for a run of another one.

    Raises `ConfigError` if its module cannot be imported, or has something else under the name.
    """
    if name not in STAGES:
        return None
    found = resolve(STAGES[name])
    if not isinstance(found, Stage) or found.name != name:
        raise ConfigError(f"stage {name!r}: {STAGES[name]} is no stage of that name")
    return found


def resolve(reference: str) -> Any:
    """What a reference `module:name` names. Raises `ConfigError` if it cannot be imported."""
    try:
        return pkgutil.resolve_name(reference)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{reference!r} cannot be imported ({error})") from error


def stages_with(test: Callable[[Stage], object]) -> list[str]:
    """The names of the stages that pass the test, in the order of the catalogue."""
    return [name for name in STAGES if (stage := declared(name)) and test(stage)]


def page_of(name: str) -> str:
    """The address of the dashboard's page about a stage; empty if it has none, or is not known here."""
    stage = declared(name)
    return stage.page if stage else ""
