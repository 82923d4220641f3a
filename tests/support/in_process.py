"""A stage's rounds and its work, one after the other in this process: what its functions do, without the engines."""

from collections.abc import Callable

from common.errors import ConfigError
from tasks.engine.fanout import Markers, process_item, write_item_list
from tasks.engine.job import Job
from tasks.engine.stage import Stage


def do_stage(stage: Stage, job: Job, order: Callable[[list[str]], list[str]] = list) -> None:
    """As the engines do it; `order` says which unit comes when. Raises the `ConfigError` that is one too many."""
    for step in stage.fan_outs:
        place = Markers.of(job.staging, step.name)
        if place.listing is None:
            write_item_list(step, job)
        aside: dict[str, str] = {}
        for unit in order([unit for unit in place.listing["units"] if unit not in place.done()]):
            try:
                process_item(step, job, unit)
            except ConfigError as error:
                aside[unit] = str(error)
        if len(aside) > place.listing["tolerated"] * len(place.listing["units"]):
            raise ConfigError(next(iter(aside.values())))
        place.settle(aside)
    stage.work(job)
