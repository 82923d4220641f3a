"""Experiment trackers: one remote run per execution of a step, with its configuration, its curves and its outcome.

A tracker has a thread that reads the event files of all attempts and sends what is new. The event files are the queue:
points that a server refused, or that a killed attempt did not send, are sent later. A file in the staging folder
records the last step sent of each metric. So a resumed attempt continues the same remote run, and a step that is
measured twice is sent once.
"""

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from nautile.common.files import read_json, write_json
from nautile.tasks.engine.telemetry.points import Point, read_points

logger = logging.getLogger(__name__)

BATCH = 500  # points of one request
LINGER_S = 6.0  # time to send the remaining points after the attempt has ended
SILENT_S = 0.5  # the same for a server that did not answer in this time at the end of an earlier attempt

_silent: set[str] = set()  # the addresses of such servers


@dataclass(frozen=True)
class TrackedExecution:
    """The execution that a remote run represents."""

    run: str
    stage: str
    label: str
    execution: str
    config: str  # the configuration's name
    key: str
    commit: str
    host: str
    section: Mapping[str, Any] = field(default_factory=dict)  # the configuration of the step
    inputs: Mapping[str, str] = field(default_factory=dict)  # name -> artifact id

    @property
    def name(self) -> str:
        """The name of the remote run; no two executions share it."""
        return f"{self.label}-{self.execution[:8]}"

    @property
    def files(self) -> str:
        """The prefix of the names of its event files; the number of the attempt follows."""
        return f"{self.stage}-{self.execution}-"

    def parameters(self) -> dict[str, str]:
        """The fields of the section by path (`pretrain.optimizer.clip`), and the ids of the inputs."""
        return dict(_flat(self.section)) | {f"input.{name}": artifact for name, artifact in self.inputs.items()}

    def tags(self) -> dict[str, str]:
        """The fields that identify the execution."""
        names = ("run", "stage", "label", "execution", "config", "key", "commit", "host")
        return {f"nautile.{name}": str(getattr(self, name)) for name in names if getattr(self, name)}


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended: `done`, `failed` or `cancelled`, and the ids of what it published, by kind."""

    state: str
    outputs: Mapping[str, str] = field(default_factory=dict)


class Refused(Exception):
    """A tracker refused a request. The message is displayed, so it must hold no secrets."""


class TrackerClient(Protocol):
    """The client of one remote run. It is used by one thread; every method may raise any exception."""

    where: str  # address of the server, or path of the folder

    def open(self, about: TrackedExecution, sent: int) -> Mapping[str, int]:
        """Begin or continue the remote run, after `sent` points. Returns the last step of each metric that it has."""

    def send(self, points: Sequence[Point]) -> None: ...

    def end(self, outcome: Outcome) -> None: ...


class Tracker:
    """Sends the measurements of an execution through a client, in its own thread."""

    def __init__(self, client: TrackerClient, about: TrackedExecution, events: Path, state: Path) -> None:
        """`events`: the prefix of the paths of all event files of the execution. `state`: the file of what was sent."""
        self._client, self._about, self._events, self._state = client, about, events, state
        record = read_json(state)
        record = record if isinstance(record, dict) and record.get("execution") == about.execution else {}
        self._offsets: dict[str, int] = record.get("offsets", {})
        self._steps: dict[str, int] = record.get("steps", {})  # tag -> the last step that was sent
        self._sent: int = record.get("sent", 0)  # points
        self._opened = self._abandoned = self._warned = self._ended = False
        self._outcome: Outcome | None = None
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"telemetry-{type(client).__name__}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Send what was written since the last time."""
        self._woken.set()

    def end(self, outcome: Outcome) -> None:
        """Start to send the remaining points and the outcome; `close` waits for it."""
        self._outcome = outcome
        self._woken.set()

    def close(self, start: float) -> int:
        """Wait a few seconds for the end. Returns the number of measurements that were not delivered.

        `start`: when the wait for all trackers started, on the monotonic clock.
        """
        patience = SILENT_S if self._client.where in _silent else LINGER_S
        # A tracker that is not done by then is abandoned: its thread may go on, but leaves the state file alone.
        self._thread.join(max(0.0, start + patience - time.monotonic()))
        self._abandoned = True
        if self._ended:
            _silent.discard(self._client.where)
            return 0
        if self._thread.is_alive():
            _silent.add(self._client.where)
        self._warn("it is too slow")
        # Count the points in the files that were not sent.
        steps = dict(self._steps)
        try:
            return sum(len(list(_new(points, steps))) for points, *_ in read_points(self._events, dict(self._offsets)))
        except OSError as error:
            logger.warning("telemetry: the events cannot be read: %s", error)
            return 0

    def _run(self) -> None:
        while not self._abandoned:
            self._woken.wait()
            self._woken.clear()
            outcome = self._outcome
            try:
                self._deliver()
                if outcome is not None and not self._abandoned:
                    self._client.end(outcome)
                    self._ended = True
            except Exception as error:  # an exception of a client must not end the run
                self._warn(str(error) if isinstance(error, Refused) else type(error).__name__)
            if outcome is not None:
                return

    def _deliver(self) -> None:
        # The server may have more points than the state file records, if an attempt was killed after sending.
        if not self._opened:
            for tag, step in self._client.open(self._about, self._sent).items():
                self._steps[tag] = max(step, self._steps.get(tag, step))
            self._opened = True
        for points, name, offset in read_points(self._events, dict(self._offsets)):
            # On a copy: `_steps` moves on only with what was really sent.
            new = _new(points, dict(self._steps))
            while batch := list(islice(new, BATCH)):
                if self._abandoned:
                    return
                self._client.send(batch)
                self._sent += len(batch)
                self._steps |= {point.tag: point.step for point in batch}
            if self._abandoned:
                return  # another attempt may be using the state file by now
            self._offsets[name] = offset
            if self._state.parent.is_dir():  # else the staging folder was published, and nothing resumes the execution
                record = {"execution": self._about.execution, "offsets": self._offsets, "steps": self._steps}
                write_json(self._state, {**record, "sent": self._sent}, durable=False)

    def _warn(self, reason: str) -> None:
        """Log once that metrics are not delivered."""
        if not self._warned:
            self._warned = True
            logger.warning("telemetry: %s does not accept metrics (%s); the run continues", self._client.where, reason)


def _new(points: Sequence[Point], steps: dict[str, int]) -> Iterator[Point]:
    """Yield the points of steps after the last one of their tag, and update `steps` (tag -> step) with them.

    A resumed attempt measures some steps again, which must not be sent twice.
    """
    for point in points:
        if point.step > steps.get(point.tag, -1):
            steps[point.tag] = point.step
            yield point


def _flat(value: Any, path: str = "") -> list[tuple[str, str]]:
    """The leaves of nested mappings, as (dotted path, text)."""
    if isinstance(value, Mapping) and value:
        rows = [_flat(part, f"{path}.{name}" if path else str(name)) for name, part in value.items()]
        return [row for part in rows for row in part]
    return [(path, str(value))] if path else []
