"""What a run is going to do, recorded as it starts and closed as it ends: a row of the catalog's table `plans`.

Attempts are recorded as they begin, so they alone cannot say how many steps are still to come, or that a run which is
between two steps is alive. A run that is retried or resumed starts again, with a row of its own.
"""

import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from prefect.exceptions import Pause

from common.errors import ConfigError, Retryable
from common.files import writing
from configs.schema import RunConfig
from flows.selection import PreparedRun
from store.artifacts import Store
from store.catalog import Catalog
from store.manifest import code_commit, host, now
from store.mirror import MirroredStore
from tasks.engine.attempt_log import AT_END, write_row

log = logging.getLogger(__name__)


def planned_steps(run: PreparedRun) -> list[dict[str, Any]]:
    """The steps of a run as the table has them: label, stage, key, and `after`, the labels whose outputs it reads."""
    labels = [step.label for step in run.steps]
    return [
        {
            "label": step.label,
            "stage": step.stage.name,
            "key": step.key,
            "after": [label for label in labels if label in {need.producer for need in step.needs.values()}],
        }
        for step in run.steps
    ]


@contextmanager
def recorded(store: Store, config: RunConfig, run: PreparedRun, run_id: str, name: str, resume: str) -> Iterator[None]:
    """Record the run while the block works, and how it ended; a run that is killed stays `running`.

    `name`: of the flow run; `resume`: the command that continues it. Raises `ConfigError` if the store cannot be
    written.
    """
    row = {
        "id": uuid.uuid4().hex,
        "run": run_id,
        "config": config.name,
        "name": name,
        "state": "running",
        "steps": planned_steps(run),
        "settings": config.model_dump(mode="json"),
        "changes": [asdict(change) for change in run.changes],
        "resume": resume,
        "started": now(),
        "commit": code_commit(),
        "host": host(),
    }
    with writing(store.root):
        write_row(store, "plan", row)
    try:
        yield
    except Pause:  # the run is suspended until somebody answers
        _close(store, row, state="suspended")
        raise
    except Exception as error:
        _close(store, row, state="failed", error=str(error))
        raise
    except BaseException:
        _close(store, row, state="cancelled")
        raise
    _close(store, row, state="done")


def _close(store: Store, row: dict[str, Any], **fields: Any) -> None:
    """Record how the run ended. Problems are logged, so that they never hide how it did."""
    try:
        write_row(store, "plan", row | fields | {"ended": now()})
        Catalog(store).ingest(**AT_END)
        if isinstance(store, MirroredStore):
            store.push_events()
    except (OSError, ConfigError, Retryable) as error:
        log.warning("the end of run %s cannot be recorded: %s", row["run"], error)
