"""Run a stage's fan-outs and its function one after the other in this process, without the engine."""

from collections.abc import Callable

from nautile.common.errors import ConfigError
from nautile.tasks.engine.fanout import Markers, process_item, write_item_list
from nautile.tasks.engine.job import Job
from nautile.tasks.engine.stage import Stage


def run_in_process(stage: Stage, job: Job, order: Callable[[list[str]], list[str]] = list) -> None:
    """`order` arranges the items of each fan-out. Raises the first `ConfigError` if too many items are skipped."""
    for fan_out in stage.fan_outs:
        markers = Markers(job.staging, fan_out.name)
        if markers.items is None:
            write_item_list(fan_out, job)
        skipped: dict[str, str] = {}
        items = markers.items or []
        for item in order([item for item in items if not markers.marker(item).exists()]):
            try:
                process_item(fan_out, job, item)
            except ConfigError as error:
                skipped[item] = str(error)
        if len(skipped) > markers.skippable * len(items):
            raise ConfigError(next(iter(skipped.values())))
        markers.write_finished(skipped)
    stage.work(job)
