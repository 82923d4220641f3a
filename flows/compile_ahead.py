"""Compile the programs of later stages in a process of their own while a pretraining runs.

The process is `tasks.compile_ahead`.
"""

import logging
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from nautile.common.files import write_json
from nautile.common.processes import thread_beside
from nautile.configs.schema import RunConfig
from nautile.flows.dag import Step
from nautile.store.artifacts import Store
from nautile.tasks.compile_ahead import AheadRequest
from nautile.tasks.engine.child_process import run_child
from nautile.tasks.engine.errors import StageCancelled

log = logging.getLogger(__name__)

LOG = "compile-ahead.txt"  # among the store's logs


@contextmanager
def compiling_ahead(store: Store, config: RunConfig, steps: Sequence[Step], force: bool) -> Iterator[None]:
    """Run the compiling process while the block runs its steps, if `launch.compile_ahead` is set.

    Its errors are only logged: a stage compiles itself what is not in the compilation cache.
    """
    request = request_of(store, config, steps, force) if config.launch.compile_ahead else None
    if request is None:
        yield
        return
    # A thread waits for the process, because on Linux a child ends with the thread that started it.
    with thread_beside("compile-ahead", _run, store, request):
        yield


def request_of(store: Store, config: RunConfig, steps: Sequence[Step], force: bool) -> AheadRequest | None:
    """The programs to compile; None if no pretraining comes first, which is long enough and leaves cores idle."""

    def to_come(step: Step) -> bool:
        return force or any(store.find(kind, step.key) is None for kind in step.outputs)

    multihost = config.launch.stages if config.launch.processes > 1 else ()  # one process cannot compile their programs
    later = [step for step in steps if step.stage.rehearse and step.stage.name not in multihost and to_come(step)]
    if not later or not any(step.label == "pretrain" and to_come(step) for step in steps):
        return None
    return AheadRequest(
        parent=os.getpid(),
        store=str(store.root),
        model=config.model.model_dump(mode="json"),
        tokenizer=config.tokenizer.model_dump(mode="json"),
        steps=[(step.stage.name, step.section, str(store.staging_files(step.key).folder)) for step in later],
    )


def _run(store: Store, request: AheadRequest, stop: threading.Event) -> None:
    # Called every few moments while the child runs: the run does not wait for programs that nobody will need.
    def end_with_run() -> None:
        if stop.is_set():
            raise StageCancelled("the run has ended")

    path = store.logs / LOG
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
