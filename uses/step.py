"""Run a single step without a pipeline and without Prefect: for `nautile tune` and the other uses of a model.

The step is a stage like any other: its key determines reuse, its staging folder allows it to resume, and its attempts,
metrics and calls are rows of the catalog.
"""

import uuid
from collections.abc import Mapping
from typing import Any

import typer
from rich.text import Text

from nautile.configs.keys import with_local_files
from nautile.flows.cli.terminal import console_for
from nautile.flows.progress_view import RunProgress, view_for
from nautile.flows.run import ProgressListener, exit_code
from nautile.store.artifacts import Artifact, Store
from nautile.tasks.engine.attempt import run_stage
from nautile.tasks.engine.errors import RESUME_HEADING, StageCrash, advice
from nautile.tasks.engine.progress import subscribe
from nautile.tasks.engine.stage import RunContext, Stage


def run_step(
    stage: Stage,
    section: Mapping[str, Any],
    inputs: Mapping[str, str],
    store: Store,
    *,
    command: str,
    force: bool,
    as_json: bool,
) -> dict[str, Artifact]:
    """Run `stage`, or reuse its artifacts of the same section and inputs. Returns its artifacts by kind.

    `inputs`: name -> artifact id. `command`: the shell command that resumes the step, printed after a failure. Progress
    goes to standard output, with `as_json` to standard error. Raises `ConfigError` and `Retryable` like the stage, and
    `typer.Exit` after it has printed a crash.
    """
    out, err = console_for(stderr=as_json), console_for(stderr=True)
    # A run of one step, with an id of its own: its attempts, metrics and calls are recorded like those of a pipeline.
    context = RunContext(f"{stage.name}-{uuid.uuid4().hex[:8]}", str(store.root), force, stage.name, resume=command)
    progress = RunProgress([stage.name])
    view = view_for(progress, out)
    unsubscribe = subscribe(ProgressListener(progress, view, reasons=False))
    try:
        with view:
            outputs = run_stage(stage, with_local_files(dict(section), store.digest_memory), dict(inputs), context)
    except KeyboardInterrupt:
        # `run_stage` has ended the child process by now; its staging folder stays, and the same command resumes from
        # it.
        err.print(Text(f"stopped; finished work is kept. Continue with: {command}"), soft_wrap=True)
        raise
    except StageCrash as error:
        err.print(Text(f"{stage.name} failed: {error}", style="red"), soft_wrap=True)
        err.print(Text(advice(error)), soft_wrap=True)
        err.print(Text(f"{RESUME_HEADING} {command}"), soft_wrap=True)
        raise typer.Exit(exit_code(error)) from None
    finally:
        unsubscribe()
    return {kind: store.get(artifact_id) for kind, artifact_id in outputs.items()}
