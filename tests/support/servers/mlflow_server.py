"""An MLflow tracking server for tests: the part of its REST API 2.0 that `tasks.engine.telemetry` uses.

It answers as MLflow 3.17.2 does: unknown names are 404, an experiment that is there already 400, and a metric that it
has (key, step, time and value) is kept once.
"""

import itertools
import re
import threading
from typing import Any
from urllib.parse import parse_qs

from tests.support.servers.http_server import FakeServer, Request, Response, json_response


class FakeMlflow(FakeServer):
    """Keeps experiments and runs. `status`: what every request is answered with, if it is not 200; `hold`: answers wait
    until it is set."""

    keep_alive = False

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}  # name -> id
        self.runs: dict[str, dict[str, Any]] = {}
        self.headers: list[dict[str, str]] = []
        self.status = 200
        self.hold = threading.Event()
        self.hold.set()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def respond(self, request: Request) -> Response:
        self.hold.wait()
        if self.status != 200:
            return json_response({"error_code": "INTERNAL_ERROR"}, self.status)
        self.headers.append(dict(request.headers))
        action = request.path.removeprefix("/api/2.0/mlflow/").replace("/", "_").replace("-", "_")
        body = request.json() if request.body else {name: value for name, [value] in parse_qs(request.query).items()}
        with self._lock:
            return getattr(self, f"_{action}")(**body)

    def _experiments_get_by_name(self, experiment_name: str) -> Response:
        if experiment_name not in self.experiments:
            return json_response({"error_code": "RESOURCE_DOES_NOT_EXIST"}, 404)
        return json_response({"experiment": {"experiment_id": self.experiments[experiment_name]}})

    def _experiments_create(self, name: str) -> Response:
        if name in self.experiments:
            return json_response({"error_code": "RESOURCE_ALREADY_EXISTS"}, 400)
        self.experiments[name] = str(next(self._numbers))
        return json_response({"experiment_id": self.experiments[name]})

    def _runs_search(self, experiment_ids: list[str], filter: str, max_results: int) -> Response:
        name, value = re.fullmatch(r"tags\.`(.+)` = '(.*)'", filter).groups()
        rows = [run for run in self.runs.values() if run["tags"].get(name) == value]
        rows = [run for run in rows if run["experiment_id"] in experiment_ids]
        return json_response({"runs": [self._run(run) for run in rows[:max_results]]} if rows else {})

    def _runs_create(self, experiment_id: str, run_name: str, start_time: int, tags: list[dict[str, str]]) -> Response:
        run = {"run_id": f"run{next(self._numbers)}", "experiment_id": experiment_id, "name": run_name, "metrics": {}}
        self.runs[run["run_id"]] = run | {"params": {}, "tags": _values(tags), "status": "RUNNING"}
        return json_response({"run": self._run(self.runs[run["run_id"]])})

    def _runs_update(self, run_id: str, status: str, end_time: int | None = None) -> Response:
        self.runs[run_id]["status"] = status
        return json_response({"run_info": {"run_id": run_id, "status": status}})

    def _runs_log_batch(
        self, run_id: str, metrics: Any = (), params: Any = (), tags: Any = (), **unknown: Any
    ) -> Response:
        if unknown or len(metrics) > 1000 or len(params) > 100 or len(tags) > 100:
            return json_response({"error_code": "INVALID_PARAMETER_VALUE"}, 400)
        run = self.runs[run_id]
        for row in metrics:
            run["metrics"][row["key"], row["step"], row["timestamp"], row["value"]] = None
        for name, rows in (("params", params), ("tags", tags)):
            run[name] |= _values(rows)
        return json_response({})

    def _run(self, run: dict[str, Any]) -> dict[str, Any]:
        latest = {}
        for key, step, moment, value in sorted(run["metrics"], key=lambda metric: metric[1:3]):
            latest[key] = {"key": key, "value": value, "timestamp": moment, "step": step}
        info = {"run_id": run["run_id"], "run_name": run["name"], "status": run["status"]}
        return {"info": info, "data": {"metrics": list(latest.values())}}

    def curve(self, key: str) -> list[tuple[int, Any]]:
        """(step, value) of a metric of the only run, in the order of arrival."""
        [run] = self.runs.values()
        return [(step, value) for name, step, _, value in run["metrics"] if name == key]


def _values(rows: list[dict[str, str]]) -> dict[str, str]:
    return {row["key"]: row["value"] for row in rows}
