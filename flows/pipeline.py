"""The flow of the whole pipeline: text in, an evaluated model and its report out (paper §3 to §5).

The selected steps run as Prefect tasks; only artifact ids pass from step to step. A step starts as soon as its inputs
exist and its resource has a free slot (`[resources]`), so a distillation that waits for teachers runs in parallel with
an ingestion. With one slot per resource, steps that use the same resource run one after the other, in DAG order.
"""

import logging
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from prefect import flow
from prefect.artifacts import create_link_artifact
from prefect.client.schemas.objects import State
from prefect.context import TagsContext
from prefect.futures import PrefectFuture
from prefect.logging import get_run_logger
from prefect.runtime import deployment, flow_run

from nautile.common.commands import retry_command
from nautile.common.errors import ConfigError
from nautile.common.files import write_json
from nautile.common.processes import give_way, thread_beside
from nautile.configs.model import CL100K_RANKS
from nautile.configs.schema import RunConfig
from nautile.flows.dag import Need, Step
from nautile.flows.forms import ConfigName, Overrides, RunName, StageName, begin_process, failed_state, run_name
from nautile.flows.operate import approval, concurrency
from nautile.flows.operate.automations import sent_before_the_end
from nautile.flows.operate.notifications import finished_text, notifying
from nautile.flows.plans import recorded, refused
from nautile.flows.run_state import FIRST_UNFINISHED
from nautile.flows.selection import PreparedRun, Selection, check_ray_hosts, outdated_lines, prepare_run
from nautile.flows.stored_configs import follow
from nautile.store.artifacts import Store
from nautile.store.mirror import open_store
from nautile.tasks.compile_ahead import AheadRequest
from nautile.tasks.engine.child_process import cancelling, run_child
from nautile.tasks.engine.errors import StageCancelled, advice, reason, run_page
from nautile.tasks.engine.prefect_task import as_prefect_task
from nautile.tasks.engine.stage import RunContext

log = logging.getLogger(__name__)

Outputs = dict[str, dict[str, str]]


class StageFailed(RuntimeError):
    """Steps failed after all retries. `failures`: label -> the step's exception, in order of time."""

    def __init__(self, failures: dict[str, Exception]) -> None:
        super().__init__("; ".join(f"{label}: {error}" for label, error in failures.items()))
        self.failures = failures


@flow(name="pipeline", flow_run_name=run_name, retries=0, log_prints=False)
def pipeline(
    config: ConfigName = "local",
    overrides: Overrides = (),
    only: StageName = "",
    from_: StageName = "",
    until: StageName = "",
    force: bool = False,
    ask_again: bool = False,
    name: RunName = "",
) -> Outputs | State[Any]:
    """Run a configuration, or the selected part of it.

    Returns label -> kind -> artifact id of the selected steps, or a failed state if the parameters are invalid.
    Raises `StageFailed` after all steps that do not depend on the failed step have ended.

    Args:
        config: The configuration that is deployed here, the name of a shipped one, the path of a file on the worker, or
            the reference to one in the store, as a run of `nautile run` has it.
        overrides: Values that replace those of the configuration, one in each entry, such as `reason.policy.steps=3`.
        only: Run this stage alone (`reason`), or one step of it (`evaluate:align`).
        from_: Begin with this stage, and read what comes before it from the store.
        until: Stop after this stage.
        force: Run the chosen stages again. What they replace is kept.
        ask_again: With `force`, ask endpoints again for replies that are in the store. It costs again.
        name: What the run is called. Without it, it keeps the name that it has.
    """
    selection = Selection(first=from_ or None, last=until or None, only=only or None, force=force, ask_again=ask_again)
    return run_selected(config, overrides, selection)


@sent_before_the_end()
def run_selected(argument: str, overrides: Sequence[str], selection: Selection) -> Outputs | State[Any]:
    """The body of `pipeline`.

    The run of a deployment ends in a state with a message about each failed step, instead of an exception: nobody but
    Prefect catches that, and shows its stack trace twice.
    """
    begin_process()
    try:
        return _run(argument, overrides, selection)
    except StageFailed as failure:
        if not deployment.id:
            raise
        log.error("the run failed", exc_info=failure)
        return failed_state(
            "\n".join(
                f"stage {label} failed: {reason(error)}\n{advice(error)}" for label, error in failure.failures.items()
            )
        )


def _run(argument: str, overrides: Sequence[str], selection: Selection) -> Outputs | State[Any]:
    run_id = str(flow_run.id)
    try:
        store = open_store()
        config, base, words = follow(store, argument, overrides)
    except ConfigError as error:
        return refused(argument, error)

    def resume(label: str) -> str:
        # A deployment's run is retried in Prefect with its parameters; a run from a terminal with its command.
        return retry_command(run_id) if deployment.id else selection.command(words, label)

    give_way(config.launch.niceness)
    operation = config.operation
    with notifying(operation.notify, config.name, run_id, resume, operation.alerts) as notifier:
        try:  # inside `notifying`, so that a deployment's invalid selection sends a message
            run = prepare_run(config, selection, store, words, base)
            check_ray_hosts(store, config.launch, run)
        except ConfigError as error:
            # Without a command: a retry has the same form.
            notifier.failed("", error, "")
            return refused(argument, error)
        for line in outdated_lines(store, run) if deployment.id else ():  # `nautile run` has printed them
            get_run_logger().warning(line)
        _link_dashboard(run_id)
        # Locked first, so that a kill is detectable; left in reverse: nothing runs when the end is recorded.
        with (
            store.run_lock(run_id).for_life(),
            recorded(store, config, run, run_id, str(flow_run.name or config.name), resume(FIRST_UNFINISHED)),
            cancelling(),
            compiling_ahead(store, config, run.steps, run.selection.force),
        ):
            outputs = _StepRunner(store, config, run, run_id, resume, concurrency.declared_limits()).run()
        notifier.send("finished", finished_text(store, config.name, outputs))
    return outputs


@dataclass
class _StepRunner:
    """Scheduler of one flow run: starts steps in parallel as far as their inputs and `[resources]` allow.

    An approval pauses the whole flow run, and a suspended run has no process. So an approval is requested only when no
    step is running, and no step starts before the answer.
    """

    store: Store
    config: RunConfig
    prepared: PreparedRun
    run_id: str
    resume: Callable[[str], str]  # label -> the command that resumes the run from there
    server_limits: dict[str, str]  # resource -> name of the server's limit over all of its runs
    running: dict[str, Step] = field(default_factory=dict)
    unanswered: list[tuple[Step, dict[str, str], str]] = field(default_factory=list)  # ended step, outputs, question
    failures: dict[str, Exception] = field(default_factory=dict)
    outputs: Outputs = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.waiting = list(self.prepared.steps)
        self.available = set(self.prepared.inputs)
        self.ended: SimpleQueue[tuple[Step, PrefectFuture[dict[str, str]]]] = SimpleQueue()

    def run(self) -> Outputs:
        """Run all steps. Steps that depend on a failed step never get their inputs and stay in `waiting`."""
        while True:
            while not self.unanswered and (step := self._next_step()):
                self._start(step)
            if self.running:
                self._collect(*self.ended.get())  # blocks until a step ends
            elif self.unanswered:
                self._ask_and_record(*self.unanswered.pop(0))
            else:
                break
        if self.failures:
            raise StageFailed(self.failures) from next(iter(self.failures.values()))
        return self.outputs

    def _next_step(self) -> Step | None:
        """The first step that can start now; None if none can, or if it needs an approval while others run."""
        force, in_use = self.prepared.selection.force, Counter(step.resource for step in self.running.values())
        limits = self.config.resources.limits()
        for step in self.waiting:
            if in_use[step.resource] < limits[step.resource] and self.available >= set(step.needs.values()):
                asks = self.running and approval.asks_before(self.store, self.config, step, force)
                # An approval pauses everything: nothing starts before it, or the quiet moment might never come.
                return None if asks else step
        return None

    def _start(self, step: Step) -> None:
        force = self.prepared.selection.force
        context = RunContext(
            self.run_id,
            str(self.store.root),
            force,
            step.label,
            self.config.name,
            self.config.launch,
            self.config.telemetry,
            self.config.operation.of(step.stage.name),
            resume=self.resume(step.label),
            limit=self.server_limits.get(step.resource, ""),
            slots=concurrency.shared_slots(self.store, step.resource, self.config.resources.limits()[step.resource]),
            sweep=os.environ.get(concurrency.SHARED, ""),
            ask_again=self.prepared.selection.ask_again,
        )
        try:
            approval.before_step(self.store, self.config, step, force, self.run_id)
        except Exception as error:  # not approved: the whole run stops
            raise StageFailed({**self.failures, step.label: error}) from error
        self.waiting.remove(step)
        self.running[step.label] = step
        # No tags: before a task begins, Prefect requests the concurrency limit of each of its tags. On SQLite that
        # request often collides with the writes of the task's own events, and Prefect retries it only after 2 s.
        with TagsContext(current_tags=set()):
            # `submit` runs the task in a thread of this process; the work itself is in the task's child process.
            future = as_prefect_task(step.stage).submit(step.section, step.inputs, context)
        future.add_done_callback(lambda future: self.ended.put((step, future)))

    def _collect(self, step: Step, future: PrefectFuture[dict[str, str]]) -> None:
        """Record the result of a step that has ended, or queue its question about a used-up budget."""
        del self.running[step.label]
        try:
            outputs = future.result()
            question = approval.question_at_budget(self.store, self.config, step, outputs, self.prepared.argument)
        except Exception as error:
            log.error("step %s failed: %s", step.label, error)
            self.failures[step.label] = error
            return
        if question:
            self.unanswered.append((step, outputs, question))
        else:
            self._record(step, outputs)

    def _ask_and_record(self, step: Step, outputs: dict[str, str], question: str) -> None:
        patience, force = self.config.operation.of(step.stage.name).patience, self.prepared.selection.force
        try:
            approval.ask(self.store, self.run_id, f"budget:{step.label}", step.label, question, patience, force)
        except Exception as error:  # not approved: the whole run stops
            raise StageFailed({**self.failures, step.label: error}) from error
        approval.go_on_with(self.store, outputs, self.run_id)
        self._record(step, outputs)

    def _record(self, step: Step, outputs: dict[str, str]) -> None:
        self.outputs[step.label] = outputs
        self.available |= {Need(step.label, kind) for kind in outputs}


def _link_dashboard(run_id: str) -> None:
    """Add a link to the dashboard to the run's page in Prefect, if the dashboard's address is known."""
    page = run_page(run_id)
    if not page:
        return
    try:
        create_link_artifact(page, link_text="this run in the dashboard", key="dashboard")
    except Exception as error:  # the link is a convenience: the run continues without it
        log.warning("Prefect refused the link to the dashboard: %s", error)


COMPILE_LOG = "compile-ahead.txt"  # among the store's logs


@contextmanager
def compiling_ahead(store: Store, config: RunConfig, steps: Sequence[Step], force: bool) -> Iterator[None]:
    """Run `tasks.compile_ahead` as a process while the block runs its steps, if `launch.compile_ahead` is set.

    Its errors are only logged: a stage compiles itself what is not in the compilation cache.
    """
    request = request_of(store, config, steps, force) if config.launch.compile_ahead else None
    if request is None:
        yield
        return
    # A thread waits for the process, because on Linux a child ends with the thread that started it.
    with thread_beside("compile-ahead", _compile, store, request):
        yield


def request_of(store: Store, config: RunConfig, steps: Sequence[Step], force: bool) -> AheadRequest | None:
    """The programs to compile; None if no pretraining comes first, which is long enough and leaves cores idle."""

    def to_come(step: Step) -> bool:
        return force or any(store.find(kind, step.key) is None for kind in step.outputs)

    multihost = config.launch.stages if config.launch.processes > 1 else ()  # one process cannot compile their programs
    later = [step for step in steps if step.stage.compile_ahead and step.stage.name not in multihost and to_come(step)]
    # cl100k_base's first ranks have the ids of trained ones, except for all of them.
    if config.tokenizer.train and config.tokenizer.ranks >= CL100K_RANKS:
        return None
    if not later or not any(step.label == "pretrain" and to_come(step) for step in steps):
        return None
    return AheadRequest(
        parent=os.getpid(),
        store=str(store.root),
        model=config.model.model_dump(mode="json"),
        tokenizer={"ranks": config.tokenizer.ranks},  # of one to be trained: its ids alone count
        steps=[(step.stage.name, step.section, str(store.staging_files(step.key).folder)) for step in later],
        replies="nautile.flows.serve.ahead:compile_first_replies",
    )


def _compile(store: Store, request: AheadRequest, stop: threading.Event) -> None:
    def end_with_run() -> None:
        if stop.is_set():
            raise StageCancelled("the run has ended")

    path = store.logs / COMPILE_LOG
    with tempfile.TemporaryDirectory() as folder, suppress(StageCancelled):
        file = Path(folder) / "programs.json"
        write_json(file, asdict(request))
        try:
            ended = run_child(
                "nautile.tasks.compile_ahead", str(file), log=path, store=request.store, tick=end_with_run
            )
        except OSError as error:
            log.warning("no process compiles programs ahead (%s): the stages compile them", error)
            return
        if ended.code:
            log.warning("compiling ahead ended with exit code %d (%s): the stages compile the rest", ended.code, path)
