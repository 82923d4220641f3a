"""One step by itself, without a pipeline and without Prefect: what `nautile tune` and the other uses of a model run.

The step is a stage like any other: its key decides what is reused, its staging folder what is resumed, and its
attempts, metrics and calls are rows of the catalog.
"""

import uuid
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from common.errors import ConfigError, Retryable
from configs.keys import with_local_files
from configs.operation import StageOperation
from configs.schema import RunConfig
from flows.progress_view import RunProgress, view_for
from flows.run import ProgressListener, exit_code
from store.artifacts import Artifact, Store
from tasks.engine.attempt import run_stage
from tasks.engine.errors import StageCrash
from tasks.engine.failure import RESUME_HEADING, advice
from tasks.engine.progress import subscribe
from tasks.engine.stage import RunContext, Stage


class StepFailed(Exception):
    """The step did not succeed, which has been printed. `code`: the exit code of the command."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the step failed with exit code {code}")
        self.code = code


def run_single_step(
    stage: Stage,
    section: Mapping[str, Any],
    inputs: Mapping[str, str],
    store: Store,
    *,
    command: str,
    out: Console,
    err: Console,
    config: RunConfig | None = None,
    force: bool = False,
) -> dict[str, Artifact]:
    """Run `stage`, or reuse what it has made of the same section and inputs. Returns its artifacts by kind.

    `inputs`: name -> artifact id. `command`: the shell command that resumes it, which a failure prints. `config` gives
    the operation of endpoints and telemetry, and its name for the catalog. Progress goes to `out`. Raises `ConfigError`
    for bad input, and `StepFailed` after any other failure has been printed on `err`.
    """
    operation = {} if config is None else {
        "config": config.name,
        "launch": config.launch,
        "telemetry": config.telemetry,
        "operation": getattr(config.operation, stage.name, StageOperation()),
    }  # fmt: skip
    run = f"{stage.name}-{uuid.uuid4().hex[:8]}"
    context = RunContext(run, str(store.root), force, stage.name, resume=command, **operation)
    progress = RunProgress([stage.name])
    view = view_for(progress, out)
    unsubscribe = subscribe(ProgressListener(progress, view))
    try:
        with view:
            outputs = run_stage(stage, with_local_files(dict(section), store.digest_memory), dict(inputs), context)
    except (ConfigError, Retryable):
        raise
    except KeyboardInterrupt:
        err.print(Text(f"stopped; what was finished is kept. Continue with: {command}"), soft_wrap=True)
        raise
    except StageCrash as error:
        err.print(Text(f"{stage.name} failed: {error}", style="red"), soft_wrap=True)
        err.print(Text(advice(error)), soft_wrap=True)
        err.print(Text(f"{RESUME_HEADING} {command}"), soft_wrap=True)
        raise StepFailed(exit_code(error)) from None
    finally:
        unsubscribe()
    return {kind: store.get(artifact_id) for kind, artifact_id in outputs.items()}
