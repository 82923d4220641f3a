"""`@stage`: declare a function of a `Job` as a stage of the pipeline.

    @stage("pretrain", version=1, outputs=("checkpoint",), accelerator=True)
    def pretrain(job: Job) -> None: ...

The decorated name is a `Stage`, which is plain data; `tasks.engine.attempt.run_stage` runs it. It must be a
module-level name, because the child process imports it. Every child imports this file, so it loads neither Prefect nor
DuckDB. Pages, reports, approvals and commands find all that they show of a stage by its name (`declared`), which
imports the stage when it is first asked for, so a module that a stage itself imports can use this one.
"""

import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from nautile.common.errors import ConfigError
from nautile.common.extras import missing_extra
from nautile.configs.base import Section
from nautile.configs.endpoint import EndpointConfig
from nautile.configs.keys import key_fields
from nautile.configs.operation import LaunchConfig, StageOperation, TelemetryConfig
from nautile.configs.plugins import PLUGINS
from nautile.configs.stages import STAGES
from nautile.store.manifest import stage_key
from nautile.tasks.engine.fanout import FanOut
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
class Curve:
    """A chart of metrics that share a unit and a scale.

    `question`: the heading that it stands under, on a page that asks some. `in_report`: also in the report.
    """

    title: str
    metrics: tuple[str, ...]
    unit: str = ""
    question: str = ""
    in_report: bool = True


@dataclass(frozen=True)
class Calls:
    """Requests of a step to an endpoint: expected number, maximum, and the maximum (tokens in, tokens out) of one."""

    purpose: str
    endpoint: str
    expected: float
    most: int
    tokens: tuple[int, int]


def _not_decorated(job: Job) -> None:
    raise TypeError(f"stage {job.stage!r} has no function")


@dataclass(frozen=True)
class Stage:
    """A named kind of step: its version, the kinds of artifact it writes, its function, and what is shown of it.

    `version` increases when the code writes something else for the same section; a plug-in's stage without one has the
    digest of its source in its key. `optional`: outputs that a section may leave unwritten. `multihost`: several
    processes, one per host, can run it together. `fan_outs` run first, each of their items in its own process; `work`
    then reads what they wrote (`tasks.engine.fanout`). `on_demand`: kind of input -> prefix. If an input of that kind
    lies only at the store's remote, its files whose names start with the prefix are fetched when `Job.remote_files`
    opens them.

    The rest is for other places: data, small functions, or the reference (`module:name`) of what takes long to import.

    - `section`: the model of `[NAME]` in a configuration; only a plug-in's stage needs it (`configs.schema`).
    - `trains`: its checkpoint is the model after one more stage of training, which evaluations are listed by.
    - `page`: the dashboard's page with its curves; `samples`: the one that shows its texts; `heading`: the report's
      section with its curves and figures. `curves` are drawn in this order.
    - `limits`: the step's section -> what bounds its work, in the words of an approval.
    - `calls`: (section, endpoints) -> the requests of the step, for the forecast of its cost.
    - `check`: raises `ConfigError` for a part NAME of the section that cannot work, before anything runs.
    - `compile_ahead`: reference of (model, tokenizer, part NAME), which compiles its programs while cores are idle.
    - `rehearsal`: the whole configuration (JSON data) -> the parts, by name, that a rehearsal has otherwise: few steps,
      and few rows of what is read (`flows.rehearsal`). {}: it is small. None: not declared, so as configured.
    """

    name: str
    version: int | None = None
    outputs: tuple[str, ...] = ()
    work: Work = _not_decorated
    optional: tuple[str, ...] = ()
    accelerator: bool = False
    multihost: bool = False
    fan_outs: tuple[FanOut, ...] = ()
    on_demand: Mapping[str, str] = field(default_factory=dict, hash=False)

    section: type[Section] | None = None
    trains: bool = False
    page: str = ""
    samples: str = "samples"
    heading: str = ""
    curves: tuple[Curve, ...] = ()
    limits: Callable[[Mapping[str, Any]], list[str]] = lambda section: []
    calls: Callable[[Mapping[str, Any], Mapping[str, EndpointConfig]], Iterable[Calls]] = lambda section, endpoints: ()
    check: Callable[[Any], None] = lambda part: None
    compile_ahead: str = ""
    rehearsal: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        # Names become parts of paths in the store and of event files.
        for kind in (self.name, *self.outputs):
            if not _NAME.fullmatch(kind):
                raise ValueError(f"stage {self.name!r}: {kind!r} is not a lower-case name")
        if not self.outputs or not set(self.optional) <= set(self.outputs):
            raise ValueError(f"stage {self.name!r}: it needs outputs, and `optional` must name some of them")
        names = [fan_out.name for fan_out in self.fan_outs]
        if len(set(names)) < len(names) or not all(map(_NAME.fullmatch, names)):
            raise ValueError(f"stage {self.name!r}: its fan-outs need distinct lower-case names; they are {names}")
        if self.fan_outs and self.multihost:
            raise ValueError(
                f"stage {self.name!r}: it declares both `fan_outs`, for independent items, and `multihost`, for "
                "processes that work together; use one of them"
            )
        if self.curves and not (self.page and self.heading):
            raise ValueError(f"stage {self.name!r}: its curves need a `page` of the dashboard and a report's `heading`")

    def __call__(self, work: Work) -> "Stage":
        """The stage with its function: what the decorator returns."""
        return replace(self, work=work)

    def key(self, section: dict[str, Any], inputs: dict[str, str]) -> str:
        """The content key, from the section's semantic fields; `inputs`: name -> `kind/<full key>` (`full_id`)."""
        return stage_key(self.name, self._code_version, key_fields(section), inputs)

    @property
    def number(self) -> int:
        """The version for manifests: a number of the source's digest where none is declared."""
        version = self._code_version
        return version if isinstance(version, int) else int(version[:7], 16)

    @property
    def _code_version(self) -> int | str:
        if self.version is not None:
            return self.version
        if self.name not in STAGES.plug_ins:
            raise ConfigError(f"stage {self.name!r} declares no `version`, and is none of {PLUGINS}")
        return STAGES.version(self.name)


stage = Stage


def budget_limit(part: Mapping[str, Any]) -> str:
    """The budget in a part of a section, in the words of an approval."""
    limits = []
    if dollars := part.get("budget_dollars"):
        limits.append(f"${dollars:,.2f}")
    if tokens := part.get("budget_tokens"):
        limits.append(f"{tokens:,} tokens")
    return f"at most {' and '.join(limits)}" if limits else "no budget is set"


@cache
def declared(name: str) -> Stage | None:
    """The stage of that name; None if there is none in this installation, as for a run of another one.

    Raises `ConfigError` if its module cannot be imported, or has something else under the name.
    """
    if name not in STAGES:
        return None
    found = STAGES[name]
    if not isinstance(found, Stage) or found.name != name:
        raise ConfigError(f"stage {name!r}: {STAGES.reference(name)} is no stage of that name")
    return found


def resolve(reference: str) -> Any:
    """What a reference `module:name` names. Raises `ConfigError` if it cannot be imported."""
    try:
        return pkgutil.resolve_name(reference)
    except (ImportError, AttributeError, ValueError) as error:
        raise missing_extra(error) or ConfigError(f"{reference!r} cannot be imported ({error})") from error


def stages_with(test: Callable[[Stage], object]) -> list[str]:
    """The names of the stages that pass the test, in the order of the catalogue."""
    return [name for name in STAGES if (stage := declared(name)) and test(stage)]


def page_of(name: str) -> str:
    """The address of the dashboard's page about a stage; empty if it has none, or is not known here."""
    stage = declared(name)
    return stage.page if stage else ""
