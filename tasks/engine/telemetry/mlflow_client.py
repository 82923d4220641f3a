"""Client of an MLflow tracking server over its REST API (version 2.0), so that MLflow need not be installed.

Credentials come from MLflow's own environment variables: MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and
MLFLOW_TRACKING_PASSWORD. https://mlflow.org/docs/latest/rest-api.html
"""

import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import httpx

from nautile.tasks.engine.telemetry.points import Point
from nautile.tasks.engine.telemetry.trackers import Outcome, Refused, TrackedExecution

PARAMETERS = 100  # limit of parameters in one request, and of tags
_LONGEST = {"params": 6000, "tags": 5000}  # limit of a value, in characters
_WORDS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}  # as in the JSON encoding of protocol buffers
_STATUS = {"done": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}


class MlflowClient:
    """One run of the experiment `project`, identified by a tag with the id of the execution."""

    def __init__(self, address: str, project: str, timeout_s: float) -> None:
        self.where, self._project = address, project
        token, user = os.environ.get("MLFLOW_TRACKING_TOKEN"), os.environ.get("MLFLOW_TRACKING_USERNAME")
        self._http = httpx.Client(
            base_url=f"{address.rstrip('/')}/api/2.0/mlflow/",
            timeout=timeout_s,
            headers={"Authorization": f"Bearer {token}"} if token and not user else {},
            auth=(user, os.environ.get("MLFLOW_TRACKING_PASSWORD", "")) if user else None,
        )
        self._run = ""

    def open(self, about: TrackedExecution, sent: int) -> Mapping[str, int]:
        """Find the execution's run, or create it. Returns the last step of each metric that the server has."""
        experiment = self._experiment()
        query = {"experiment_ids": [experiment], "filter": f"tags.`nautile.execution` = '{about.execution}'"}
        if runs := self._call("POST", "runs/search", {**query, "max_results": 1}).get("runs"):
            self._run = runs[0]["info"]["run_id"]
            self._call("POST", "runs/update", {"run_id": self._run, "status": "RUNNING"})
            return {row["key"]: int(row.get("step", 0)) for row in runs[0].get("data", {}).get("metrics", [])}
        source = {"mlflow.source.name": f"nautile {about.stage}", "mlflow.source.git.commit": about.commit}
        body: dict[str, Any] = {"experiment_id": experiment, "run_name": about.name}
        body |= {"start_time": time.time_ns() // 10**6, "tags": _rows("tags", about.tags() | source)}
        self._run = self._call("POST", "runs/create", body)["run"]["info"]["run_id"]
        self._log("params", about.parameters())
        return {}

    def send(self, points: Sequence[Point]) -> None:
        """Log the points. Sending a point twice does no harm: the server ignores a metric that it has."""
        metrics = []
        for point in points:
            value = _WORDS.get(str(point.value), point.value)
            moment = point.time_us // 1000
            metrics.append({"key": _name(point.tag), "value": value, "timestamp": moment, "step": point.step})
        self._call("POST", "runs/log-batch", {"run_id": self._run, "metrics": metrics})

    def end(self, outcome: Outcome) -> None:
        """Set the run's status, and the ids of the published artifacts as tags."""
        self._log("tags", {f"nautile.output.{kind}": artifact for kind, artifact in outcome.outputs.items()})
        status = {"status": _STATUS[outcome.state], "end_time": time.time_ns() // 10**6}
        self._call("POST", "runs/update", {"run_id": self._run, **status})

    def _experiment(self) -> str:
        """The id of the experiment, which is created if it does not exist."""
        for is_last in (False, True):
            try:
                name = {"experiment_name": self._project}
                return self._call("GET", "experiments/get-by-name", name)["experiment"]["experiment_id"]
            except Refused:
                if is_last:
                    raise
            try:
                return self._call("POST", "experiments/create", {"name": self._project})["experiment_id"]
            except Refused:  # another step may have created it meanwhile: look it up again
                continue
        raise AssertionError("unreachable")

    def _log(self, kind: str, values: Mapping[str, str]) -> None:
        rows = _rows(kind, values)
        for first in range(0, len(rows), PARAMETERS):
            self._call("POST", "runs/log-batch", {"run_id": self._run, kind: rows[first : first + PARAMETERS]})

    def _call(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if method == "GET":
            reply = self._http.request(method, path, params=body)
        else:
            reply = self._http.request(method, path, json=body)
        if reply.status_code != 200:
            raise Refused(f"HTTP {reply.status_code} of {path}")
        return reply.json()


def _rows(kind: str, values: Mapping[str, str]) -> list[dict[str, str]]:
    pairs: Iterable[tuple[str, str]] = ((name, value[: _LONGEST[kind]]) for name, value in values.items())
    return [{"key": _name(name), "value": value} for name, value in pairs]


def _name(name: str) -> str:
    """A name that MLflow accepts: at most 250 characters, with invalid ones replaced."""
    return re.sub(r"[^\w\-. /]", "_", name)[:250]
