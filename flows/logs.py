"""The log files of a run's stages, for `nautile logs`.

While a stage runs, its log is in its staging folder; when it ends, the log is moved to the store's `logs/`. `--follow`
keeps the file open, so it misses nothing when the file is moved.
"""

import codecs
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from nautile.common.errors import ConfigError
from nautile.common.files import read_json
from nautile.common.text import did_you_mean, visible
from nautile.flows.run_state import live_or_newest, live_run, questions_by_run, reading, run_named
from nautile.store.artifacts import Store
from nautile.store.catalog import Catalog
from nautile.store.manifest import RUN
from nautile.tasks.engine.fanout import item_logs

POLL_S = 0.3
_BLOCK = 1 << 20  # bytes per read
_Read = dict[str, int]  # execution -> bytes of its log that were read
# Newest first, but plans (`nautile plan`) after all others, so that they are never the default.
_RUNS = "SELECT run, name FROM runs WHERE stages > 0 ORDER BY starts_with(run, 'plan-'), newest DESC"
_STAGES = """
SELECT run, label, coalesce(stage, '') AS stage, coalesce(key, '') AS key, coalesce(execution, '') AS execution, state
FROM steps WHERE run = ? ORDER BY started
"""


@dataclass(frozen=True)
class LogFile:
    """The log of a run's last attempt at one step."""

    run: str
    label: str
    stage: str
    key: str
    execution: str
    state: str

    def path(self, store: Store) -> Path | None:
        """Where the log is now; None if the step ran no process, or if a later attempt replaced the log."""
        staging = store.staging_files(self.key)
        record = read_json(staging.execution)
        # Staging belongs to the key, so a later run may be working there: only the same execution makes it this log.
        if isinstance(record, dict) and record.get("execution") == self.execution and staging.log.is_file():
            return staging.log
        finished = store.execution_log(self.stage, self.execution)
        return finished if finished.is_file() else None

    def item_logs(self, store: Store) -> list[Path]:
        """Logs of the work items in progress; each is appended to the stage's log when the item ends."""
        return item_logs(store.staging_files(self.key).folder)

    def is_running(self, store: Store) -> bool:
        """True while a process holds the key's lock."""
        return store.lock(self.key).held_elsewhere()


def choose(store: Store, run: str | None, stage: str | None) -> LogFile:
    """The log of `stage` in `run`. Default: in the live or newest run, the stage that runs, else one that failed.

    Else the last that was executed.

    Raises `ConfigError` if there is no such run or stage.
    """
    chosen = run_id(store, run)
    logs = run_logs(store, chosen)
    if not logs:
        raise ConfigError(f"run {chosen[:8]} has begun no step yet, so it has no log")
    if stage:
        matching = [log for log in logs if stage in (log.label, log.stage)]
        if not matching:
            labels = [log.label for log in logs]
            raise ConfigError(
                f"--stage {stage}: not in this run{did_you_mean(stage, labels)}, which has {', '.join(labels)}"
            )
        return next((log for log in matching if log.is_running(store)), matching[-1])
    running = [log for log in logs if log.is_running(store)]
    failed = [log for log in logs if log.state == "failed"]
    executed = [log for log in logs if log.state != "reused"]
    return (running or failed or executed or logs)[-1]


def run_logs(store: Store, run: str) -> list[LogFile]:
    """The logs of the last attempts of a run at each step, in order of their start."""
    rows = Catalog(store).query(_STAGES, [run])
    return [LogFile(**{name: row[name] for name in LogFile.__dataclass_fields__}) for row in rows]


def last_lines(path: Path, lines: int) -> str:
    """The last lines of a log (0: all of it), with control characters replaced."""
    return _tail(path.read_bytes().decode(errors="replace"), lines)


def follow(store: Store, log: LogFile, whole_run: bool, lines: int) -> Iterator[tuple[LogFile, str]]:
    """Yield new text of the logs with its log, until the stage ends (`whole_run`: until the run ends)."""
    read: _Read = {}
    yield from _follow_stage(store, log, lines, read)
    while whole_run:
        # Check whether the run is alive before reading its stages, so that a stage that ends in between is not missed.
        alive = bool(RUN.fullmatch(log.run)) and store.run_lock(log.run).held_elsewhere()
        Catalog(store).catch_up()
        later = [
            other for other in run_logs(store, log.run) if other.state != "reused" and _goes_on(store, other, read)
        ]
        for other in later:
            yield from _follow_stage(store, other, 0, read)
        if not alive and not later:
            return
        time.sleep(POLL_S)


def _goes_on(store: Store, log: LogFile, read: _Read) -> bool:
    """Whether the log has not been followed yet, or has grown since: a stage that failed is tried again."""
    if log.execution not in read:
        return True
    path = log.path(store)
    return path is not None and path.stat().st_size > read[log.execution]


def _follow_stage(store: Store, log: LogFile, lines: int, read: _Read) -> Iterator[tuple[LogFile, str]]:
    """Yield the text of a log until the attempt ends: its last lines at first, else what follows what was `read`."""
    begin = read.setdefault(log.execution, 0)
    # The attempt holds the lock before its child has opened the log.
    while (path := log.path(store)) is None and log.is_running(store):
        time.sleep(POLL_S)
    if path is None:
        return
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a block may end inside a character
    # The open file stays the same one when the log is moved from staging to `logs/`, so no line is lost or read twice.
    with path.open("rb") as file:
        file.seek(begin)
        yield log, _tail(decoder.decode(file.read()), 0 if begin else lines)
        while True:
            # Ask first, then read: what was written between the two is read in this round, and nothing comes after it.
            ended = not log.is_running(store)
            while block := file.read(_BLOCK):
                yield log, visible(decoder.decode(block))
            read[log.execution] = file.tell()
            if ended:
                return
            time.sleep(POLL_S)


def _tail(text: str, lines: int) -> str:
    return "".join(visible(text).splitlines(keepends=True)[-lines:])


def full_id(store: Store, run: str) -> str:
    """The id of a run of a Prefect server: `run` itself if it is one, else as `run_id` finds it in the store."""
    try:
        return str(UUID(run))  # also of a run that was refused before the store recorded it
    except ValueError:
        return run_id(store, run)


def run_id(store: Store, run: str | None) -> str:
    """The id of the run whose name is `run` or whose id begins with it; None: of the live run, else the newest.

    Raises `ConfigError` if there is no such run, or if several match.
    """
    if not store.root.exists():
        raise ConfigError(f"no store at {store.root}: `nautile run` creates it, NAUTILE_STORE names another")
    with reading(store) as query:
        runs = {row["run"]: row["name"] for row in query(_RUNS)}
        questions = questions_by_run(store)
        candidates = live_or_newest(query, questions) if run is None else []
    if not runs:
        raise ConfigError(f"no run in {store.root} yet: `nautile run` starts one")
    if run is None:
        live = live_run(candidates, store, questions)
        return str(live["run"]) if live and live["run"] in runs else next(iter(runs))
    if matching_id := run_named(run, runs):
        return matching_id
    raise ConfigError(f"{run!r} matches no run; the newest are {', '.join(name[:8] for name in list(runs)[:8])}")
