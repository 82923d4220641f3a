"""`@stage`: a function of a job becomes a step of the pipeline, reused by its content key or run in a child process.

    @stage("pretrain", version=1, outputs=("checkpoint",), accelerator=True)
    def pretrain(job: Job) -> None: ...

The decorated name is a `Stage`; it must stay a module-level name, for the child process finds it by import. This file
is imported by every child, so it loads neither Prefect nor DuckDB.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from configs.operation import LaunchConfig, TelemetryConfig
from store.manifest import stage_key
from tasks.engine.fanout import Round
from tasks.engine.job import Job

if TYPE_CHECKING:
    from prefect import Task


Work = Callable[[Job], None]


@dataclass(frozen=True)
class RunContext:
    """Which run a stage works for. `label` tells apart several uses of one stage in a run."""

    run_id: str
    store_root: str
    force: bool = False
    label: str = ""
    config: str = ""  # the configuration's name, for the catalog
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    resume: str = ""  # the command that goes on after a failure


@dataclass(frozen=True)
class Stage:
    """One kind of step: its name, the version of its code's meaning, and the kinds of artifact it writes."""

    name: str
    version: int
    outputs: tuple[str, ...]
    work: Work
    optional: tuple[str, ...] = ()  # those of `outputs` that a section may leave unwritten
    accelerator: bool = False
    together: bool = False  # several processes can do it as one
    rounds: tuple[Round, ...] = ()  # what is done unit by unit before `work`

    def key(self, section: dict[str, Any], inputs: dict[str, str]) -> str:
        """The content key; `inputs` maps names to `kind/<full key>` (`Artifact.full_id`)."""
        return stage_key(self.name, self.version, section, inputs)

    def run(self, section: dict[str, Any], inputs: dict[str, str], context: RunContext) -> dict[str, str]:
        """Reuse, or work in a child process and publish. Returns kind -> artifact id. One attempt; needs no Prefect.

        `inputs` maps names to artifact ids, short or full. Raises `ConfigError`, `Retryable`, `StageCrash`, and
        `StageCancelled` (or the `KeyboardInterrupt` it met) after the child and its children are gone.
        """
        from tasks.engine.attempt import run_stage

        return run_stage(self, section, inputs, context)

    def task(self) -> "Task[..., dict[str, str]]":
        """`run` as a Prefect task: retries, task run name, progress, and a page in Prefect about how it ended."""
        from tasks.engine.prefect_task import task_of

        return task_of(self)

    def __call__(self, section: dict[str, Any], inputs: dict[str, str], context: RunContext) -> dict[str, str]:
        """The Prefect task, run inside a flow."""
        return self.task()(section, inputs, context)


def stage(
    name: str,
    *,
    version: int,
    outputs: tuple[str, ...],
    optional: tuple[str, ...] = (),
    accelerator: bool = False,
    together: bool = False,
    rounds: tuple[Round, ...] = (),
) -> Callable[[Work], Stage]:
    """Make `work(job)` a `Stage`. Raise `version` when what the code writes for a given section changes.

    `rounds` come first, each unit of them in a process of its own; `work` then reads what they left
    (`tasks.engine.fanout`).
    """
    for kind in (name, *outputs):
        if not re.fullmatch(r"[a-z][a-z0-9_]*", kind):
            raise ValueError(f"stage {name!r}: {kind!r} is not a lower-case name")
    if not outputs or not set(optional) <= set(outputs):
        raise ValueError(f"stage {name!r}: it needs outputs, and `optional` names some of them")

    names = [step.name for step in rounds]
    if len(set(names)) < len(names) or not all(re.fullmatch(r"[a-z][a-z0-9_]*", step) for step in names):
        raise ValueError(f"stage {name!r}: its rounds have lower-case names, each its own; they are {names}")
    if rounds and together:
        raise ValueError(f"stage {name!r}: rounds are for units that need no others; `together` is for the opposite")

    def decorate(work: Work) -> Stage:
        return Stage(name, version, outputs, work, optional, accelerator, together, rounds)

    return decorate
