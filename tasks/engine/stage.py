"""`@stage`: declare a function of a `Job` as a stage of the pipeline.

    @stage("pretrain", version=1, outputs=("checkpoint",), accelerator=True)
    def pretrain(job: Job) -> None: ...

The decorated name is a `Stage`, which is plain data; `tasks.engine.attempt.run_stage` runs it. It must be a
module-level name, because the child process imports it. Every child imports this file, so it loads neither Prefect nor
DuckDB.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nautile.configs.keys import key_fields
from nautile.configs.operation import LaunchConfig, StageOperation, TelemetryConfig
from nautile.store.manifest import stage_key
from nautile.tasks.engine.fanout.items import FanOut
from nautile.tasks.engine.job import Job

Work = Callable[[Job], None]
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class RunContext:
    """The run that a stage works for. `label` identifies the step where a run has several of one stage."""

    run_id: str
    store_root: str
    force: bool = False
    label: str = ""
    config: str = ""  # name of the configuration, for the catalog
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    operation: StageOperation = field(default_factory=StageOperation)
    resume: str = ""  # shell command that continues the run after a failure
    limit: str = ""  # concurrency limit of the Prefect server, of which a slot is held while working; empty: none
    slots: tuple[str, ...] = ()  # without `limit`: lock files, one of which is held while working
    sweep: str = ""  # id of the `nautile sweep` command that started this run, if one did
    ask_again: bool = False  # with `force`: pay again for replies that other executions have paid for


@dataclass(frozen=True)
class Stage:
    """A named kind of step: its version, the kinds of artifact it writes, and its function.

    `version` changes when the code writes something else for the same section (see `stage`).
    """

    name: str
    version: int
    outputs: tuple[str, ...]
    work: Work
    optional: tuple[str, ...] = ()  # outputs that a section may leave unwritten
    accelerator: bool = False
    multihost: bool = False  # several processes, one per host, can run it together
    fan_outs: tuple[FanOut, ...] = ()  # run item by item before `work`
    on_demand: Mapping[str, str] = field(default_factory=dict, hash=False)  # by kind of input; see `stage`

    def key(self, section: dict[str, Any], inputs: dict[str, str]) -> str:
        """The content key, from the section's semantic fields; `inputs`: name -> `kind/<full key>` (`full_id`)."""
        return stage_key(self.name, self.version, key_fields(section), inputs)


def stage(
    name: str,
    *,
    version: int,
    outputs: tuple[str, ...],
    optional: tuple[str, ...] = (),
    accelerator: bool = False,
    multihost: bool = False,
    fan_outs: tuple[FanOut, ...] = (),
    on_demand: Mapping[str, str] | None = None,
) -> Callable[[Work], Stage]:
    """Turn `work(job)` into a `Stage`. Increase `version` when the code writes something else for the same section.

    `optional`: outputs that may stay empty. `multihost`: the stage can run in several processes, one per host.

    `on_demand`: kind of input -> prefix. If an input of that kind lies only at the store's remote, its files whose
    names start with the prefix are fetched when `Job.remote_files` opens them.

    `fan_outs` run first, each of their items in its own process; `work` then reads what they wrote
    (`tasks.engine.fanout.items`).
    """
    # Names become parts of paths in the store and of event files.
    for kind in (name, *outputs):
        if not _NAME.fullmatch(kind):
            raise ValueError(f"stage {name!r}: {kind!r} is not a lower-case name")
    if not outputs or not set(optional) <= set(outputs):
        raise ValueError(f"stage {name!r}: it needs outputs, and `optional` must name some of them")

    names = [fan_out.name for fan_out in fan_outs]
    if len(set(names)) < len(names) or not all(map(_NAME.fullmatch, names)):
        raise ValueError(f"stage {name!r}: its fan-outs need distinct lower-case names; they are {names}")
    if fan_outs and multihost:
        raise ValueError(
            f"stage {name!r}: it declares both `fan_outs`, for independent items, and `multihost`, for processes that "
            "work together; use one of them"
        )

    def decorate(work: Work) -> Stage:
        return Stage(name, version, outputs, work, optional, accelerator, multihost, fan_outs, on_demand or {})

    return decorate
