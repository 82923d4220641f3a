"""`nautile up` and `nautile down`: Prefect's server, the deployments and the dashboard, as three processes on loopback.

Which they are stands in `services.json` of the store, each with its start time: `down` ends exactly those, never a
later process that got the same id.
"""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from common.errors import ConfigError
from common.files import read_json, write_json
from configs.operation import OperationConfig
from flows.operate import prefect_server as prefect_env
from store.artifacts import Store
from tasks.engine import prefect_page as links

# A flow for each stage, and the pipeline, the evaluation and the regression.
DEPLOYMENTS = len(OperationConfig.model_fields) + 3
STARTUP_S = 180.0
STOP_S = 15.0
_HOST = "127.0.0.1"


@dataclass(frozen=True)
class Service:
    """A process of ours. `born`: its start time as the system tells it, which tells it from a later one of its id."""

    name: str
    pid: int
    born: float
    url: str
    log: str

    def alive(self) -> bool:
        """Whether this very process still runs."""
        try:
            process = psutil.Process(self.pid)
            return abs(process.create_time() - self.born) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def up(store: Store, config: str, server_port: int, dashboard_port: int, tell: Callable[[str], None]) -> list[Service]:
    """Start what is not running and wait until it answers. Raises `ConfigError` if one of them does not come up."""
    prefect_env.quiet(store)
    running = {service.name: service for service in services(store) if service.alive()}
    api = f"http://{_HOST}:{server_port}/api"
    page = f"http://{_HOST}:{dashboard_port}"
    nautile = [sys.executable, "-m", "flows.cli.main"]
    server = {"PREFECT_SERVER_API_HOST": _HOST, "PREFECT_SERVER_API_PORT": str(server_port)}
    where = {"PREFECT_API_URL": api}
    wanted: list[tuple[str, list[str], dict[str, str], str, Callable[[Service], bool]]] = [
        ("server", [sys.executable, "-m", "prefect", "server", "start"], server, api, _answers_health),
        ("deployments", [*nautile, "deploy", config], where | {links.DASHBOARD_URL: page}, api, _deployed),
        ("dashboard", [*nautile, "dashboard", "--port", str(dashboard_port)], where, page, _answers),
    ]
    for name, command, more, url, ready in wanted:
        if name in running:
            continue
        tell(f"starting {name}")
        service = _start(store, name, command, more, url)
        running[name] = service
        _keep(store, running)
        _wait(service, ready)
    return [running[name] for name, *_ in wanted]


def services(store: Store) -> list[Service]:
    """What `up` has started and `down` has not ended, running or not."""
    return [Service(**one) for one in (read_json(_record(store)) or {}).get("services", [])]


def url_of(store: Store, name: str) -> str | None:
    """Where a service that `up` has started answers (`server`: its API), if it runs."""
    return next((one.url for one in services(store) if one.name == name and one.alive()), None)


def down(store: Store) -> list[Service]:
    """End what `up` started, with what these have started; returns those that were still running."""
    ended = []
    for service in reversed(services(store)):
        if service.alive():
            _end(service)
            ended.append(service)
    _record(store).unlink(missing_ok=True)
    return ended


def _start(store: Store, name: str, command: list[str], more: dict[str, str], url: str) -> Service:
    path = store.root / "logs" / f"{name}.log"
    with path.open("ab") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, "NAUTILE_STORE": str(store.root), **more},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    return Service(name, process.pid, psutil.Process(process.pid).create_time(), url, str(path))


def _wait(service: Service, ready: Callable[[Service], bool]) -> None:
    deadline = time.monotonic() + STARTUP_S
    while not ready(service):
        if not service.alive():
            raise ConfigError(f"{service.name} did not come up: {_last_line(service.log)} (its log is {service.log})")
        if time.monotonic() > deadline:
            raise ConfigError(f"{service.name} does not answer at {service.url}; its log is {service.log}")
        time.sleep(0.2)


def _end(service: Service) -> None:
    """Ask it and its children to stop, then make them."""
    try:
        family = [psutil.Process(service.pid), *psutil.Process(service.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    family[0].terminate()
    _, left = psutil.wait_procs(family, timeout=STOP_S)
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=STOP_S)


def _keep(store: Store, running: dict[str, Service]) -> None:
    write_json(_record(store), {"services": [asdict(service) for service in running.values()]})


def _record(store: Store) -> Path:
    return store.root / "services.json"


def _last_line(path: str) -> str:
    lines = [line for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"


def _answers_health(service: Service) -> bool:
    return prefect_env.healthy(service.url, timeout_s=5.0)


def _answers(service: Service) -> bool:
    return _asked(f"{service.url}/healthz") is not None


def _deployed(service: Service) -> bool:
    """Whether this process has registered them all: an earlier one may have left some in the server's memory."""
    told = json.loads(_asked(f"{service.url}/deployments/filter", b"{}") or b"[]")
    fresh = sum(datetime.fromisoformat(one["updated"]).timestamp() >= service.born for one in told)
    return fresh >= DEPLOYMENTS


def _asked(url: str, body: bytes | None = None) -> Any:
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=5.0) as reply:
            return reply.read()
    except (urllib.error.URLError, OSError):
        return None
