"""Prefect's settings for `nautile`, and the embedded Prefect server of a run without PREFECT_API_URL.

Call `configure_prefect` before anything imports `prefect`, which reads its settings at import. Settings of the operator
are not changed.

The server is our own child process instead of Prefect's ephemeral server, because that one outlives a `kill -9` of the
run, writes to the terminal, and often exceeds its start limit of 20 s (measured: 17 to 31 s for the first start with
its migrations on two cores).
"""

import asyncio
import fcntl
import http.client
import logging
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from nautile.common.errors import ConfigError
from nautile.common.processes import (
    collector_paused,
    die_with_parent,
    free_port,
    is_loopback,
    listen,
    loopback_direct,
    module_command,
    url_host,
)
from nautile.flows.operate.own_page import OwnPageOnly
from nautile.flows.operate.prefect_faults import (
    DATABASE,
    api_fault,
    database_fault,
    database_is_elsewhere,
    last_error,
    setting_fault,
)
from nautile.store.artifacts import Store

log = logging.getLogger(__name__)

BROKER = "nautile.flows.operate.message_broker"
STARTUP_S = 180.0
RESTARTS = 10  # a server that dies more often has a reason that no restart removes
_QUIET = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_LOGGING_LEVEL": "INFO",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",  # the minimum; flows.operate.automations relies on it
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": str(int(STARTUP_S)),
}
_SERVER = {"PREFECT_UI_ENABLED": "0", "PREFECT_API_BLOCKS_REGISTER_ON_START": "false"}
# A run's own server has no login, so it never takes the address of an operator's server from the environment.
_SERVER["PREFECT_SERVER_API_HOST"] = "127.0.0.1"
_SERVER |= {"PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1", "PREFECT_SERVER_LOGGING_LEVEL": "WARNING"}
# In memory, Prefect's default, a restart of the server forgets who holds a slot, which then is taken for ever.
_LEASES = "prefect.server.concurrency.lease_storage.filesystem"


def configure_prefect(store: Store) -> Path:
    """Set defaults: no analytics, Prefect's own files and the log under the store. Returns the path of the log.

    Raises `ConfigError` if the store is not writable.
    """
    store.prepare()
    log_file = store.logs / "nautile.log"
    os.environ |= loopback_direct(os.environ)
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("PREFECT_HOME", str(store.prefect))
    os.environ.setdefault("PREFECT_LOGGING_SETTINGS_PATH", str(Path(__file__).with_name("logging.yml")))
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_FILE_FILENAME", str(log_file))
    return log_file


def other_history(store: Store, last: str | None) -> str:
    """A line that says that the server's history of runs is not that of the last `nautile up`; "" if it is.

    After `configure_prefect`. `last`: PREFECT_HOME of that server, empty if its database was elsewhere; None if it is
    not known. The store's own history (`nautile runs`) is not concerned.
    """
    before = str(store.prefect) if last is None else last
    if database_is_elsewhere():
        there, is_other = "the database of PREFECT_SERVER_DATABASE_…", bool(last)
    else:
        there = str(Path(os.environ["PREFECT_HOME"]).expanduser().absolute())
        is_other = there != (before and str(Path(before).expanduser().absolute()))
    if not is_other:
        return ""
    return (
        f"the server has the history of runs in {there}, not that of the last `nautile up` in "
        f"{before or 'the database of PREFECT_SERVER_DATABASE_…'}: PREFECT_HOME and PREFECT_SERVER_DATABASE_… choose it"
    )


def without_database(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for processes other than the server, without the settings and password of its database."""
    return {name: value for name, value in environment.items() if not name.startswith(DATABASE)}


def server_settings(host: str, port: int, login: str | None) -> dict[str, str]:
    """The environment of a server for operators: its address, allowed origins, and login."""
    name = url_host(host)
    settings = {
        "PREFECT_SERVER_API_HOST": host,
        "PREFECT_SERVER_API_PORT": str(port),
        # The server's own page uses the first origin; `flows.operate.own_page` refuses all other pages.
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"http://{name}:{port},http://localhost:{port}",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT__SERVER_FINAL": "1",
    }
    return settings | ({"PREFECT_SERVER_API_AUTH_STRING": login} if login else {})


def prepare_to_serve(store: Store, host: str, port: int) -> None:
    """Set the environment for `serve`. The server requires the login of PREFECT_API_AUTH_STRING, if it is set.

    Raises `ConfigError` if the address is not available, or if it is not loopback and there is no login.
    """
    login = os.environ.get("PREFECT_API_AUTH_STRING")
    if not login and not is_loopback(host):
        raise ConfigError(
            f"--host {host}: anyone who can reach the server can start runs, so it needs a login: set "
            "PREFECT_API_AUTH_STRING to user:password, or PREFECT_API_AUTH_STRING_FILE to a file with it"
        )
    listen(host, port).close()  # fails at once, where the server would fail after ten seconds
    configure_prefect(store)
    os.environ.update(server_settings(host, port, login))


def require_api() -> str:
    """The API address of PREFECT_API_URL.

    Raises `ConfigError` if it is not set, or if it is not that of a server which this process can use (`api_fault`).
    """
    url = os.environ.get("PREFECT_API_URL", "")
    if not url:
        raise ConfigError("PREFECT_API_URL is not set: start a server with `nautile up`, or name your own")
    if fault := api_fault(url):
        raise ConfigError(f"PREFECT_API_URL: {fault}")
    return url


@contextmanager
def prefect_api() -> Iterator[str]:
    """Provide a Prefect API inside the block: that of PREFECT_API_URL, else an embedded server.

    `prefect` must not have been imported before. Raises `ConfigError` if the API of PREFECT_API_URL does not answer.
    """
    if os.environ.get("PREFECT_API_URL"):
        yield require_api()
        return
    home = Path(os.environ["PREFECT_HOME"])
    home.mkdir(parents=True, exist_ok=True)
    # The lock prevents two servers from migrating the same database at the same time.
    with (home / "start.lock").open("a") as lock, (home / "server.log").open("ab") as output:
        fcntl.flock(lock, fcntl.LOCK_EX)
        port, earlier = free_port(), output.tell()
        url = f"http://127.0.0.1:{port}/api"
        environment = {**os.environ, **_SERVER}
        for name in os.environ.keys() - without_database(os.environ).keys():
            del os.environ[name]  # else the processes of all stages would inherit them
        # The server starts while this process imports Prefect: both take seconds.
        process = _start(port, output.name, environment)
        os.environ["PREFECT_API_URL"] = url
        try:
            with collector_paused():
                import prefect.main  # noqa: F401 - takes seconds, in parallel with the start of the server

            _wait(process, url, Path(output.name), earlier, environment)
        except BaseException:
            # Also Ctrl-C: the server has no terminal of its own to receive it.
            _end(process)
            raise
    log.info("embedded Prefect server at %s", url)
    keeper = _Keeper(process, lambda: _start(port, output.name, environment))
    try:
        yield url
    finally:
        # Send what is queued while there is a server to receive it.
        _drain()
        keeper.close()


def _start(port: int, log_name: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with open(log_name, "ab") as output:
        return subprocess.Popen(
            module_command("nautile.flows.operate.prefect_server", str(port), str(os.getpid())),
            env={**environment, "PREFECT_LOGGING_HANDLERS_FILE_FILENAME": log_name},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # without Ctrl-C's signal: the run must still report its last states
        )


class _Keeper:
    """Supervisor thread that restarts the server on its port if it dies.

    Its states are in its database, and Prefect's client retries a refused connection for about a minute. Without the
    restart, a run whose server is killed hangs for minutes and then fails.
    """

    def __init__(self, process: subprocess.Popen[bytes], start: Callable[[], subprocess.Popen[bytes]]) -> None:
        self._process, self._start = process, start
        self._closed = threading.Event()
        # One thread for the whole run, because the server ends with the thread that started it (`die_with_parent`).
        self._thread = threading.Thread(target=self._keep, name="prefect-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the server."""
        self._closed.set()
        self._thread.join()
        _end(self._process)

    def _keep(self) -> None:
        restarts = 0
        while True:
            while self._process.poll() is None:
                if self._closed.wait(0.5):
                    return
            code = self._process.returncode
            if restarts == RESTARTS:
                break
            log.warning("the embedded Prefect server ended with %s: started again", code)
            self._process = self._start()
            restarts += 1
        log.error("the embedded Prefect server ended more than %d times, the last time with %s", RESTARTS, code)
        self._closed.wait()


def _wait(
    process: subprocess.Popen[bytes], url: str, log_path: Path, earlier: int, environment: Mapping[str, str]
) -> None:
    """Wait until the server answers. `earlier`: the size of its log before it was started, in bytes.

    `environment`: its own, with the settings of its database.

    Raises `ConfigError` with what helps if it ends, or does not answer within `STARTUP_S`.
    """
    deadline = time.monotonic() + STARTUP_S
    while not healthy(url, timeout_s=5.0):
        if process.poll() is not None or time.monotonic() > deadline:
            problem = f"ended with {process.poll()}" if process.poll() is not None else "did not start in time"
            lines = log_path.read_bytes()[earlier:].decode(errors="replace").splitlines()
            if fault := setting_fault("\n".join(lines), environment):
                raise ConfigError(fault)
            help_ = (
                database_fault(lines) or "set PREFECT_HOME to another folder, or PREFECT_API_URL to a server of yours"
            )
            raise ConfigError(
                f"the embedded Prefect server {problem} ({last_error(lines)}): {help_}. Its log is {log_path}"
            )
        time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    del os.environ["PREFECT_API_URL"]
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def healthy(url: str, timeout_s: float) -> bool:
    """Whether a Prefect API answers at `url` (it ends in /api)."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=timeout_s) as reply:
            return reply.status == 200
    except (OSError, ValueError, http.client.HTTPException):  # nobody, or another program; or the address is none
        return False


def _drain() -> None:
    """Send Prefect's queued logs and events: after the end of the server it would print errors about them."""
    if "prefect" in sys.modules:
        from prefect.events.worker import EventsWorker
        from prefect.logging.handlers import APILogWorker

        APILogWorker.drain_all(timeout=5)
        EventsWorker.drain_all(timeout=5)


def serve(port: int, parent: int | None = None) -> None:
    """Run the server in this process until stopped, on the address of PREFECT_SERVER_API_HOST.

    `parent`: process id of the run that started it; the server ends when that process ends, also by SIGKILL.
    """
    if parent is not None:
        die_with_parent(parent)
    os.environ.setdefault("PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE", _LEASES)
    # An operator's own broker may have the older name of the setting.
    broker = os.environ.get("PREFECT_MESSAGING_BROKER", BROKER)
    os.environ.setdefault("PREFECT_SERVER_EVENTS_MESSAGING_BROKER", broker)
    with collector_paused():
        import uvicorn
        from prefect.server.api.server import create_app

    asyncio.run(_forget_heartbeats())
    host = os.environ.get("PREFECT_SERVER_API_HOST", "127.0.0.1")
    uvicorn.run(OwnPageOnly(create_app(), host, port), host=host, port=port, log_level="error", lifespan="on")


async def _forget_heartbeats() -> None:
    """Let the automation for silent runs wait anew: while no server listened, no run was silent.

    Else a server that was away for some minutes would, when it is back, call every run that works crashed.
    """
    import sqlalchemy.exc
    from prefect.server.database import provide_database_interface

    from nautile.flows.operate.automations import SILENT

    database = provide_database_interface()
    named = sqlalchemy.select(database.Automation.id).where(database.Automation.name == SILENT)
    waits = sqlalchemy.delete(database.AutomationBucket).where(database.AutomationBucket.automation_id.in_(named))
    try:
        async with database.session_context(begin_transaction=True) as session:
            await session.execute(waits)
    except sqlalchemy.exc.SQLAlchemyError as error:  # a new database has no tables yet
        log.debug("no waits for heartbeats were forgotten: %s", error)
    finally:
        # Its connections belong to this event loop, and would keep the process from ending.
        await (await database.engine()).dispose()


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else None)
