"""`nautile logs`: what a stage's process has said. While it is made the log lies in its staging folder, after that in
the store's `logs`; whoever reads along keeps the file open, so that nothing is missed when it moves."""

import codecs
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError
from common.files import read_json
from common.text import visible
from store.artifacts import Store
from store.catalog import Catalog
from tasks.engine import fanout as rounds

POLL_S = 0.3
_BLOCK = 1 << 20
_RUNS = "SELECT run, max(started) AS begun FROM runs WHERE run IS NOT NULL GROUP BY run ORDER BY begun DESC"
_STAGES = """
SELECT run, label, stage, key, execution, state, started FROM runs WHERE run = ?
QUALIFY row_number() OVER (PARTITION BY label ORDER BY started DESC, time DESC) = 1 ORDER BY started
"""


@dataclass(frozen=True)
class Told:
    """The last attempt of a run at one use of a stage, and where its log is to be found."""

    run: str
    label: str
    stage: str
    key: str
    execution: str
    state: str

    def log(self, store: Store) -> Path | None:
        """None where nothing of it is left: it never came to a process, or was begun anew since."""
        staging = store.root / "staging" / self.key
        known = read_json(staging / "execution.json")
        here = isinstance(known, dict) and known.get("execution") == self.execution
        for path in (staging / "log.txt", store.root / "logs" / f"{self.stage}-{self.execution}.txt"):
            if path.is_file() and (here or path.parent != staging):
                return path
        return None

    def units(self, store: Store) -> list[Path]:
        """Logs of the units under way, which come to the stage's when they end."""
        return rounds.item_logs(store.root / "staging" / self.key)

    def at_work(self, store: Store) -> bool:
        return store.lock(self.key).held_elsewhere()


def choose(store: Store, run: str | None, stage: str | None) -> Told:
    """The stage's log that is meant: of the newest run if none is named; the stage at work, else the last begun.

    Raises `ConfigError` if there is no such run or stage.
    """
    found = stages(store, _run(store, run))
    if stage:
        meant = [told for told in found if stage in (told.label, told.stage)]
        if not meant:
            raise ConfigError(f"--stage {stage}: this run has {', '.join(told.label for told in found)}")
        return next((told for told in meant if told.at_work(store)), meant[-1])
    working = [told for told in found if told.at_work(store)]
    worked = [told for told in found if told.state != "reused"]
    return (working or worked or found)[-1]


def stages(store: Store, run: str) -> list[Told]:
    """The last attempt of a run at each stage, in the order in which they began."""
    rows = Catalog(store).query(_STAGES, [run])
    return [Told(**{name: row[name] for name in Told.__dataclass_fields__}) for row in rows]


def last_lines(path: Path, lines: int) -> str:
    """The end of a log as it may be shown; all of it with 0 lines."""
    return _end(path.read_bytes().decode(errors="replace"), lines)


def follow(store: Store, told: Told, whole_run: bool, lines: int) -> Iterator[tuple[Told, str]]:
    """Pieces of the log as they are written, until the stage has ended (with `whole_run`: until the run has)."""
    yield from _follow_stage(store, told, lines)
    seen = {told.label}
    while whole_run:
        alive = store.run_lock(told.run).held_elsewhere()
        Catalog(store).ingest()
        later = [one for one in stages(store, told.run) if one.label not in seen and one.state != "reused"]
        for one in later:
            seen.add(one.label)
            yield from _follow_stage(store, one, 0)
        if not alive and not later:
            return
        time.sleep(POLL_S)


def _follow_stage(store: Store, told: Told, lines: int) -> Iterator[tuple[Told, str]]:
    while (path := told.log(store)) is None and told.at_work(store):
        time.sleep(POLL_S)
    if path is None:
        return
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a letter may be half written
    with path.open("rb") as file:
        yield told, _end(decoder.decode(file.read()), lines)
        while True:
            over = not told.at_work(store)
            while piece := file.read(_BLOCK):
                yield told, visible(decoder.decode(piece))
            if over:
                return
            time.sleep(POLL_S)


def _end(text: str, lines: int) -> str:
    return "".join(visible(text).splitlines(keepends=True)[-lines:])


def _run(store: Store, run: str | None) -> str:
    if not store.root.exists():
        raise ConfigError(f"no store at {store.root} yet: `nautile run` makes one, NAUTILE_STORE names another")
    catalog = Catalog(store)
    catalog.ingest()
    runs = [row["run"] for row in catalog.query(_RUNS)]
    meant = [name for name in runs if name.startswith(run)] if run else runs[:1]
    if len(meant) == 1:
        return meant[0]
    known = ", ".join(name[:8] for name in (meant or runs)[:8]) or "none yet: `nautile run` makes one"
    which = f"means more than one run ({known}): give more of its id" if meant else f"names no run; there are {known}"
    raise ConfigError(f"{run!r} {which}" if run else f"no run in {store.root} {known.removeprefix('none ')}")
