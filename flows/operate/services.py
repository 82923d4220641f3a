"""`nautile up` and `nautile down`: Prefect's server, the deployments and the dashboard, as three processes on loopback.

`services.json` in the store lists them with their start times, so that `down` ends only these processes, never a later
process with the same id. It also has how `up` was called, by which `nautile retry` starts them again after `down`. If
the server listens on another address than loopback, it requires a login, which is generated and stored in a file that
only its owner can read.
"""

import hashlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
from pydantic import TypeAdapter, ValidationError

from nautile.common.commands import shell_command
from nautile.common.errors import ConfigError
from nautile.common.files import read_json, write_json
from nautile.common.processes import is_loopback, listen, machine_start, module_command, pid_space, url_host
from nautile.configs.load import load
from nautile.flows.operate import prefect_server
from nautile.flows.operate.prefect_calls import call
from nautile.flows.operate.prefect_faults import database_fault, database_is_elsewhere, last_error, setting_fault
from nautile.store.artifacts import Store
from nautile.store.locks import KeyLock
from nautile.store.manifest import host
from nautile.tasks.engine.errors import DASHBOARD_URL, slug

STARTUP_S = 180.0
STOP_S = 15.0  # then what is left of its processes is killed
_HOST = "127.0.0.1"
_ENDED = ["COMPLETED", "FAILED", "CRASHED", "CANCELLED"]  # Prefect's types of the last state of a run


@dataclass(frozen=True)
class Service:
    """A process that `up` started. `born` and `machine` distinguish it from another process with the same id.

    `born`: its start, as the kernel counts it: the time of day of a start moves with each correction of the clock.
    `machine`: what numbers of processes are those of (`pid_space`). `host`: the machine's name.
    """

    name: str
    pid: int
    born: str
    url: str
    log: str
    machine: str
    host: str

    @classmethod
    def begun(cls, name: str, pid: int, url: str, log: str) -> "Service":
        """The service that process `pid` of this machine is."""
        return cls(name, pid, _birth(pid) or "ended", url, log, pid_space(), host())

    def alive(self) -> bool:
        """Whether this process still runs, as far as this machine can know."""
        return self.machine == pid_space() and _birth(self.pid) == self.born


@dataclass(frozen=True)
class LastUp:
    """How the services were started the last time, and what history of runs their server has.

    `folder`: the working folder, from which `config` may be a relative path. `home`: PREFECT_HOME of the server; empty
    if its database is elsewhere.
    """

    config: str
    folder: str
    server_port: int
    dashboard_port: int
    address: str
    home: str

    def command(self) -> list[str]:
        """The words of the command that starts them again; `folder` must be the working folder."""
        ports = ["--port", str(self.server_port), "--dashboard-port", str(self.dashboard_port)]
        return ["up", self.config, *ports, "--host", self.address]


@dataclass(frozen=True)
class _Launch:
    """How to start a service, and how to check that it is ready."""

    name: str
    command: list[str]
    environment: dict[str, str]
    url: str
    ready: Callable[[Service], bool]


_SERVICES, _LAST_UP = TypeAdapter(list[Service]), TypeAdapter(LastUp)


def up(
    store: Store,
    config: str,
    server_port: int,
    dashboard_port: int,
    report: Callable[[str], None],
    address: str = _HOST,
) -> list[Service]:
    """Start the services that do not run, and wait until they answer; `report` receives a line about each.

    `address`: the one that the server listens on. Raises `ConfigError` if a service does not start.
    """
    prefect_server.configure_prefect(store)
    with _alone(store):
        return _up(store, config, server_port, dashboard_port, report, address)


def _up(
    store: Store, config: str, server_port: int, dashboard_port: int, report: Callable[[str], None], address: str
) -> list[Service]:
    known = {service.name: service for service in services(store)}
    running = {name: service for name, service in known.items() if service.alive()}
    name = url_host(address)
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
        if address in ("0.0.0.0", "::"):
            raise ConfigError(f"--host {address}: name the address at which other machines reach this machine")
        listen(address, server_port).close()  # fails at once, where the server would fail after ten seconds
        if not is_loopback(address):
            login = os.environ["PREFECT_API_AUTH_STRING"] = _login(store, api)
    use_login(store)
    start_server = module_command("nautile.flows.operate.prefect_server", str(server_port))
    server = prefect_server.server_settings(address, server_port, login)
    deploy_command, deploy_variables = [*nautile, "deploy", config], api_variable | {DASHBOARD_URL: page}
    dashboard_command = [*nautile, "dashboard", "--port", str(dashboard_port)]
    # In this order: the deployments register with the server, and the dashboard links to it.
    launches = [
        _Launch(
            "server", start_server, server, api, lambda service: prefect_server.healthy(service.url, timeout_s=5.0)
        ),
        _Launch(
            "deployments", deploy_command, deploy_variables, api, partial(_is_deployed, declaration(load(config).name))
        ),
        _Launch("dashboard", dashboard_command, api_variable, page, _dashboard_answers),
    ]
    before = last_up(store)
    home = "" if database_is_elsewhere() else os.environ.get("PREFECT_HOME", str(store.prefect))
    home = before.home if before and "server" in running else home
    ports = urlsplit(api).port or server_port, urlsplit(page).port or dashboard_port
    last = LastUp(config, str(Path.cwd()), *ports, address=urlsplit(api).hostname or address, home=home)
    for launch in launches:
        if launch.name in running:
            continue
        report(f"starting {launch.name}")
        log = store.logs / f"{launch.name}.log"
        # The log is appended to, and only new lines say why this start failed.
        earlier = log.stat().st_size if log.exists() else 0
        service = _start(store, launch, log)
        running[launch.name] = service
        # Written before the wait, so that `down` also ends a service that does not become ready; in the order of the
        # launches, whichever of them was started again, because `down` goes through it in reverse.
        _write(store, [running[other.name] for other in launches if other.name in running], last)
        _wait(service, launch.ready, earlier)
    return [running[launch.name] for launch in launches]


@contextmanager
def _alone(store: Store) -> Iterator[None]:
    """Context of a change of the services: no other one of this store changes them meanwhile.

    Raises `ConfigError` if one does, or if they are those of another machine, of which nothing is known here.
    """
    lock = KeyLock(store.locks / "services.lock")
    if not lock.try_acquire():
        raise ConfigError(f"another `nautile up` or `nautile down` of {store.root} is at work: wait until it has ended")
    try:
        for service in services(store):
            # In another container of this machine their numbers are of no use; what they hold tells whether they live.
            is_here = service.machine.partition(" ")[0] == machine_start()
            is_ended = service.machine == pid_space() or not _life(store, service.name).held_elsewhere()
            if not is_ended if is_here else service.host != host():
                where = f"a container of this machine, {service.host}" if is_here else f"the machine {service.host}"
                raise ConfigError(
                    f"the services of {store.root} are those of {where}: `nautile down` there ends them; if that is "
                    f"gone, remove {_record(store)}"
                )
        yield
    finally:
        lock.remove()


def _life(store: Store, name: str) -> KeyLock:
    """The lock that a service holds as long as it lives: also processes that do not see it can tell by that."""
    return KeyLock(store.locks / f"service-{name}.lock")


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
    """The services that `up` has started and `down` has not ended, running or not.

    Raises `ConfigError` if their record is not of this version's form.
    """
    path = _record(store)
    if not path.exists():
        return []
    try:
        return _SERVICES.validate_python(read_json(path)["services"])  # type: ignore[index]  # caught below
    except (ValidationError, LookupError, TypeError):
        raise ConfigError(
            f"{path} cannot be read by this version: end the processes that it names, and remove it"
        ) from None


def last_up(store: Store) -> LastUp | None:
    """How `up` has started the services the last time, also after `down`; None if that is not known."""
    try:
        return _LAST_UP.validate_python(read_json(_record(store))["last"])  # type: ignore[index]  # caught below
    except (ValidationError, LookupError, TypeError):
        return None


def up_again(store: Store) -> None:
    """Start what does not run of the services, as `nautile up` was called last; it prints what it has started.

    Raises `ConfigError` if that is not known, or fails.
    """
    if (last := last_up(store)) is None:
        raise ConfigError("no Prefect server: start it with `nautile up`, or name yours in PREFECT_API_URL")
    command = shell_command("nautile", *last.command())
    if not Path(last.folder).is_dir():
        raise ConfigError(f"no Prefect server: its folder {last.folder} is gone; start one with `{command}`")
    if subprocess.run(
        module_command("nautile.flows.cli.main", *last.command()), cwd=last.folder, check=False
    ).returncode:
        raise ConfigError(f"no Prefect server: `{command}` in {last.folder} has failed, as said above")


def url_of(store: Store, name: str) -> str | None:
    """The address of a running service (of the `server`: its API); None if it does not run."""
    return next((service.url for service in services(store) if service.name == name and service.alive()), None)


def down(store: Store, report: Callable[[str], None] = lambda run: None) -> list[Service]:
    """End the services that `up` started, with their child processes; returns those that were still running.

    `report` receives the id of each run that is stopped with them.
    """
    if not _record(store).exists():
        return []
    with _alone(store):
        return _down(store, report)


def _down(store: Store, report: Callable[[str], None]) -> list[Service]:
    use_login(store)
    ended = []
    # The reverse of the start: the deployments still report their last states to the server.
    for service in reversed(services(store)):
        if service.alive():
            if service.name == "deployments":
                _end_runs(service, report)
            _end(service)
            ended.append(service)
    if (last := last_up(store)) is None:
        _record(store).unlink(missing_ok=True)
    else:
        _write(store, [], last)
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
    return store.prefect / "login.json"


def _start(store: Store, launch: _Launch, log: Path) -> Service:
    inherited = os.environ if launch.name == "server" else prefect_server.without_database(os.environ)
    life = _life(store, launch.name)
    with life.if_free(), log.open("ab") as output:
        # A session of its own: `up` returns, and closing its terminal must not end the services.
        process = subprocess.Popen(
            launch.command,
            env={**inherited, "NAUTILE_STORE": str(store.root), **launch.environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=life.descriptors,
        )
    return Service.begun(launch.name, process.pid, launch.url, str(log))


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
    runs = run_processes(deployments.pid)
    ended = _ended(deployments.url, list(runs.values())) if runs else set()
    for process, run in runs.items():
        if run not in ended:
            report(run)
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    psutil.wait_procs(list(runs), timeout=STOP_S)


def _ended(api: str, runs: list[str]) -> set[str]:
    """Those of the runs that the server has as ended: their processes live for a moment more.

    None of them if the server does not answer.
    """
    body = {"flow_runs": {"id": {"any_": runs}, "state": {"type": {"any_": _ENDED}}}}
    try:
        response = call("POST", api, "/flow_runs/filter", json=body, timeout=5.0).raise_for_status()
        return {run["id"] for run in response.json()}
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return set()


def run_processes(deployments: int) -> dict[psutil.Process, str]:
    """The processes of flow runs that the process `deployments` has started -> the ids of their runs."""
    runs: dict[psutil.Process, str] = {}
    for process in psutil.Process(deployments).children():
        with suppress(psutil.Error):
            if run := process.environ().get("PREFECT__FLOW_RUN_ID"):
                runs[process] = run
    return runs


def _end(service: Service) -> None:
    """Terminate the process, and kill it and its children if they do not end within `STOP_S`."""
    try:
        processes = [psutil.Process(service.pid), *psutil.Process(service.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    try:
        processes[0].terminate()
    except psutil.AccessDenied:
        raise ConfigError(
            f"{service.name} (process {service.pid}) is another user's, who alone can end it with `nautile down`"
        ) from None
    _, alive = psutil.wait_procs(processes, timeout=STOP_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=STOP_S)


def _birth(pid: int) -> str | None:
    """When process `pid` has begun, as text; None if there is none, or only its exit status is left."""
    try:
        if sys.platform == "linux":
            # In ticks since the machine's start. The name of the program, in brackets, may hold anything.
            state, *fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            return None if state == b"Z" else fields[18].decode()
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    except (OSError, psutil.NoSuchProcess):
        return None


def _write(store: Store, running: Sequence[Service], last: LastUp) -> None:
    write_json(_record(store), {"services": [asdict(service) for service in running], "last": asdict(last)})


def _record(store: Store) -> Path:
    return store.services


def _dashboard_answers(service: Service) -> bool:
    try:
        return httpx.get(f"{service.url}/healthz", timeout=5.0).is_success
    except httpx.HTTPError:
        return False


def declaration(config: str) -> str:
    """The name of the server's variable about a configuration, which `nautile deploy` writes last as it starts."""
    # With a digest: the server takes few characters, and names may differ in the others alone.
    return f"nautile_declared_{slug(config).replace('-', '_')}_{hashlib.sha256(config.encode()).hexdigest()[:8]}"


def _is_deployed(variable: str, service: Service) -> bool:
    """Whether this process has registered all deployments; what an earlier process has declared does not count."""
    try:
        response = call("GET", service.url, f"/variables/name/{variable}", timeout=5.0)
        declared = response.raise_for_status().json()["updated"]
        return datetime.fromisoformat(declared).timestamp() >= psutil.Process(service.pid).create_time()
    except (httpx.HTTPError, psutil.NoSuchProcess):
        return False
