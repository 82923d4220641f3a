"""The stage of bench/operation/fleet.py: a fan-out whose items only wait, without a process of their own.

Everything else is real: a Prefect task run for each item, marker files, progress, the attempt, the catalog.
"""

import os
import time

from common.files import write_json
from configs.schema import RunConfig
from flows.dag import Step
from flows.operate.prefect_server import configure_prefect
from store.mirror import open_store
from tasks.engine.fanout.items import FanOut, Markers, finished_items
from tasks.engine.fanout.work_item import ItemResult, WorkItem
from tasks.engine.job import Job
from tasks.engine.stage import stage

ITEMS, ITEM_S = "FLEET_ITEMS", "FLEET_ITEM_S"  # environment variables


def stand_in(item: WorkItem, earlier_tries: int = 0) -> ItemResult:
    """Wait for the item's configured time, and mark it as done."""
    time.sleep(float(os.environ[ITEM_S]))
    marker_folder = Markers.of(item.staging, item.fan_out).folder / "done"
    marker_folder.mkdir(exist_ok=True)
    write_json(marker_folder / item.item, {})
    return ItemResult()


def names(job: Job) -> list[str]:
    return [f"item-{number:04d}" for number in range(int(os.environ[ITEMS]))]


@stage(
    "ingest", version=1, outputs=("tokens",), fan_outs=(FanOut("work", names, lambda job, item: None, noun="items"),)
)
def work(job: Job) -> None:
    (job.output("tokens") / "items.txt").write_text(f"{len(finished_items(job, 'work'))}\n", encoding="utf-8")


def dag(config: RunConfig) -> list[Step]:
    """The one step of a run; its key differs by the seed. Called in the flow's process, which runs the items."""
    configure_prefect(open_store())
    from tasks.engine.fanout import prefect_executor  # imports Prefect, which the stage's own process has no use for

    # Replaced in the flow's process, where Prefect's tasks call it: everything around the item stays real.
    prefect_executor.run_item = stand_in
    return [Step("ingest:work", work, {"seed": config.seed}, {})]
