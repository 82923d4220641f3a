"""Fan-outs: parts of a stage that run item by item, each item in its own process, here or on another host.

A stage declares its fan-outs; they run in order before the stage's function. Marker files in the staging folder are the
only record of what is done, so any process that holds the key's lock can continue, with any number of workers:

    fan_outs/<fan-out>/list.json       the items, and the share of them that may be skipped; written once
                       done/<item>     marks a finished item
                       items/<item>/   a running item: live.json, log.txt, error.json
                       finished.json   marks a finished fan-out: the skipped items and why

An item can be restarted after a crash, and can even run twice at once (if its host counted as lost but still works). So
an item must write only its own files, each atomically, and the same bytes every time.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from nautile.common.events import Emit
from nautile.common.files import read_json, write_json
from nautile.store.layout import DONE_ITEMS, FAN_OUTS, FINISHED, ITEM_LIST, LOG, RUNNING_ITEMS, SCRATCH, StagingFiles
from nautile.tasks.engine.job import Job

_ITEM_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True)
class FanOut:
    """A part of a stage whose items are independent: they run in any order, in any process, on any host.

    `list_items` returns the names of the items, which must be valid file names. It is called once, in a child process,
    and the result is stored. `work` processes one item: a `ConfigError` skips it with that message, other errors are
    retried. `skippable` is the share of items (0..1) that may be skipped before the stage fails. `reads` returns the
    files and folders of staging that an item reads, for hosts that share no disk.
    """

    name: str
    list_items: Callable[[Job], list[str]]
    work: Callable[[Job, str], None]
    skippable: Callable[[Job], float] = lambda _: 0.0
    noun: str = "files"  # the unit that progress shows
    reads: Callable[[str], tuple[str, ...]] = lambda _: (SCRATCH,)  # item -> its files and folders in staging


@dataclass(frozen=True)
class Markers:
    """The marker files of one fan-out in a staging folder."""

    folder: Path

    @classmethod
    def of(cls, staging: Path, fan_out: str) -> Self:
        return cls(StagingFiles(staging).fan_out(fan_out))

    @property
    def items(self) -> list[str] | None:
        """None until the items have been listed."""
        listing = read_json(self.folder / ITEM_LIST)
        return listing["items"] if isinstance(listing, dict) else None

    @property
    def skippable(self) -> float:
        """The share of the items that may be skipped."""
        listing = read_json(self.folder / ITEM_LIST)
        if listing is None:
            raise RuntimeError(f"{self.folder / ITEM_LIST} is missing or damaged")
        return listing["skippable"]

    @property
    def skipped(self) -> dict[str, str] | None:
        """Item -> why it was skipped; None until the fan-out is finished."""
        finished = read_json(self.folder / FINISHED)
        return finished["skipped"] if isinstance(finished, dict) else None

    def done(self) -> set[str]:
        folder = self.folder / DONE_ITEMS
        return {path.name for path in folder.iterdir() if not path.name.startswith(".")} if folder.is_dir() else set()

    def is_done(self, item: str) -> bool:
        return self.marker(item).exists()

    def marker(self, item: str) -> Path:
        """Marks an item as done."""
        return self.folder / DONE_ITEMS / item

    def item_folder(self, item: str) -> Path:
        """Where a running item's log, progress and error lie."""
        return self.folder / RUNNING_ITEMS / item

    def write_finished(self, skipped: dict[str, str]) -> None:
        write_json(self.folder / FINISHED, {"skipped": skipped})


def finished_items(job: Job, fan_out: str) -> list[str]:
    """The items of a finished fan-out that were not skipped, in the order of its list."""
    skipped = skipped_items(job, fan_out)
    return [item for item in Markers.of(job.staging, fan_out).items or () if item not in skipped]


def skipped_items(job: Job, fan_out: str) -> dict[str, str]:
    """The skipped items of a finished fan-out: item -> message."""
    skipped = Markers.of(job.staging, fan_out).skipped
    if skipped is None:
        raise RuntimeError(f"stage {job.stage}: fan-out {fan_out!r} is not finished (or does not exist)")
    return skipped


def write_item_list(fan_out: FanOut, job: Job) -> None:
    """Call `fan_out.list_items` and store the result. Raises `RuntimeError` for names that are not valid file names."""
    items = list(fan_out.list_items(job))
    if invalid := [item for item in items if not _ITEM_NAME.fullmatch(item)]:
        raise RuntimeError(f"fan-out {fan_out.name}: {invalid[0]!r} is no valid file name ({len(invalid)} such items)")
    if len(set(items)) < len(items):
        raise RuntimeError(f"fan-out {fan_out.name}: its list names an item twice")
    skippable = float(fan_out.skippable(job))
    if not 0.0 <= skippable <= 1.0:
        raise RuntimeError(f"fan-out {fan_out.name}: the share that may be skipped is {skippable}, not within 0..1")
    folder = Markers.of(job.staging, fan_out.name).folder
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / ITEM_LIST, {"items": items, "skippable": skippable})


def process_item(fan_out: FanOut, job: Job, item: str) -> None:
    """Call `fan_out.work` and mark the item as done."""
    fan_out.work(job, item)
    marker = Markers.of(job.staging, fan_out.name).marker(item)
    marker.parent.mkdir(exist_ok=True)
    # Only now: all that the item writes is complete, and each file of it was renamed into place.
    write_json(marker, {})


def item_logs(staging: Path) -> list[Path]:
    """The logs of the running items of all fan-outs in a staging folder."""
    return sorted(staging.glob(f"{FAN_OUTS}/*/{RUNNING_ITEMS}/*/{LOG}"))


def emit_with_source(emit: Emit, fan_out: str, item: str) -> Emit:
    """An `Emit` that sets the source of metrics to the item, so that items with equal names and steps stay apart."""

    def emit_item_event(kind: str, **fields: Any) -> None:
        if kind == "metric":
            fields.setdefault("source", f"{fan_out}/{item}")
        emit(kind, **fields)

    return emit_item_event
