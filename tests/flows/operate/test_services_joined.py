"""`nautile up` beside what runs already: it is joined where it is, and the login of a server goes to it alone."""

import base64
import os
import stat
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from typing import ClassVar

import psutil
import pytest

from nautile.common.errors import ConfigError
from nautile.common.files import read_json, write_json
from nautile.common.processes import is_loopback, machine_start
from nautile.flows.operate import services
from nautile.flows.operate.prefect_calls import call
from nautile.store.locks import KeyLock
from nautile.tasks.engine.errors import DASHBOARD_URL
from tests.support.servers.http_server import FakeServer, json_response

API = "http://192.0.2.7:4200/api"


@pytest.fixture
def login(store, monkeypatch):
    """The login of a server that `up` has started."""
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "")  # so that it is taken away after the test
    monkeypatch.delenv("PREFECT_API_AUTH_STRING")
    monkeypatch.setenv("PREFECT_API_URL", API)
    record(store, server=API)
    return services._login(store, API)


def record(store, **urls):
    """Record services that run, as an earlier `up` does; their process is this one."""
    entries = [asdict(services.Service.begun(name, os.getpid(), url, "log")) for name, url in urls.items()]
    write_json(store.root / "services.json", {"services": entries})


def test_it_is_generated_and_only_its_owner_can_read_it(store, login):
    user, _, password = login.partition(":")
    assert user
    assert len(password) >= 24
    path = services.use_login(store)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert login in path.read_text()
    assert services._login(store, API) == login  # that of the environment, once it is there


def test_clients_send_it_to_that_server_alone(store, login, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://elsewhere.example/api")
    services.use_login(store)
    assert "PREFECT_API_AUTH_STRING" not in os.environ
    monkeypatch.setenv("PREFECT_API_URL", API)
    services.use_login(store)

    class Asking(FakeServer):
        def respond(self, request):
            return json_response({"sent": request.headers.get("Authorization", "")}, 200)

    with Asking() as server:
        sent = call("GET", server.url, "/x").json()["sent"]
    assert sent == f"Basic {base64.b64encode(login.encode()).decode()}"


def test_a_run_joins_the_server_of_up_unless_another_is_named(store, monkeypatch):
    class Healthy(FakeServer):
        def respond(self, request):
            return json_response(True)

    monkeypatch.setenv("PREFECT_API_URL", API)
    with Healthy() as server:
        record(store, server=f"{server.url}/api")
        assert services.join_server(store) is None
        monkeypatch.delenv("PREFECT_API_URL")
        assert services.join_server(store) == os.environ["PREFECT_API_URL"] == f"{server.url}/api"
    monkeypatch.delenv("PREFECT_API_URL")
    assert services.join_server(store) is None  # it does not answer any more
    assert "PREFECT_API_URL" not in os.environ


def test_a_server_that_has_ended_has_none(store, login):
    (store.root / "services.json").unlink()
    assert services.use_login(store) is None
    assert "PREFECT_API_AUTH_STRING" not in os.environ


def test_every_address_at_once_is_refused(store):
    with pytest.raises(ConfigError, match="name the address"):
        services.up(store, "local", 4200, 8501, lambda _: None, "0.0.0.0")


def test_what_is_loopback_is_seen_by_the_address():
    assert all(map(is_loopback, ("127.0.0.1", "127.8.9.1", "localhost", "::1")))
    assert not any(map(is_loopback, ("127.elsewhere.example", "localhost.example", "0.0.0.0", "192.0.2.7", "")))


@pytest.fixture
def started(store, monkeypatch):
    """The environments of the services that `up` starts, by name; none of them is a real process."""
    environments = {}

    def start(store, launch, log):
        environments[launch.name] = launch.environment
        return services.Service.begun(launch.name, os.getpid(), launch.url, str(log))

    monkeypatch.setattr(services.prefect_server, "configure_prefect", lambda store: None)
    monkeypatch.setattr(services, "_start", start)
    monkeypatch.setattr(services, "_wait", lambda *_: None)
    return environments


def test_services_that_are_started_again_use_the_server_that_runs(store, started):
    record(store, server="http://127.0.0.1:5000/api")
    services.up(store, "local", 4200, 8501, lambda line: None)
    assert set(started) == {"deployments", "dashboard"}
    assert {environment["PREFECT_API_URL"] for environment in started.values()} == {"http://127.0.0.1:5000/api"}


def test_a_server_that_died_is_started_where_the_others_look_for_it(store, started):
    record(store, server="http://127.0.0.1:5987/api", deployments="http://127.0.0.1:5987/api")
    entries = read_json(store.root / "services.json")
    entries["services"][0]["born"] += "0"  # another process has its id now
    write_json(store.root / "services.json", entries)
    services.up(store, "local", 4200, 8501, lambda line: None)
    assert set(started) == {"server", "dashboard"}
    assert started["server"]["PREFECT_SERVER_API_PORT"] == "5987"
    assert [service.name for service in services.services(store)] == ["server", "deployments", "dashboard"]
    assert started["dashboard"]["PREFECT_API_URL"] == "http://127.0.0.1:5987/api"


def test_deployments_that_are_started_again_link_to_the_dashboard_that_runs(store, started):
    record(store, server="http://127.0.0.1:5000/api", dashboard="http://127.0.0.1:9000")
    services.up(store, "local", 4200, 8501, lambda line: None)
    assert started["deployments"][DASHBOARD_URL] == "http://127.0.0.1:9000"


class Declaring(FakeServer):
    """A server that has been told at the time `at` what a configuration declares; None: it has not."""

    at: str | None = None
    paths: ClassVar[list[str]] = []

    def respond(self, request):
        self.paths.append(request.path)
        return json_response({"updated": self.at}, 200 if self.at else 404)


def test_deployments_are_ready_once_they_have_declared_whatever_sections_the_configuration_has():
    with Declaring() as server:
        service = services.Service.begun("deployments", os.getpid(), server.url, "log")
        ready = []
        for server.at in (None, "2020-01-01T00:00:00Z", "2090-01-01T00:00:00Z"):
            ready.append(services._is_deployed(services.declaration("toy"), service))
    assert ready == [False, False, True]
    assert set(server.paths) == {f"/variables/name/{services.declaration('toy')}"}
    assert len({services.declaration(name) for name in ("a-b", "a.b", "実験", "試験")}) == 4


def test_services_are_known_after_the_clock_was_set(store, monkeypatch):
    """The start of a process in time of day is counted from one of the machine that each correction moves."""
    record(store, server=API)
    monkeypatch.setattr(psutil._pslinux if sys.platform == "linux" else psutil, "boot_time", lambda: 5.0)
    assert services.url_of(store, "server") == API


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("born", "0"),  # the id of a process that ended is used again
        ("machine", "an earlier start"),
        ("pid", 2**30),
        ("pid", 1),  # not the parent, which may have begun in the same hundredth of a second
    ],
)
def test_a_process_that_has_the_id_of_a_service_is_none(store, field, value):
    record(store, server=API)
    changed(store, field, value)
    assert services.url_of(store, "server") is None
    assert services.down(store) == []


def changed(store, field, value):
    """Change a field of the recorded service."""
    entries = read_json(store.root / "services.json")
    entries["services"][0][field] = value
    write_json(store.root / "services.json", entries)


def test_the_services_of_another_machine_are_neither_ended_nor_started_again(store, started):
    record(store, server=API)
    changed(store, "machine", "another")
    changed(store, "host", "gpu-box")
    for change in (services.down, lambda store: services.up(store, "local", 4200, 8501, lambda _: None)):
        with pytest.raises(ConfigError, match="those of the machine gpu-box: `nautile down` there"):
            change(store)
    assert (store.root / "services.json").exists()
    assert not started


IN_A_CONTAINER = """
import os, sys
from dataclasses import asdict
from nautile.common.files import write_json
from nautile.flows.operate import services
from nautile.store.artifacts import Store

store = Store(sys.argv[1])
command = [sys.executable, "-c", "import time; time.sleep(600)"]
launch = services._Launch("server", command, dict(os.environ), sys.argv[2], lambda service: True)
service = services._start(store, launch, store.logs / "server.log")
write_json(services._record(store), {"services": [asdict(service)]})
print(services.url_of(store, "server"), flush=True)
sys.stdin.read()
"""


def own_pid_space():
    """The command that runs another one with numbers of processes of its own, as a container has them."""
    reason = "there is no `unshare`"
    for user in ([], ["--user", "--map-root-user"]):
        command = ["unshare", *user, "--pid", "--fork", "--kill-child", "--mount-proc"]
        with suppress(FileNotFoundError):
            ended = subprocess.run([*command, "true"], capture_output=True, text=True)
            if ended.returncode == 0:
                return command
            reason = ended.stderr.strip()
    pytest.skip(f"no process can be given a pid namespace: {reason}")


@pytest.mark.slow
def test_services_in_another_container_of_this_machine_are_judged_by_their_locks(store, started):
    """Their numbers are of another namespace: here they are those of no process, or of others."""
    command = [*own_pid_space(), sys.executable, "-c", IN_A_CONTAINER, str(store.root), API]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as inside:
        assert inside.stdout.readline().strip() == API
        [service] = services.services(store)
        assert service.machine.split()[0] == machine_start()
        assert not service.alive()
        assert services.url_of(store, "server") is None
        for change in (services.down, lambda store: services.up(store, "local", 4200, 8501, lambda _: None)):
            with pytest.raises(ConfigError, match="those of a container of this machine"):
                change(store)
        assert services.services(store) == [service]
        assert not started
        inside.stdin.close()
        assert inside.wait() == 0  # the kernel ends all of its namespace with it
    assert services.down(store) == []
    services.up(store, "local", 4200, 8501, lambda line: None)
    assert set(started) == {"server", "deployments", "dashboard"}


def test_services_are_changed_by_one_command_at_a_time(store, started):
    record(store, server=API)
    with KeyLock(store.root / "locks" / "services.lock"):
        for change in (services.down, lambda store: services.up(store, "local", 4200, 8501, lambda _: None)):
            with pytest.raises(ConfigError, match="is at work"):
                change(store)
    assert not started


@pytest.mark.parametrize("record", ["{", "[]", '{"services": 3}', '{"services": [{"name": "server", "pid": "x"}]}'])
def test_a_record_of_services_of_another_form_is_refused_and_kept(store, record):
    (store.root / "services.json").write_text(record)
    for command in (services.down, services.services):
        with pytest.raises(ConfigError, match="end the processes that it names"):
            command(store)
    assert (store.root / "services.json").read_text() == record


def test_a_service_of_another_user_is_not_ended_with_a_stack_trace(store, monkeypatch):
    record(store, server=API)
    monkeypatch.setattr(psutil.Process, "children", lambda process, recursive: [])
    monkeypatch.setattr(psutil.Process, "terminate", lambda process: raise_(psutil.AccessDenied(process.pid)))
    with pytest.raises(ConfigError, match="another user's"):
        services.down(store)
    assert services.url_of(store, "server") == API


def raise_(error):
    raise error


def test_down_names_a_run_that_it_stops_and_none_that_has_ended_and_whose_process_still_lives(store):
    command = "import subprocess, sys, os; [subprocess.Popen([sys.executable, '-c', 'input()'], env={**os.environ, "
    command += "'PREFECT__FLOW_RUN_ID': run}) for run in sys.argv[1:]]; print('begun', flush=True); input()"

    class Prefect(FakeServer):
        """Of the runs that are asked for, `ended` has ended."""

        status = 200

        def respond(self, request):
            asked = request.json()["flow_runs"]
            assert (request.path, asked["id"]["any_"]) == ("/flow_runs/filter", ["ended", "works"])
            return json_response([{"id": "ended"}], self.status)

    for status, named in ((200, ["works"]), (500, ["ended", "works"])):
        with Prefect() as server, subprocess.Popen(
            [sys.executable, "-c", command, "ended", "works"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:  # fmt: skip
            server.status = status
            process.stdout.readline()
            stopped = []
            services._end_runs(services.Service.begun("deployments", process.pid, server.url, "log"), stopped.append)
            left = services.run_processes(process.pid)
            process.stdin.close()
        assert (sorted(stopped), left) == (named, {})
