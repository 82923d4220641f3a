"""The server that a run brings along comes back when it is killed, and is gone after the run; faults of servers."""

import shutil
import signal
import socket
import subprocess
import sys
import threading
from importlib import metadata
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError, create_model

from nautile.common.errors import ConfigError
from nautile.common.processes import free_port
from nautile.flows.cli.terminal import unexpected
from nautile.flows.operate import prefect_server as prefect_env
from nautile.flows.operate.prefect_faults import api_fault, database_fault, described, last_error, setting_fault
from tests.support.servers.http_server import FakeServer, Response, json_response
from tests.support.stages.stage_parent import wait_for
from tests.support.stages.toy_cli import nautile
from tests.support.stages.toy_stages import TOY


@pytest.fixture
def keeper(monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    started: list[subprocess.Popen] = []

    def start():
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        return started[-1]

    keeper = prefect_env._Keeper(start(), start)
    yield keeper, started
    for process in started:
        process.kill()


@pytest.mark.slow
def test_it_is_started_again_each_time_and_ended_for_good(keeper):
    keeper, started = keeper
    for number in (1, 2):
        started[-1].kill()
        wait_for(lambda number=number: len(started) > number)
    assert started[-1].poll() is None
    keeper.close()
    assert [process.poll() is not None for process in started] == [True] * 3


@pytest.mark.slow
def test_the_last_one_is_watched_too(keeper, monkeypatch, caplog):
    """It is given up when it ends, and not when it is started."""
    keeper, started = keeper
    monkeypatch.setattr(prefect_env, "RESTARTS", 1)
    started[0].kill()
    wait_for(lambda: len(started) == 2)
    started[1].kill()
    started[1].wait()
    wait_for(lambda: "ended more than 1 times" in caplog.text)
    said = [record.levelname for record in caplog.records if record.name == prefect_env.log.name]
    assert said == ["WARNING", "ERROR"]
    assert f"ended more than 1 times, the last time with {-signal.SIGKILL}" in caplog.text
    keeper.close()


def test_one_that_never_stays_up_is_given_up(keeper, monkeypatch, caplog):
    keeper, started = keeper
    monkeypatch.setattr(keeper, "_start", lambda: started[0])  # dead, again and again
    started[0].kill()
    started[0].wait()
    wait_for(lambda: "ended more than" in caplog.text)
    keeper.close()
    assert len(started) == 1


def test_the_server_of_a_run_listens_on_loopback_whatever_address_the_operators_server_has(monkeypatch, tmp_path):
    environments = []

    def start(port, log_name, environment):
        environments.append(environment)
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    monkeypatch.setenv("PREFECT_SERVER_API_HOST", "0.0.0.0")
    monkeypatch.setattr(prefect_env, "_start", start)
    monkeypatch.setattr(prefect_env, "_wait", lambda *_: None)
    monkeypatch.setattr(prefect_env, "_drain", lambda: None)
    with prefect_env.prefect_api() as url:
        assert url.startswith("http://127.0.0.1:")
    assert [environment["PREFECT_SERVER_API_HOST"] for environment in environments] == ["127.0.0.1"]


@pytest.mark.heavy
def test_a_run_brings_its_server_along_whatever_folders_and_proxies_there_are(made, prefect_home, tmp_path):
    """The folders have the names of our packages; the proxies do not answer."""
    store, cwd = tmp_path / "store", tmp_path / "work"
    shutil.copytree(made[0].root, store)
    shutil.copytree(prefect_home, store / "prefect")
    for name in ("nautile", "common", "configs", "data", "evals", "flows", "model", "rl", "store", "tasks", "uses"):
        (cwd / name).mkdir(parents=True)
        (cwd / name / "__init__.py").write_text("raise SystemExit('imported from the working directory')")
    proxies = {"HTTP_PROXY": "http://127.0.0.1:9", "all_proxy": "socks5://127.0.0.1:9", "no_proxy": "a.example"}
    done = nautile(
        "run", str(TOY), "--only", "align", store=store, cwd=cwd, PREFECT_HOME=str(store / "prefect"), **proxies
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "align: reused" in done.stdout


def test_another_home_of_prefect_has_another_history_which_is_said(store, monkeypatch, tmp_path):
    monkeypatch.setenv("PREFECT_HOME", "")  # so that what is set below is undone
    monkeypatch.delenv("PREFECT_HOME")
    prefect_env.configure_prefect(store)
    own, other = str(store.prefect), str(tmp_path / "other")
    assert prefect_env.other_history(store, None) == prefect_env.other_history(store, own) == ""
    assert f"history of runs in {own}, not that of the last `nautile up` in {other}:" in prefect_env.other_history(
        store, other
    )
    monkeypatch.setenv("PREFECT_HOME", other)
    assert prefect_env.other_history(store, other) == ""
    assert f"history of runs in {other}, not that of the last `nautile up` in {own}:" in prefect_env.other_history(
        store, None
    )
    assert "in the database of PREFECT_SERVER_DATABASE_" in prefect_env.other_history(store, "")
    monkeypatch.setenv("PREFECT_API_DATABASE_CONNECTION_URL", "postgresql://db/x")
    assert prefect_env.other_history(store, "") == ""
    assert prefect_env.other_history(store, own).startswith("the server has the history of runs in the database of")


OURS = metadata.version("prefect")


class Api(FakeServer):
    """Answers each path as `answers` says."""

    base_path = "/api"

    def __init__(self, **answers: Response):
        self.answers = {"/api/health": json_response(True), "/api/admin/version": json_response(OURS)} | {
            f"/api/{name.replace('_', '/')}": answer for name, answer in answers.items()
        }

    def respond(self, request):
        return self.answers.get(request.path, Response(404))


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({}, None),
        ({"admin_version": json_response("3.0.1")}, None),  # another minor version
        ({"admin_version": json_response("2.20.4")}, f"is Prefect 2.20.4, and this is Prefect {OURS}"),
        ({"admin_version": json_response("4.0.0")}, f"is Prefect 4.0.0, and this is Prefect {OURS}"),
        ({"health": Response(500)}, "answers with status 500"),
        ({"admin_version": json_response({"exception_message": "x"}, 500)}, "answers with status 500"),
        ({"admin_version": Response(401)}, "PREFECT_API_AUTH_STRING"),
        ({"health": Response(404)}, "is not the API of a Prefect server"),
        ({"admin_version": Response(404)}, "is not the API of a Prefect server"),
        ({"admin_version": Response(body=b"<html>", content_type="text/html")}, "is not the API of a Prefect server"),
        ({"admin_version": json_response({"version": 3})}, "is not the API of a Prefect server"),
        ({"admin_version": json_response("\x1b[31m9.0")}, "is not the API of a Prefect server"),
    ],
    ids=str,
)
def test_an_address_that_is_no_server_of_ours_is_refused_before_a_run(monkeypatch, answers, message):
    monkeypatch.delenv("PREFECT_API_KEY", raising=False)
    with Api(**answers) as server:
        monkeypatch.setenv("PREFECT_API_URL", server.url)
        fault = api_fault(server.url)
        if message is None:
            assert fault is None
            assert prefect_env.require_api() == server.url
            return
        assert message in fault
        with pytest.raises(ConfigError, match=r"^PREFECT_API_URL: ") as refused:
            prefect_env.require_api()
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["no address", "http://", "http://127.0.0.1:{port}/api", "http://[::1/api", "http://h:x/api"]
)
def test_an_address_that_nothing_answers_at_is_named(url):
    url = url.format(port=free_port())
    assert f"{url} does not answer" in api_fault(url)
    assert not prefect_env.healthy(url, timeout_s=5.0)


def test_a_program_that_is_no_web_server_is_no_server_of_prefects():
    """As one that has taken the port of a server that ended."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet():
            with listener.accept()[0] as connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        assert not prefect_env.healthy(f"http://127.0.0.1:{listener.getsockname()[1]}/api", timeout_s=5.0)
        thread.join()


@pytest.mark.parametrize(
    ("line", "helps"),
    [
        ("sqlalchemy.exc.DatabaseError: (sqlite3.DatabaseError) database disk image is malformed", "is damaged: move"),
        ("sqlite3.DatabaseError: file is not a database", "is damaged: move"),
        ("sqlite3.OperationalError: no such table: flow_run", "is damaged: move"),
        ("sqlite3.OperationalError: attempt to write a readonly database", "cannot be written: fix its permissions"),
        ("sqlite3.OperationalError: unable to open database file", "cannot be written: fix its permissions"),
        ("sqlite3.OperationalError: database or disk is full", "is full: free some space"),
        ("alembic.util.exc.CommandError: Can't locate revision identified by 'abc'", "by a newer Prefect"),
        ("OSError: [Errno 98] address already in use", ""),
    ],
)
def test_a_database_that_cannot_be_used_is_named_with_what_helps(monkeypatch, line, helps):
    monkeypatch.setenv("PREFECT_HOME", "/home/of/prefect")
    lines = ["Traceback", f"{line}", "ERROR:    Application startup failed. Exiting."]
    fault = database_fault(lines)
    assert helps in fault
    assert bool(fault) is bool(helps)
    assert ("/home/of/prefect/prefect.db" in fault) is bool(helps)
    assert last_error(lines) == line
    monkeypatch.setenv("PREFECT_API_DATABASE_CONNECTION_URL", "postgresql://u:secret@db/x")
    assert "secret" not in database_fault(lines)
    assert "prefect.db" not in database_fault(lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    "content", [b"SQLite format 3\0" + b"x" * 5000, b"no database at all" * 100], ids=["cut", "text"]
)
def test_a_run_over_a_damaged_database_says_so(tmp_path, monkeypatch, content):
    home = tmp_path / "prefect"
    home.mkdir()
    (home / "prefect.db").write_bytes(content)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(home))
    with pytest.raises(ConfigError) as refused, prefect_env.prefect_api():
        pass
    assert f"its database {home / 'prefect.db'} is damaged: move the file away" in str(refused.value)
    assert "\n" not in str(refused.value)


def failing(url: str, status: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", url)
    return httpx.HTTPStatusError(f"Server error '{status}' for url '{url}'", request=request, response=Response)


@pytest.mark.parametrize("named", [True, False])
def test_a_request_that_fails_in_the_middle_of_a_run_is_the_servers_fault(monkeypatch, named):
    url = "http://127.0.0.1:4200/api"
    if named:
        monkeypatch.setenv("PREFECT_API_URL", url)
    monkeypatch.setenv("PREFECT_HOME", "/home/of/prefect")
    error = RuntimeError("Failed to reach API")
    error.__cause__ = failing(f"{url}/flow_runs/", 500)
    text = described(error)
    assert text.startswith(f"Prefect's server at {url} failed on a request (Server error '500'")
    assert str(Path("/home/of/prefect/prefect.db")) in text


@pytest.mark.parametrize(
    "error",
    [ZeroDivisionError("by zero"), failing("https://teacher.example/v1/chat", 500), httpx.ReadTimeout("slow")],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_another_kind_is_not(error):
    assert described(error) is None


def refused_by_pydantic(section: str, **fields: str) -> str:
    try:
        create_model(section, **dict.fromkeys(fields, (float, ...)))(**fields)
    except ValidationError as error:
        return str(error)
    raise AssertionError(fields)


NUMBER = "Input should be a valid number, unable to parse string as a number"


@pytest.mark.parametrize(
    ("text", "begins"),
    [
        (refused_by_pydantic("ServerDatabaseSettings", timeout="q"), f"PREFECT_SERVER_DATABASE_TIMEOUT: {NUMBER};"),
        (
            f"1 validation error for Settings\nserver.database.timeout\n  {NUMBER}\n",
            f"PREFECT_CLIENT_TIMEOUT or PREFECT_SERVER_DATABASE_TIMEOUT: {NUMBER};",
        ),
        # As in a profile.
        (refused_by_pydantic("APISettings", key="q"), f"the setting 'key' of Prefect (APISettings): {NUMBER};"),
        (
            'SettingsError: error parsing value for field "custom_headers" from source "EnvFilterSettingsSource"',
            "PREFECT_CLIENT_CUSTOM_HEADERS: its value cannot be read, and should be JSON;",
        ),
        ("1 validation error for RunConfig\nalign\n  Field required", ""),
        ("sqlite3.OperationalError: database is locked", ""),
    ],
    ids=["by its value", "by its name", "of a profile", "no JSON", "a configuration", "another error"],
)
def test_a_setting_that_prefect_refuses_is_named_by_its_variable(monkeypatch, text, begins):
    monkeypatch.setenv("PREFECT_SERVER_DATABASE_TIMEOUT", "q")
    monkeypatch.setenv("PREFECT_CLIENT_TIMEOUT", "10")
    monkeypatch.setenv("PREFECT_CLIENT_CUSTOM_HEADERS", "secret")
    monkeypatch.delenv("PREFECT_API_KEY", raising=False)
    fault = setting_fault(f"Traceback\n{text}")
    assert fault.startswith(begins)
    assert (fault == "") == (begins == "")
    assert not any(word in fault for word in ("'q'", "secret", "\n"))
    if fault:
        assert unexpected(ValueError(text)) == (fault, 2)
