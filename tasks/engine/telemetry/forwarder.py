"""Forward metrics while a stage works: to the sinks of `[telemetry]`, by default to none.

The parent process of the stage reads them from the event files that it also ingests, so the stage is not involved.
Separate threads talk to servers, so that a slow or unreachable server delays no step. Measurements that are not
delivered are counted.
"""

import importlib.util
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from nautile.common.errors import ConfigError
from nautile.configs.operation import TelemetryConfig
from nautile.tasks.engine.failure import slug
from nautile.tasks.engine.telemetry.collector import Collector
from nautile.tasks.engine.telemetry.event_file import EventFile
from nautile.tasks.engine.telemetry.mlflow_client import MlflowClient
from nautile.tasks.engine.telemetry.points import Point, read_points
from nautile.tasks.engine.telemetry.trackers import Outcome, TrackedExecution, Tracker
from nautile.tasks.engine.telemetry.wandb_client import WandbClient

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """A destination of the points of one attempt. `close` returns how many were not delivered.

    Both methods may raise `OSError`.
    """

    def write(self, points: Sequence[Point]) -> None: ...
    def close(self) -> int: ...


class Forwarder:
    """Reads the event files of one attempt as they grow, and passes their metrics to the sinks.

    Trackers read the files themselves, because they also send what earlier attempts could not.
    """

    def __init__(self, events: Path, sinks: Sequence[Sink], trackers: Sequence[Tracker] = ()) -> None:
        """`events`: a path; the event files are those in its folder whose names start with its name."""
        self._events, self._sinks, self._trackers = events, list(sinks), list(trackers)
        self._offsets: dict[str, int] = {}
        self._dropped_sinks = self._undelivered = 0

    def forward(self) -> None:
        """Forward what was written since the last call. Raises nothing: the store has all measurements anyway."""
        for tracker in self._trackers:
            tracker.wake()
        if not self._sinks and not self._dropped_sinks:
            return
        # Offsets are moved on even if a sink fails: a point is offered to each sink once.
        points: list[Point] = []
        try:
            for added, name, offset in read_points(self._events, self._offsets):
                points += added
                self._offsets[name] = offset
        except OSError as error:
            logger.warning("telemetry: the events cannot be read: %s", error)
        # A point counts once for each sink that does not get it.
        self._undelivered += len(points) * self._dropped_sinks
        for sink in self._sinks[:] if points else ():
            try:
                sink.write(points)
            except OSError as error:
                self._drop(sink, error)
                self._undelivered += len(points)

    def close(self, outcome: Outcome) -> int:
        """Forward the remaining points and the outcome. Returns the number of measurements that were not delivered."""
        for tracker in self._trackers:
            tracker.end(outcome)
        self.forward()
        for sink in self._sinks[:]:
            try:
                self._undelivered += sink.close()
            except OSError as error:
                self._drop(sink, error)
        # The trackers' threads have been at it since `end` above; all of them share the few seconds from here.
        start = time.monotonic()
        return self._undelivered + sum(tracker.close(start) for tracker in self._trackers)

    def _drop(self, sink: Sink, error: OSError) -> None:
        logger.warning("telemetry: the run continues without its %s: %s", type(sink).__name__, error)
        self._sinks.remove(sink)
        self._dropped_sinks += 1


def forwarder_of(
    config: TelemetryConfig, folder: Path, attempt: int, execution: TrackedExecution, state: Path
) -> Forwarder:
    """The forwarder to the configured sinks. Raises `ConfigError` if an optional package is not installed.

    `folder`: of the event files. `state`: folder in which trackers record, between attempts, what they have delivered.
    """
    sinks: list[Sink] = []
    if config.tensorboard:
        sinks.append(
            _extra("tensorboard", lambda: EventFile(Path(config.tensorboard) / execution.run / slug(execution.label)))
        )
    if config.otlp:
        resource = {"nautile.run": execution.run, "nautile.stage": execution.stage, "nautile.label": execution.label}
        sinks.append(_extra("otel", lambda: Collector(config.otlp, config.timeout_s, resource)))
    trackers = [
        Tracker(make(), execution, folder / execution.files, state / f"telemetry-{name}.json")
        for name, make in _clients(config).items()
    ]
    return Forwarder(folder / f"{execution.files}{attempt}", sinks, trackers)


def _clients(config: TelemetryConfig) -> Mapping[str, Callable[[], Any]]:
    """The factory of the client of each configured tracker, by name."""
    makers: dict[str, Callable[[], Any]] = {}
    if config.mlflow:
        makers["mlflow"] = lambda: MlflowClient(config.mlflow, config.project, config.timeout_s)
    if config.wandb:
        if importlib.util.find_spec("wandb") is None:
            raise ConfigError("telemetry: wandb is not installed: pip install 'nautile[wandb]'")
        makers["wandb"] = lambda: WandbClient(Path(config.wandb), config.project)
    return makers


def _extra(name: str, make: Callable[[], Sink]) -> Sink:
    """Create a sink of an optional extra. Raises `ConfigError` if it is not installed or cannot be opened."""
    try:
        return make()
    except ImportError as error:
        raise ConfigError(f"telemetry: {error.name} is not installed: pip install 'nautile[{name}]'") from None
    except OSError as error:
        raise ConfigError(f"telemetry.{name}: {error}") from None
