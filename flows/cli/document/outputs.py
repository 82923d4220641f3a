"""What commands print with `--json`, as types: documented in docs/commands.md, and what a test holds them to.

`VERSION` is shown by `nautile --version`. Within a version fields are only added. Commands whose output is that of an
artifact or a measurement (`plan`, `evaluate`, `bench`, `tune` …) are not listed: their fields may change at any time.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, JsonValue

from flows.cli.terminal import JSON_VERSION as VERSION  # defined there, for importing this module is slow

__all__ = ["OUTPUTS", "VERSION"]


class Output(BaseModel):
    """An object of an output; a field that is not listed is none of it."""

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


class RunOutput(Output):
    id: str
    name: str
    config: str
    state: Literal["running", "waiting", "done", "failed", "cancelled", "interrupted"]
    begun: str
    ended: str | None
    done: int  # steps that are made or reused
    steps: int  # of the plan
    share: float | None  # of the whole run, 0 to 1
    seconds_left: float | None  # without the steps whose time is not known; none unless it is running
    steps_without_time: int | None
    changes: list[ChangeOutput]  # against the configuration that its own builds on
    question: str | None  # what it waits for
    answer: str | None  # the command that answers it
    resume: str | None  # the command that continues it
    error: str | None


class StepOutput(Output):
    label: str  # evaluate:align
    state: Literal["made", "damaged", "running", "waiting", "failed", "interrupted", "not made"]
    key: str
    artifacts: list[str]  # ids
    start: str | None  # id of the artifact it begins from in place of the step before
    progress: ProgressOutput
    started: str | None  # of the last attempt
    seconds: float | None  # of the last attempt; of a run's step that has ended, of all of its attempts
    error: str | None
    # Of the steps of a run alone:
    outcome: str | None = None  # done, reused, running, waiting, failed, cancelled, interrupted, coming, left out
    attempts: int | None = None
    calls: int | None = None
    cached_calls: int | None = None  # of them, answered from the store
    dollars: float | None = None
    run: RunOutput | None = None


class Reason(Output):
    label: str
    state: Literal["made", "not made"]
    nearest: str | None  # id of the artifact it is compared with
    differences: list[str]
    inputs: list[str]


class ArtifactOutput(Output):
    id: str
    stage: str
    bytes: int
    files: int
    created: str
    superseded: int  # 0: live; else which replaced one of its key, as in the id
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
    name: str | None  # under which `made` read it
    made: str | None  # id of the artifact that read this one
    id: str
    kind: str
    stage: str
    created: str
    bytes: int
    commit: str | None
    calls: int
    cached_calls: int  # of them, answered from the store
    key: str
    execution: str


class PairedTest(BaseModel):
    """A paired comparison; B leads by `lead`, with its 95 % interval."""

    model_config = ConfigDict(extra="allow")
    n: int
    a: float
    b: float
    lead: float
    low: float
    high: float
    p: float


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
    benchmarks: dict[str, PairedTest]
    means: dict[str, PairedTest]
    changed: list[dict[str, JsonValue]]


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
    stage: str  # after which it was evaluated
    benchmark: str
    title: str
    same: bool  # both runs have the one evaluation
    gain: str  # in words


class CurveEnd(Output):
    last: float
    step: int
    best: float | None  # of metrics of which the highest or the lowest is the best
    best_step: int | None


class ComparedCurve(Output):
    stage: str
    metric: str
    title: str
    a: CurveEnd
    b: CurveEnd


class StepCost(Output):
    """Of what the step made, whichever run made it."""

    state: str
    seconds: float | None
    dollars: float | None


class ComparedStep(Output):
    label: str
    same: bool  # both runs have it from one execution
    a: StepCost | None  # null: the run has no such step
    b: StepCost | None


class NotCompared(Output):
    stage: str  # after which one run or both were evaluated
    why: str


class RunComparison(Output):
    runs: dict[Literal["a", "b"], ComparedRun]
    settings: list[ChangedSetting] | None  # null: a run was made before settings were recorded
    scores: list[ComparedScore]
    not_compared: list[NotCompared]
    curves: list[ComparedCurve]
    steps: list[ComparedStep]


class SweepRunOutput(Output):
    """Own: of the steps that no run before it in the list has. What is unknown is null."""

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
    """An arm under one benchmark, all its seeds together; its lead over the first arm on the questions of both."""

    arm: str
    same: bool  # what it sets does not reach the evaluation, which is the first arm's
    seeds: int
    n: int
    accuracy: float | None
    low: float | None
    high: float | None
    common: int | None
    lead: float | None
    lead_low: float | None
    lead_high: float | None
    p: float | None
    significant: bool | None  # after Holm's correction for all tests of the report


class MetricOutput(Output):
    benchmark: str
    title: str
    arms: list[ArmScore]


class SweepOutput(Output):
    name: str
    file: str
    config: str
    verdict: Literal["strict", "lenient"]
    way: Literal["generate", "likelihood"]
    after: str  # the stage whose evaluation is compared
    arms: list[SweepRunOutput]
    metrics: list[MetricOutput]


class PlannedRun(Output):
    arm: str
    seed: int | None
    settings: list[str]
    reused: list[str]  # steps that are in the store
    shared: list[str]  # steps that a run before it in the list makes
    computed: list[str]


class SweepPlan(Output):
    runs: list[PlannedRun]
    calls: list[str]  # the forecast of calls to paid endpoints, a line each


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
    label: str  # empty where no note of this store names the run
    message: str
    api: str | None
    since: str | None = None
    host: str | None = None
    pid: int | None = None


class Settled(Output):
    what: str
    name: str
    outcome: str


class Verification(Output):
    artifacts: int
    damaged: dict[str, list[str]]  # id -> names of files
    remedies: dict[str, str]  # id -> what to do


class GarbageOutput(Output):
    path: str
    bytes: int
    why: str


OUTPUTS: dict[str, Any] = {
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
    "store verify": Verification,
    "store rebuild": dict[str, int],
    "store gc": list[GarbageOutput],
    "store export": dict[str, int],
    "store add": list[ArtifactOutput],
    "store push": list[ArtifactOutput],
    "store fetch": list[ArtifactOutput],
    "store snapshot": list[ArtifactOutput],
}
