"""Prefect's settings for a run from the terminal, and the embedded API server of a run without one.

Call `configure_prefect` before anything imports `prefect`, which reads its settings once. Whatever the operator has set
stays.

The server is our own child rather than Prefect's ephemeral one, for three reasons measured here: that one outlives a
`kill -9` of the run, writes to the terminal, and fails when its first start (17 to 31 s with the migrations, two cores)
meets its default limit of 20 s.
"""

import fcntl
import logging
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

from common.errors import ConfigError
from common.processes import collector_paused, die_with_parent, free_port, is_loopback, listen
from flows.operate.own_page import OwnPageOnly
from flows.operate.prefect_calls import call, wants_login
from store.artifacts import Store

log = logging.getLogger(__name__)

STARTUP_S = 180.0
RESTARTS = 10
_QUIET = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_LOGGING_LEVEL": "INFO",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",  # the most often it can be; flows.operate.automations counts on it
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": str(int(STARTUP_S)),
}
_SERVER = {"PREFECT_UI_ENABLED": "0", "PREFECT_API_BLOCKS_REGISTER_ON_START": "false"}
_SERVER |= {"PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1", "PREFECT_SERVER_LOGGING_LEVEL": "WARNING"}
# How Prefect's server writes what its clients tell it. By default each state of a task run is a transaction of its own,
# and with the work items of several runs it falls minutes behind while its pages wait. A second later will do.
_BATCHES = {
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "200",
}
_DATABASE = ("PREFECT_SERVER_DATABASE_", "PREFECT_API_DATABASE_")  # Prefect's settings, a password among them


def configure_prefect(store: Store) -> Path:
    """Set defaults: no analytics, Prefect's own files and the log under the store. Returns the path of the log.

    Raises `ConfigError` if the store cannot be written.
    """
    store.prepare()
    log_file = store.root / "logs" / "nautile.log"
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("PREFECT_HOME", str(store.root / "prefect"))
    os.environ.setdefault("PREFECT_LOGGING_SETTINGS_PATH", str(Path(__file__).with_name("logging.yml")))
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_FILE_FILENAME", str(log_file))
    return log_file


def without_database(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that is no server: the password of the database is none of its business."""
    return {name: value for name, value in environment.items() if not name.startswith(_DATABASE)}


def server_settings(host: str, port: int, login: str | None) -> dict[str, str]:
    """The environment of a server that people use: where it listens, for which pages, with which login."""
    name = f"[{host}]" if ":" in host else host
    settings = {
        "PREFECT_SERVER_API_HOST": host,
        "PREFECT_SERVER_API_PORT": str(port),
        # Its page calls it by the first name; `flows.operate.own_page` keeps all other pages out.
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"http://{name}:{port},http://localhost:{port}",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT__SERVER_FINAL": "1",
    }
    return settings | ({"PREFECT_SERVER_API_AUTH_STRING": login} if login else {})


def prepare_to_serve(store: Store, host: str, port: int) -> None:
    """Set what `serve` reads. The login of this machine's clients (PREFECT_API_AUTH_STRING) is the one that it wants.

    Raises `ConfigError` if it cannot listen there, or would beyond this machine without a login.
    """
    login = os.environ.get("PREFECT_API_AUTH_STRING")
    if not login and not is_loopback(host):
        raise ConfigError(
            f"--host {host}: whoever reaches the server may start runs, so it needs a login: set "
            "PREFECT_API_AUTH_STRING to user:password, or PREFECT_API_AUTH_STRING_FILE to a file with it"
        )
    listen(host, port).close()  # refuses at once what the server would fail at after ten seconds
    configure_prefect(store)
    os.environ.update(server_settings(host, port, login))


def require_api() -> str:
    """The API that PREFECT_API_URL names.

    Raises `ConfigError` if it names none, one that does not answer, or one that refuses the login.
    """
    url = os.environ.get("PREFECT_API_URL", "")
    if not url:
        raise ConfigError("PREFECT_API_URL is not set: start a server with `nautile up`, or name your own")
    if not healthy(url, timeout_s=10.0):
        raise ConfigError(f"PREFECT_API_URL: {url} does not answer; start that server, or unset the variable")
    try:
        status = call("GET", url, "/admin/version", timeout=10.0).status_code
    except httpx.HTTPError as error:
        raise ConfigError(f"PREFECT_API_URL: {url} does not answer ({type(error).__name__})") from None
    if status == httpx.codes.UNAUTHORIZED and "PREFECT_API_KEY" not in os.environ:  # a key is for Prefect Cloud
        raise ConfigError(f"PREFECT_API_URL: {wants_login(url)}")
    return url


@contextmanager
def prefect_api() -> Iterator[str]:
    """A Prefect API for the length of the block: that of PREFECT_API_URL, else of an embedded server.

    Nothing may have imported `prefect` before. Raises `ConfigError` if the API of PREFECT_API_URL does not answer.
    """
    if os.environ.get("PREFECT_API_URL"):
        yield require_api()
        return
    home = Path(os.environ["PREFECT_HOME"])
    home.mkdir(parents=True, exist_ok=True)
    # The lock keeps two first starts from migrating one database at once.
    with (home / "start.lock").open("a") as lock, (home / "server.log").open("ab") as output:
        fcntl.flock(lock, fcntl.LOCK_EX)
        port = free_port()
        url = f"http://127.0.0.1:{port}/api"
        environment = {**os.environ, **_SERVER}
        for name in os.environ.keys() - without_database(os.environ).keys():
            del os.environ[name]  # else the processes of all stages would have them
        process = _start(port, output.name, environment)
        os.environ["PREFECT_API_URL"] = url
        try:
            with collector_paused():
                import prefect.main  # noqa: F401 - takes seconds, and so does the server's start: both at once

            _wait(process, url, output.name)
        except BaseException:
            _end(process)
            raise
    log.info("embedded Prefect server at %s", url)
    keeper = _Keeper(process, lambda: _start(port, output.name, environment))
    try:
        yield url
    finally:
        _drain()
        keeper.close()


def _start(port: int, log_name: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with open(log_name, "ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "flows.operate.prefect_server", str(port), str(os.getpid())],
            env={**environment, "PREFECT_LOGGING_HANDLERS_FILE_FILENAME": log_name},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C is for the run, which still has states to report
        )


class _Keeper:
    """Restarts the server on its port if it dies.

    Its states are in its database, and Prefect's client retries a refused call for about a minute. Without the restart
    a run whose server was killed hung for minutes, and failed.
    """

    def __init__(self, process: subprocess.Popen[bytes], start: Callable[[], subprocess.Popen[bytes]]) -> None:
        self._process, self._start = process, start
        self._closed = threading.Event()
        # A thread that stays: the server ends with the thread that started it (`die_with_parent`).
        self._thread = threading.Thread(target=self._keep, name="prefect-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the server."""
        self._closed.set()
        self._thread.join()
        _end(self._process)

    def _keep(self) -> None:
        for _ in range(RESTARTS):
            while self._process.poll() is None:
                if self._closed.wait(0.5):
                    return
            log.warning("the embedded Prefect server ended with %s: started again", self._process.returncode)
            self._process = self._start()
        log.error("the embedded Prefect server ended more than %d times", RESTARTS)
        self._closed.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log_name: str) -> None:
    deadline = time.monotonic() + STARTUP_S
    while not healthy(url, timeout_s=5.0):
        if process.poll() is not None or time.monotonic() > deadline:
            how = f"ended with {process.poll()}" if process.poll() is not None else "did not come up"
            raise RuntimeError(f"the embedded Prefect server {how}; see {log_name}")
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
    except (urllib.error.URLError, OSError, ValueError):
        return False


def _drain() -> None:
    """Let Prefect send the logs and events it still holds; afterwards it would print errors about a missing server."""
    if "prefect" in sys.modules:
        from prefect.events.worker import EventsWorker
        from prefect.logging.handlers import APILogWorker

        APILogWorker.drain_all(timeout=5)
        EventsWorker.drain_all(timeout=5)


def serve(port: int, parent: int | None = None) -> None:
    """Be the server, until stopped. With `parent` it ends with the run that started it, however that ends.

    PREFECT_SERVER_API_HOST is the address it listens on.
    """
    if parent is not None:
        die_with_parent(parent)
    for name, value in _BATCHES.items():
        os.environ.setdefault(name, value)
    with collector_paused():
        import uvicorn
        from prefect.server.api.server import create_app

    host = os.environ.get("PREFECT_SERVER_API_HOST", "127.0.0.1")
    uvicorn.run(OwnPageOnly(create_app(), host, port), host=host, port=port, log_level="error", lifespan="on")


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else None)
