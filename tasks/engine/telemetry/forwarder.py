"""Forward metrics while a stage works: to the sinks of `[telemetry]`, or (by default) nowhere.

The stage's parent reads them from the event files that it also ingests, so the stage knows nothing of this. Threads of
their own talk to servers: one that is slow or gone delays no step. Measurements not delivered are counted.
"""

import importlib.util
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from common.errors import ConfigError
from configs.operation import TelemetryConfig
from tasks.engine.failure import slug
from tasks.engine.telemetry.collector import Collector
from tasks.engine.telemetry.event_file import EventFile
from tasks.engine.telemetry.mlflow_client import MlflowClient
from tasks.engine.telemetry.points import Point, read_points
from tasks.engine.telemetry.trackers import Outcome, TrackedExecution, Tracker
from tasks.engine.telemetry.trackio_client import TrackioClient
from tasks.engine.telemetry.wandb_client import WandbClient

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Where the points of one attempt go; `close` returns how many it could not deliver. Both may raise `OSError`."""

    def write(self, points: Sequence[Point]) -> None: ...
    def close(self) -> int: ...


class Forwarder:
    """Reads the event files of one attempt as they grow, and hands their metrics to the sinks.

    Trackers read for themselves, because they also send what an earlier attempt left.
    """

    def __init__(self, events: Path, sinks: Sequence[Sink], trackers: Sequence[Tracker] = ()) -> None:
        """`events`: the files are those in its folder whose names begin with its name."""
        self._events, self._sinks, self._trackers = events, list(sinks), list(trackers)
        self._offsets: dict[str, int] = {}
        self._dropped_sinks = self._undelivered = 0

    def forward(self) -> None:
        """Forward what was written since the last call. Raises nothing, because the store has all of it."""
        for tracker in self._trackers:
            tracker.wake()
        if not self._sinks and not self._dropped_sinks:
            return
        points: list[Point] = []
        try:
            for added, name, offset in read_points(self._events, self._offsets):
                points += added
                self._offsets[name] = offset
        except OSError as error:
            logger.warning("telemetry: the events cannot be read: %s", error)
        self._undelivered += len(points) * self._dropped_sinks
        for sink in self._sinks[:] if points else ():
            try:
                sink.write(points)
            except OSError as error:
                self._drop(sink, error)
                self._undelivered += len(points)

    def close(self, outcome: Outcome) -> int:
        """Forward the rest and how the attempt ended; the number of measurements that were not delivered."""
        for tracker in self._trackers:
            tracker.end(outcome)
        self.forward()
        for sink in self._sinks[:]:
            try:
                self._undelivered += sink.close()
            except OSError as error:
                self._drop(sink, error)
        begun = time.monotonic()
        return self._undelivered + sum(tracker.close(begun) for tracker in self._trackers)

    def _drop(self, sink: Sink, error: OSError) -> None:
        logger.warning("telemetry: the run continues without its %s: %s", type(sink).__name__, error)
        self._sinks.remove(sink)
        self._dropped_sinks += 1


def forwarder_of(
    config: TelemetryConfig, folder: Path, attempt: int, about: TrackedExecution, state: Path
) -> Forwarder:
    """The forwarder to the sinks configured. Raises `ConfigError` if an optional package is not installed.

    `folder`: of the event files; `state`: a folder in which trackers keep, between attempts, what they have delivered.
    """
    sinks: list[Sink] = []
    if config.tensorboard:
        sinks.append(_extra("tensorboard", lambda: EventFile(Path(config.tensorboard) / about.run / slug(about.label))))
    if config.otlp:
        resource = {"nautile.run": about.run, "nautile.stage": about.stage, "nautile.label": about.label}
        sinks.append(_extra("otel", lambda: Collector(config.otlp, config.timeout_s, resource)))
    trackers = [
        Tracker(make(), about, folder / about.files, state / f"telemetry-{name}.json")
        for name, make in _clients(config).items()
    ]
    return Forwarder(folder / f"{about.files}{attempt}", sinks, trackers)


def _clients(config: TelemetryConfig) -> Mapping[str, Callable[[], Any]]:
    """By name, what makes the client of each tracker that is configured."""
    makers: dict[str, Callable[[], Any]] = {}
    if config.mlflow:
        makers["mlflow"] = lambda: MlflowClient(config.mlflow, config.project, config.timeout_s)
    for name, folder, kind in (("trackio", config.trackio, TrackioClient), ("wandb", config.wandb, WandbClient)):
        if folder and importlib.util.find_spec(name) is None:
            raise ConfigError(f"telemetry: {name} is not installed: pip install 'nautile[{name}]'")
        if folder:
            makers[name] = lambda kind=kind, folder=folder: kind(Path(folder), config.project)
    return makers


def _extra(name: str, make: Callable[[], Sink]) -> Sink:
    try:
        return make()
    except ImportError as error:
        raise ConfigError(f"telemetry: {error.name} is not installed: pip install 'nautile[{name}]'") from None
    except OSError as error:
        raise ConfigError(f"telemetry.{name}: {error}") from None
