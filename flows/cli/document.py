"""Generator of docs/commands.md: every command with its options, and the fields of its `--json` output.

Run it with `python -m nautile.flows.cli.document > docs/commands.md`. A test checks that the commands print the types
of `OUTPUTS`. Commands that print the content of an artifact or a measurement (`plan`, `evaluate`, `bench`, `tune` …)
are not listed: their fields may change at any time.
"""

import sys
from collections.abc import Iterator
from typing import Any, Literal

import typer
from pydantic import BaseModel, ConfigDict, JsonValue, TypeAdapter

from nautile.common.text import markdown_table
from nautile.flows.cli.main import PANELS, app
from nautile.flows.cli.terminal import JSON_VERSION as VERSION


class Output(BaseModel):
    """An object of an output. Fields that are not listed are errors."""

    model_config = ConfigDict(extra="forbid")


class ProgressOutput(Output):
    done: float | None = None
    total: float | None = None
    unit: str | None = None
    note: str | None = None


class ChangeOutput(Output):
    field: str  # its path, as --set takes it
    before: JsonValue
    after: JsonValue


class RunScore(Output):
    after: str  # the stage
    benchmark: str
    accuracy: float  # strict, by generation, 0 to 1
    over: str | None  # the stage before it that was evaluated
    gain: float | None  # over that stage; null if the two did not grade equally many samples


class RunOutput(Output):
    id: str
    name: str
    config: str
    # silent: it began on another machine, and nothing was heard of it for two days
    # queued: it waits in the server of `nautile up` for a process, and its steps are not known yet
    state: Literal["queued", "running", "waiting", "done", "failed", "cancelled", "interrupted", "silent"]
    begun: str  # of a queued run: when it was due
    ended: str | None
    seconds: float | None  # wall time from its first start to its end, over restarts; of a live run until now
    score: RunScore | None  # after the last stage that was evaluated
    done: int  # steps that are done or reused
    steps: int  # steps of the plan
    share: float | None  # completed share of the run, 0 to 1
    seconds_left: float | None  # without the steps whose time is unknown; null unless it is running
    steps_without_time: int | None  # unfinished steps whose time is unknown
    changes: list[ChangeOutput]  # from the configuration that its own extends
    question: str | None  # the approval that it waits for
    answer: str | None  # the command that approves it
    resume: str | None  # the command that resumes it; null if it is done
    error: str | None


class StepOutput(Output):
    label: str  # evaluate:align
    state: Literal["made", "damaged", "running", "waiting", "failed", "interrupted", "not made"]
    key: str
    artifacts: list[str]  # ids
    start: str | None  # id of the checkpoint that `start` sets in place of that of the step before
    progress: ProgressOutput
    upload: str | None = None  # of unfinished work: when it was last sent to the remote, and why not since
    started: str | None  # of the last attempt
    seconds: float | None  # of the last attempt; of all attempts if the step of a run has ended
    error: str | None
    # Only of the steps of a run:
    outcome: str | None = None  # done, reused, running, waiting, failed, cancelled, interrupted, coming, not started
    attempts: int | None = None
    calls: int | None = None
    cached_calls: int | None = None  # calls answered from the store
    dollars: float | None = None
    chip_hours: float | None = None  # of accelerators; null on a CPU
    chip_dollars: float | None = None  # null where no price is known
    longer_than: float | None = None  # seconds of its last execution, if a running step takes longer
    warnings: list[str] = []  # what its curves do that they should not, a sentence each
    run: RunOutput | None = None


class Reason(Output):
    label: str
    state: Literal["made", "not made"]
    nearest: str | None  # id of the artifact that the step is compared with
    differences: list[str]
    inputs: list[str]


class ArtifactOutput(Output):
    id: str
    stage: str
    bytes: int
    files: int
    created: str
    superseded: int  # 0: current; else the number of the replaced artifact of this key, as in the id
    key: str
    execution: str
    path: str
    at: Literal["here", "remote", "both"]


class ManifestOutput(BaseModel):
    """The manifest has more fields, which docs/store.md describes."""

    model_config = ConfigDict(extra="allow")
    id: str
    path: str
    at: Literal["here", "remote", "both"]
    damaged: list[str]  # names of files
    kind: str
    key: str
    stage: str
    label: str
    created: str
    inputs: dict[str, str]  # name -> full id
    files: dict[str, JsonValue]
    facts: dict[str, JsonValue]


class Ancestor(Output):
    depth: int
    name: str | None  # name of the input, as which `made` read it
    made: str | None  # id of the artifact that read this one
    id: str
    kind: str
    stage: str
    created: str
    bytes: int
    commit: str | None
    calls: int
    cached_calls: int  # calls answered from the store
    key: str
    execution: str
    configuration: str | None  # name of the configuration whose run made it
    config: dict[str, JsonValue]  # the settings of its step
    files: dict[str, JsonValue]  # path -> bytes and sha256


class RecipeSeeds(Output):
    """The seeds of a recipe in the store: mean with its t interval, and standard deviation between seeds."""

    mean: float
    low: float | None  # null: all seeds have the same value
    high: float | None
    deviation: float
    seeds: list[str]


class PairedTest(BaseModel):
    """A paired test of A and B over problems. `lead`: B minus A, with the 95 % interval `low` to `high`."""

    model_config = ConfigDict(extra="allow")
    not_screened: dict[Literal["a", "b"], str]  # of which questions the training text of a side was not screened for
    n: int
    a: float
    b: float
    lead: float
    low: float
    high: float
    p: float
    finished_share: dict[Literal["a", "b"], float | None] | None = None  # answers that ended; null: not of a mean
    accuracy_finished: dict[Literal["a", "b"], float | None] | None = None  # strict, of those that ended


class ComparisonOutput(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: str
    b: str
    way: str
    verdict: str
    warnings: list[str]
    common: int
    only_in_a: int
    only_in_b: int
    too_few_answers: int  # questions with fewer graded answers than the verdict pass@K needs
    benchmarks: dict[str, PairedTest]
    means: dict[str, PairedTest]
    changed: list[dict[str, JsonValue]]
    over: Literal["problems"]  # what the intervals and p values are over; they say nothing about another seed
    recipe_seeds: dict[str, dict[Literal["a", "b"], RecipeSeeds | None]]  # by benchmark and mean, as in RunComparison


class ComparedRun(Output):
    run: str
    config: str | None
    name: str
    begun: str


class ChangedSetting(Output):
    field: str
    before: JsonValue  # in A
    after: JsonValue  # in B


class ComparedScore(PairedTest):
    stage: str  # the evaluated stage
    benchmark: str
    title: str  # says in brackets if training text was not screened for it
    same: bool  # both runs use the same evaluation
    gain: str  # the result as a sentence
    over: Literal["problems"]  # what the interval and p are over; they say nothing about another seed
    recipe_seeds: dict[Literal["a", "b"], RecipeSeeds | None]  # all seeds of the recipes in the store; null: one


class CurveEnd(Output):
    last: float
    step: int
    best: float | None  # only of metrics where higher or lower is better
    best_step: int | None


class ComparedCurve(Output):
    stage: str
    metric: str
    title: str
    a: CurveEnd
    b: CurveEnd


class StepCost(Output):
    """State, time and cost of a step; of a reused step those of the run that made it."""

    state: str
    seconds: float | None
    dollars: float | None


class ComparedStep(Output):
    label: str
    same: bool  # both runs use the same execution
    a: StepCost | None  # null: the run has no such step
    b: StepCost | None


class NotCompared(Output):
    stage: str  # the evaluated stage
    why: str


class RunComparison(Output):
    runs: dict[Literal["a", "b"], ComparedRun]
    settings: list[ChangedSetting] | None  # null: one of the runs is older than the record of settings
    scores: list[ComparedScore]
    not_compared: list[NotCompared]
    curves: list[ComparedCurve]
    steps: list[ComparedStep]


class SweepRunOutput(Output):
    """A run of a sweep. `own_*`: of the steps that no run before it in the list has. Unknown values are null."""

    arm: str
    seed: int | None
    settings: list[str]
    state: Literal["done", "running", "failed", "interrupted", "not made"]
    error: str | None
    run: str | None  # the newest run of its name
    steps: int
    made: int  # steps that are in the store
    seconds: float | None
    own_seconds: float | None
    dollars: float | None
    own_dollars: float | None


class ArmScore(Output):
    """The score of an arm on a benchmark, and its lead over the first arm on the seeds and questions of both."""

    arm: str
    after: str | None  # the stage after which the arm is evaluated, where it is not the sweep's
    same: bool  # its settings do not affect the evaluation, so that it has the first arm's
    seeds: int  # that are measured
    n: int  # questions
    accuracy: float | None  # mean over the seeds
    low: float | None
    high: float | None
    over: Literal["seeds", "problems"] | None  # what its interval is over; problems with one seed
    deviation: float | None  # standard deviation between seeds
    common: int | None  # questions
    common_seeds: int | None
    lead: float | None
    lead_low: float | None
    lead_high: float | None
    lead_over: Literal["seeds", "problems"] | None
    lead_deviation: float | None  # of the paired differences
    p: float | None
    p_corrected: float | None  # by Holm, for all tests of the report
    significant: bool | None  # p_corrected is below 0.05
    detectable: float | None  # smallest true lead found in 80 % of cases by so many seeds, after the correction
    recipe_seeds: RecipeSeeds | None  # of an arm with one seed: all seeds of its recipe in the store


class MetricOutput(Output):
    benchmark: str
    title: str
    arms: list[ArmScore]


class SweepOutput(Output):
    name: str
    file: str
    config: str
    verdict: str  # strict, lenient or pass@K
    way: Literal["generate", "likelihood", "sampled"]
    after: str  # the evaluated stage
    arms: list[SweepRunOutput]
    metrics: list[MetricOutput]


class ReachedOutput(Output):
    """A dataset, source or endpoint; null: not known."""

    label: str
    what: str  # the dataset at its commit, or the model at its address
    fault: str | None  # why it cannot be used
    gated: bool | None
    files: int | None
    rows: int | None  # estimated, if there are several files
    columns: list[str] | None
    languages: dict[str, float] | None  # shares of the rows that were read
    serves: str | None  # the model that its reply names
    requests_per_minute: float | None  # by its headers
    batch: bool | None  # its batch interface answers, if it is used
    dollars_per_million: list[float] | None  # tokens in, tokens out


class RehearsedStage(Output):
    label: str
    made_small: bool  # false: its stage does not declare how
    outcome: Literal["done", "failed", "skipped", "not reached"]
    seconds: float | None
    dollars: float | None  # null: it asks no paid endpoint
    error: str | None
    remedy: str | None  # what helps, or why it was not run
    crashed: bool


class WholeRunOutput(Output):
    """What a step of the whole run asks of an endpoint."""

    label: str
    purpose: str
    endpoint: str
    model: str
    requests: int
    requests_per_minute: float | None  # by its headers or settings
    hours: float | None
    dollars: list[float]  # low, expected, high
    measured: int  # replies that the dollars rest on
    like: str  # if 0: the endpoint whose replies for the same step they rest on; empty: on the longest allowed


class RehearsalOutput(Output):
    config: str
    complete: bool  # everything was reached
    limit_dollars: float
    dollars: float
    seconds: float
    reached: list[ReachedOutput]
    stages: list[RehearsedStage]
    whole_run: list[WholeRunOutput]
    pretrain_days: float | None  # by arithmetic, on the chips of launch.topology
    faults: list[str]
    notes: list[str]
    skipped: str  # why nothing more was paid; empty if all was


class PlannedRun(Output):
    arm: str
    seed: int | None
    settings: list[str]
    reused: list[str]  # steps that are in the store
    shared: list[str]  # steps that a run before it in the list makes
    computed: list[str]


class SweepPlan(Output):
    runs: list[PlannedRun]
    calls: list[str]  # the lines of the forecast of calls to paid endpoints


class QuestionOutput(Output):
    run: str
    label: str
    message: str
    since: str
    host: str
    api: str | None  # address of the run's Prefect server
    pid: int | None


class Approved(Output):
    run: str
    label: str  # empty if the run is not one of this store
    message: str
    api: str | None
    since: str | None = None
    host: str | None = None
    pid: int | None = None


class Settled(Output):
    what: str
    name: str
    outcome: str


class PlugInOutput(Output):
    registry: str
    name: str
    reference: str  # module:attribute
    origin: str  # the package, or NAUTILE_PLUGINS
    version: str  # declared, or the digest of its module's file
    fault: str  # why it cannot be used; empty if it can


class Verification(Output):
    artifacts: int
    damaged: dict[str, list[str]]  # id -> names of files
    remedies: dict[str, str]  # id -> what to do
    events_left_out: dict[str, int]  # event file -> events that the catalog leaves out, because their form is unknown


class GarbageOutput(Output):
    path: str
    bytes: int
    why: str


OUTPUTS: dict[str, Any] = {
    "rehearse": RehearsalOutput,
    "sweep": SweepOutput,
    "sweep --dry-run": SweepPlan,
    "status": list[StepOutput],
    "status RUN": list[StepOutput],
    "runs": list[RunOutput],
    "status --why": list[Reason],
    "artifacts": list[ArtifactOutput],
    "show": ManifestOutput,
    "lineage": list[Ancestor],
    "compare": ComparisonOutput,
    "compare RUN RUN": RunComparison,
    "sql": list[dict[str, JsonValue]],
    "params": dict[str, int],
    "approve": list[QuestionOutput],
    "approve RUN": Approved,
    "reconcile": list[Settled],
    "plugins": list[PlugInOutput],
    "store verify": Verification,
    "store rebuild": dict[str, int],
    "store gc": list[GarbageOutput],
    "store export": dict[str, int],
    "store add": list[ArtifactOutput],
    "store push": list[ArtifactOutput],
    "store fetch": list[ArtifactOutput],
    "store snapshot": list[ArtifactOutput],
}


_INTRODUCTION = f"""# The commands of `nautile`

Generated from the code by `python -m nautile.flows.cli.document > docs/commands.md`; a test compares the two. `nautile
COMMAND --help` prints the same texts. Exit codes: 0 success, 1 a stage crashed, 2 invalid input (one line explains how
to fix it), 130 stopped by you. `nautile --install-completion` adds shell completion of commands, stages and
configurations.

**`--json`** prints one JSON value. For commands that other programs may rely on, its fields are listed here. They are
version {VERSION} of the outputs, which `nautile --version` prints; within a version fields are only added. Commands
without such a list print the content of an artifact or a measurement, which may change."""


def document() -> str:
    """The page as Markdown."""
    top: Any = typer.main.get_command(app)
    parts = [_INTRODUCTION]
    # The order of the page is that of `nautile --help`. A group such as `store` is listed as its commands.
    for panel, names in PANELS.items():
        parts.append(f"## {panel}")
        for name in names:
            inner = getattr(top.commands[name], "commands", {})
            commands = {f"{name} {key}": command for key, command in inner.items()} or {name: top.commands[name]}
            for title, command in commands.items():
                parts += _command(title, command)
    return "\n\n".join(parts) + "\n"


def _command(name: str, command: Any) -> Iterator[str]:
    """The paragraphs of a command: usage, help, table of parameters, JSON outputs."""
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    words = [parameter.metavar if parameter.required else f"[{parameter.metavar}]" for parameter in arguments]
    yield f"### `{' '.join(['nautile', name, *words])}`"
    yield " ".join(command.help.split())
    if rows := [_parameter(parameter) for parameter in command.params]:
        yield markdown_table(("argument or option", "default", "what"), rows)
    # `status`, `status RUN` and `status --why` are outputs of one command.
    for title, output in OUTPUTS.items():
        if title == name or title.startswith(f"{name} "):
            schema = schema_of(output)
            yield "\n".join([f"`nautile {title} --json`: {_kind(schema)}", *_objects(schema)])


def _parameter(parameter: Any) -> tuple[str, str, str]:
    if parameter.param_type_name == "argument":
        name = parameter.metavar
    else:
        value = "" if parameter.is_flag else f" {parameter.metavar or parameter.name.upper()}"
        name = f"{', '.join(parameter.opts)}{value}"
    default = "" if parameter.default in (None, False, "") else f"`{parameter.default}`"
    return f"`{name}`", default, " ".join((parameter.help or "").split())


def schema_of(output: Any) -> dict[str, Any]:
    """The JSON schema of an output."""
    return TypeAdapter(output).json_schema()


def _objects(schema: dict[str, Any]) -> Iterator[str]:
    """A line for each type of object in an output, the outermost first."""
    # pydantic puts the objects inside an output under `$defs`, and the output itself, if it is an object, at the top.
    outermost = {schema["title"]: schema} if "properties" in schema else {}
    for name, definition in {**outermost, **schema.get("$defs", {})}.items():
        if "properties" in definition:
            fields = ", ".join(f"`{field}` {_kind(value)}" for field, value in definition["properties"].items())
            yield f"- {name}: {fields}{'' if definition.get('additionalProperties') is False else ', and more'}"


def _kind(schema: dict[str, Any]) -> str:
    """The type of a JSON schema in a few words, such as `list of string` or `number or null`."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return name if name != "JsonValue" else "any"
    if "anyOf" in schema:
        return " or ".join(_kind(option) for option in schema["anyOf"])
    if "enum" in schema:
        return " / ".join(f'"{value}"' for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema['items'])}"
    if schema.get("type") == "object" and "properties" not in schema:
        values = schema.get("additionalProperties")
        return f"object of {_kind(values)}" if isinstance(values, dict) else "object"
    return schema["title"] if "properties" in schema else str(schema.get("type", "any"))


if __name__ == "__main__":
    sys.stdout.write(document())
