"""The names of all stages of the pipeline: the shipped ones, and those of plug-ins; where each is defined.

They are known when this file is imported, because the configuration's sections and the forms are made from them; what a
stage declares is loaded when it is used.
"""

from typing import Any

from nautile.configs.plugins import Registry

# The stages that train, each the checkpoint of the one before.
TRAINED = ("pretrain", "supervise", "align", "reason", "self_distill")
# Name -> module in `tasks`.
_MODULES = {
    "held_out": "evaluate", "tokenizer": "tokenizer",
    "ingest": "ingest", "index": "distill", "distill": "distill", "pretrain": "pretrain", "supervise": "supervise",
    "align": "reinforce", "reason": "reinforce", "self_distill": "reinforce",
    "evaluate": "evaluate", "report": "report",
}  # fmt: skip

STAGES: Registry[Any] = Registry(
    "stages",
    "nautile.tasks.engine.stage:Stage",
    {name: f"nautile.tasks.{module}:{name}" for name, module in _MODULES.items()},
)
"""Name -> `Stage` (`tasks.engine.stage`), in the order in which lists show them."""


def plugin_section(name: str) -> Any:
    """The model of the section of a plug-in's stage; None if it declares none, or if no plug-in has the name."""
    return STAGES[name].section if name in STAGES.plug_ins else None
