"""`nautile up` and `nautile down`: Prefect's server, the deployments and the dashboard, as three processes on loopback.

`services.json` in the store lists them with their start times, so that `down` ends only these processes, never a later
process with the same id. If the server listens on another address than loopback, it requires a login, which is
generated and stored in a file that only its owner can read.
"""

import json
import os
import secrets
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil

from nautile.common.errors import ConfigError
from nautile.common.files import read_json, write_json
from nautile.common.processes import is_loopback, listen, module_command, url_host
from nautile.configs.stages import STAGES
from nautile.flows.operate import prefect_server
from nautile.flows.operate.prefect_calls import call
from nautile.flows.operate.prefect_faults import database_fault, last_error, setting_fault
from nautile.store.artifacts import Store
from nautile.tasks.engine import prefect_page

# One per stage, and those of the pipeline, the evaluation and the regression.
DEPLOYMENTS = len(STAGES) + 3
STARTUP_S = 180.0
STOP_S = 15.0  # then what is left of its processes is killed
_HOST = "127.0.0.1"


@dataclass(frozen=True)
class Service:
    """A process that `up` started. `born`: its start time, to distinguish it from a later process with the same id."""

    name: str
    pid: int
    born: float
    url: str
    log: str

    def alive(self) -> bool:
        """Whether this process still runs."""
        try:
            process = psutil.Process(self.pid)
            return abs(process.create_time() - self.born) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


@dataclass(frozen=True)
class _Launch:
    """How to start a service, and how to check that it is ready."""

    name: str
    command: list[str]
    environment: dict[str, str]
    url: str
    ready: Callable[[Service], bool]


def up(
    store: Store,
    config: str,
    server_port: int,
    dashboard_port: int,
    report: Callable[[str], None],
    host: str = _HOST,
) -> list[Service]:
    """Start the services that do not run, and wait until they answer; `report` receives a line about each.

    `host`: the address that the server listens on. Raises `ConfigError` if a service does not start.
    """
    prefect_server.configure_prefect(store)
    known = {service.name: service for service in services(store)}
    running = {name: service for name, service in known.items() if service.alive()}
    name = url_host(host)
    # A server that has died comes back where the services that still run look for it.
    if running and "server" in known and "server" not in running:
        server_port = urlsplit(known["server"].url).port or server_port
    # A service that runs already keeps its address, whatever the ports of this call; the others are to find it there.
    api = running["server"].url if "server" in running else f"http://{name}:{server_port}/api"
    page = running["dashboard"].url if "dashboard" in running else f"http://{_HOST}:{dashboard_port}"
    nautile = module_command("nautile.flows.cli.main")
    api_variable = {"PREFECT_API_URL": api}
    login = None
    if "server" not in running:
        if host in ("0.0.0.0", "::"):
            raise ConfigError(f"--host {host}: name the address at which other machines reach this machine")
        listen(host, server_port).close()  # fails at once, where the server would fail after ten seconds
        if not is_loopback(host):
            login = os.environ["PREFECT_API_AUTH_STRING"] = _login(store, api)
    use_login(store)
    start_server = module_command("nautile.flows.operate.prefect_server", str(server_port))
    server = prefect_server.server_settings(host, server_port, login)
    deploy_command, deploy_variables = [*nautile, "deploy", config], api_variable | {prefect_page.DASHBOARD_URL: page}
    dashboard_command = [*nautile, "dashboard", "--port", str(dashboard_port)]
    # In this order: the deployments register with the server, and the dashboard links to it.
    launches = [
        _Launch(
            "server", start_server, server, api, lambda service: prefect_server.healthy(service.url, timeout_s=5.0)
        ),
        _Launch("deployments", deploy_command, deploy_variables, api, _is_deployed),
        _Launch("dashboard", dashboard_command, api_variable, page, _dashboard_answers),
    ]
    for launch in launches:
        if launch.name in running:
            continue
        report(f"starting {launch.name}")
        log = store.root / "logs" / f"{launch.name}.log"
        # The log is appended to, and only new lines say why this start failed.
        earlier = log.stat().st_size if log.exists() else 0
        service = _start(store, launch, log)
        running[launch.name] = service
        # Written before the wait, so that `down` also ends a service that does not become ready; in the order of the
        # launches, whichever of them was started again, because `down` goes through it in reverse.
        entries = [asdict(running[other.name]) for other in launches if other.name in running]
        write_json(_record(store), {"services": entries})
        _wait(service, launch.ready, earlier)
    return [running[launch.name] for launch in launches]


def use_login(store: Store) -> Path | None:
    """Set PREFECT_API_AUTH_STRING to the login of the server that `up` started, if this process uses that server.

    It does if PREFECT_API_URL names that server or is not set; a login in the environment is kept. Returns the login's
    file, or None if that server does not run or requires no login.
    """
    login = read_json(_login_file(store))
    if not isinstance(login, dict) or url_of(store, "server") != login["api"]:
        return None
    if os.environ.get("PREFECT_API_URL") in (None, login["api"]):
        os.environ.setdefault("PREFECT_API_AUTH_STRING", login["login"])
    return _login_file(store)


def join_server(store: Store) -> str | None:
    """Set PREFECT_API_URL to the server that `up` started, unless it is set; returns the address of the API.

    None if this process uses another server, or if that server does not answer. Call it before Prefect is imported,
    which reads the setting at import.
    """
    url = url_of(store, "server")
    if "PREFECT_API_URL" not in os.environ and url and prefect_server.healthy(url, timeout_s=5.0):
        os.environ["PREFECT_API_URL"] = url
    use_login(store)
    return url if url == os.environ.get("PREFECT_API_URL") else None


def services(store: Store) -> list[Service]:
    """The services that `up` has started and `down` has not ended, running or not."""
    return [Service(**fields) for fields in (read_json(_record(store)) or {}).get("services", [])]


def url_of(store: Store, name: str) -> str | None:
    """The address of a running service (of the `server`: its API); None if it does not run."""
    return next((service.url for service in services(store) if service.name == name and service.alive()), None)


def down(store: Store, report: Callable[[str], None] = lambda run: None) -> list[Service]:
    """End the services that `up` started, with their child processes; returns those that were still running.

    `report` receives the id of each run that is stopped with them.
    """
    ended = []
    # The reverse of the start: the deployments still report their last states to the server.
    for service in reversed(services(store)):
        if service.alive():
            if service.name == "deployments":
                _end_runs(service, report)
            _end(service)
            ended.append(service)
    _record(store).unlink(missing_ok=True)
    _login_file(store).unlink(missing_ok=True)
    return ended


def _login(store: Store, api: str) -> str:
    """The server's login, `user:password`: that of the environment, else a new one; writes it to the store."""
    login = os.environ.get("PREFECT_API_AUTH_STRING") or f"nautile:{secrets.token_urlsafe(24)}"
    path = _login_file(store)
    path.parent.mkdir(parents=True, exist_ok=True)
    # `O_EXCL` on a name that was just removed: the file is new, so nobody else has it open, and it is never readable to
    # others, not even for a moment.
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump({"api": api, "login": login}, file)
    return login


def _login_file(store: Store) -> Path:
    return store.root / "prefect" / "login.json"


def _start(store: Store, launch: _Launch, log: Path) -> Service:
    inherited = os.environ if launch.name == "server" else prefect_server.without_database(os.environ)
    with log.open("ab") as output:
        # A session of its own: `up` returns, and closing its terminal must not end the services.
        process = subprocess.Popen(
            launch.command,
            env={**inherited, "NAUTILE_STORE": str(store.root), **launch.environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    return Service(launch.name, process.pid, psutil.Process(process.pid).create_time(), launch.url, str(log))


def _wait(service: Service, ready: Callable[[Service], bool], earlier: int) -> None:
    """Wait until the service is ready. `earlier`: the size of its log before it was started, in bytes.

    Raises `ConfigError` if it ends, or is not ready within `STARTUP_S`.
    """
    deadline = time.monotonic() + STARTUP_S
    while not ready(service):
        if not service.alive():
            new_lines = Path(service.log).read_bytes()[earlier:].decode(errors="replace").splitlines()
            if fault := setting_fault("\n".join(new_lines)):
                raise ConfigError(f"{service.name} did not start: {fault}")
            fault = database_fault(new_lines) if service.name == "server" else ""
            more = f"; {fault}" if fault else ""
            raise ConfigError(f"{service.name} did not start: {last_error(new_lines)}{more} (its log is {service.log})")
        if time.monotonic() > deadline:
            raise ConfigError(f"{service.name} does not answer at {service.url}; its log is {service.log}")
        time.sleep(0.2)


def _end_runs(deployments: Service, report: Callable[[str], None]) -> None:
    """End the flow runs of the deployments' process first, so that they give back their slots and report their end.

    The process itself ends at once and leaves them behind.
    """
    runs: dict[psutil.Process, str] = {}
    for process in psutil.Process(deployments.pid).children():
        with suppress(psutil.Error):
            if run := process.environ().get("PREFECT__FLOW_RUN_ID"):
                runs[process] = run
    for process, run in runs.items():
        report(run)
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    psutil.wait_procs(list(runs), timeout=STOP_S)


def _end(service: Service) -> None:
    """Terminate the process, and kill it and its children if they do not end within `STOP_S`."""
    try:
        processes = [psutil.Process(service.pid), *psutil.Process(service.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    processes[0].terminate()
    _, alive = psutil.wait_procs(processes, timeout=STOP_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=STOP_S)


def _record(store: Store) -> Path:
    return store.root / "services.json"


def _dashboard_answers(service: Service) -> bool:
    try:
        return httpx.get(f"{service.url}/healthz", timeout=5.0).is_success
    except httpx.HTTPError:
        return False


def _is_deployed(service: Service) -> bool:
    """Whether this process has registered all deployments; those of an earlier process do not count."""
    try:
        entries = call("POST", service.url, "/deployments/filter", json={}, timeout=5.0).raise_for_status().json()
    except httpx.HTTPError:
        return False
    recent = sum(datetime.fromisoformat(entry["updated"]).timestamp() >= service.born for entry in entries)
    return recent >= DEPLOYMENTS
