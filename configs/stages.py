"""The names of all stages of the pipeline: the shipped ones, and those of plug-ins; where each is defined.

A plug-in's stage is an entry point of the group `nautile.stages` (name = "module:name"), or an entry of the environment
variable NAUTILE_PLUGINS (`module:name`, separated by commas). They are known when this file is imported, because the
configuration's sections and the forms are made from them; what a stage declares is loaded when it is used.
"""

import os
import pkgutil
from importlib.metadata import entry_points
from typing import Any

from nautile.common.errors import ConfigError

PLUGINS = "NAUTILE_PLUGINS"
# Name -> module in `tasks`.
SHIPPED = {
    "held_out": "evaluate", "ingest": "ingest", "index": "distill", "distill": "distill", "pretrain": "pretrain",
    "align": "reinforce", "reason": "reinforce", "self_distill": "reinforce",
    "evaluate": "evaluate", "report": "report",
}  # fmt: skip


def _references() -> dict[str, str]:
    found = {name: f"nautile.tasks.{module}:{name}" for name, module in SHIPPED.items()}
    plugins = [(entry.name, entry.value) for entry in entry_points(group="nautile.stages")]
    plugins += [(value.rpartition(":")[2], value) for value in os.environ.get(PLUGINS, "").split(",") if value]
    for name, reference in plugins:
        if found.setdefault(name, reference) != reference:
            raise ConfigError(f"stage {name!r} of {reference}: {found[name]} is a stage of that name")
    return found


STAGES = _references()
"""Name -> reference of its `Stage` (`tasks.engine.stage`), in the order in which lists show them."""
PLUGIN_STAGES = tuple(name for name in STAGES if name not in SHIPPED)


def plugin_section(name: str) -> Any:
    """The model of the section of a plug-in's stage; None if it declares none, or if no plug-in has the name."""
    try:
        return pkgutil.resolve_name(STAGES[name]).section if name in PLUGIN_STAGES else None
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"stage {name!r}: {STAGES[name]!r} cannot be imported ({error})") from error
