"""The server that a run brings along comes back when it is killed, and is gone after the run."""

import shutil
import signal
import subprocess
import sys
import time

import pytest

from flows.operate import prefect_server as prefect_env
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


def wait_until(condition):
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.slow
def test_it_is_started_again_each_time_and_ended_for_good(keeper):
    keeper, started = keeper
    for number in (1, 2):
        started[-1].kill()
        wait_until(lambda number=number: len(started) > number)
    assert started[-1].poll() is None
    keeper.close()
    assert [process.poll() is not None for process in started] == [True] * 3


@pytest.mark.slow
def test_the_last_one_is_watched_too(keeper, monkeypatch, caplog):
    """It is given up when it ends, and not when it is started."""
    keeper, started = keeper
    monkeypatch.setattr(prefect_env, "RESTARTS", 1)
    started[0].kill()
    wait_until(lambda: len(started) == 2)
    started[1].kill()
    started[1].wait()
    wait_until(lambda: "ended more than 1 times" in caplog.text)
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    assert f"ended more than 1 times, the last time with {-signal.SIGKILL}" in caplog.text
    keeper.close()


def test_one_that_never_stays_up_is_given_up(keeper, monkeypatch, caplog):
    keeper, started = keeper
    monkeypatch.setattr(keeper, "_start", lambda: started[0])  # dead, again and again
    started[0].kill()
    started[0].wait()
    wait_until(lambda: "ended more than" in caplog.text)
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


@pytest.mark.slow
def test_a_run_brings_its_server_along_whatever_folders_and_proxies_there_are(made, prefect_home, tmp_path):
    """The folders have the names of our packages; the proxies do not answer."""
    store, cwd = tmp_path / "store", tmp_path / "work"
    shutil.copytree(made[0].root, store)
    shutil.copytree(prefect_home, store / "prefect")
    for name in ("common", "configs", "data", "evals", "flows", "model", "rl", "store", "tasks"):
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
    assert prefect_env.other_history(store) == ""
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "other"))
    assert f"history of runs in {tmp_path / 'other'}, not that of this store" in prefect_env.other_history(store)
    monkeypatch.setenv("PREFECT_API_DATABASE_CONNECTION_URL", "postgresql://db/x")
    assert prefect_env.other_history(store) == ""
