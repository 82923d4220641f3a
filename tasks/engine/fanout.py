"""Units: a part of a stage that is done piece by piece, each piece in a process of its own, here or on another host.

A stage names its rounds; they are gone through in order before its own function runs. What has been done is known by
marks in the staging folder and by nothing else, so any process that holds the key's lock can go on, with any number of
workers:

    rounds/<round>/list.json       the units, and the share of them that may be set aside; written once
                   done/<unit>     a unit that is done
                   work/<unit>/    one under way: live.json, log.txt, error.json
                   settled.json    the round is over: what was set aside, and why

A unit may be started again after a crash, and (a lost host that was not dead) even run twice at once: it must write
its own files only, each atomically, and the same bytes every time.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.events import Emit
from common.files import read_json, write_json
from tasks.engine.job import Job

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


def _none(job: Job) -> float:
    return 0.0


@dataclass(frozen=True)
class FanOut:
    """A part of a stage whose units can be done apart from each other, in any order, in any process on any host.

    `list` gives the names of the units, fit for file names; it is called once, in a child process, and what it
    returned is kept. `work` does one: a `ConfigError` sets the unit aside, named; anything else is tried again.
    `tolerated` is the share of the units (0..1) that may be set aside before the stage fails.
    """

    name: str
    list: Callable[[Job], list[str]]
    work: Callable[[Job, str], None]
    tolerated: Callable[[Job], float] = _none
    noun: str = "files"  # what the units are called where progress is shown


@dataclass(frozen=True)
class Markers:
    """The marks of one round in a staging folder."""

    folder: Path

    @classmethod
    def of(cls, staging: Path, name: str) -> "Markers":
        return cls(staging / "rounds" / name)

    @property
    def listing(self) -> dict[str, Any] | None:
        """`finished_items` and `tolerated`; None until the list was made."""
        return read_json(self.folder / "list.json")

    @property
    def settled(self) -> dict[str, str] | None:
        """Unit -> why it was set aside; None until the round is over."""
        found = read_json(self.folder / "settled.json")
        return found["set_aside"] if isinstance(found, dict) else None

    def done(self) -> set[str]:
        """The units that need no more work."""
        folder = self.folder / "done"
        return {path.name for path in folder.iterdir() if not path.name.startswith(".")} if folder.is_dir() else set()

    def work(self, unit: str) -> Path:
        return self.folder / "work" / unit

    def settle(self, skipped_items: dict[str, str]) -> None:
        write_json(self.folder / "settled.json", {"set_aside": skipped_items})


def finished_items(job: Job, name: str) -> list[str]:
    """The units of round `name` that were done, in the order of its list. For what comes after that round."""
    aside = skipped_items(job, name)
    return [unit for unit in (Markers.of(job.staging, name).listing or {})["units"] if unit not in aside]


def skipped_items(job: Job, name: str) -> dict[str, str]:
    """Unit -> message of those of round `name` that were set aside. For what comes after that round."""
    found = Markers.of(job.staging, name).settled
    if found is None:
        raise RuntimeError(f"stage {job.stage}: round {name!r} is not over (or there is none of that name)")
    return found


def write_item_list(step: FanOut, job: Job) -> None:
    """Call `step.list` and keep what it gives. Raises `RuntimeError` for names that no file could have."""
    place, names = Markers.of(job.staging, step.name), list(step.list(job))
    if wrong := [name for name in names if not _NAME.fullmatch(name)]:
        raise RuntimeError(f"round {step.name}: {wrong[0]!r} is not fit for a file name ({len(wrong)} like it)")
    if len(set(names)) < len(names):
        raise RuntimeError(f"round {step.name}: its list names a unit twice")
    share = float(step.tolerated(job))
    if not 0.0 <= share <= 1.0:
        raise RuntimeError(f"round {step.name}: a share of {share} cannot be tolerated: it is not within 0..1")
    place.folder.mkdir(parents=True, exist_ok=True)
    write_json(place.folder / "list.json", {"units": names, "tolerated": share})


def process_item(step: FanOut, job: Job, unit: str) -> None:
    """Call `step.work` and mark the unit as done."""
    place = Markers.of(job.staging, step.name)
    step.work(job, unit)
    (place.folder / "done").mkdir(parents=True, exist_ok=True)
    write_json(place.folder / "done" / unit, {})


def item_logs(staging: Path) -> list[Path]:
    """Logs of the units under way, in whatever round of this staging folder."""
    return sorted(log for work in staging.glob("rounds/*/work") for log in work.glob("*/log.txt"))


def from_unit(emit: Emit, step: str, unit: str) -> Emit:
    """Metrics of different units are different ones, though they carry the same name and step."""

    def tell(kind: str, **fields: Any) -> None:
        if kind == "metric":
            fields.setdefault("source", f"{step}/{unit}")
        emit(kind, **fields)

    return tell
