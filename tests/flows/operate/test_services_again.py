"""`nautile up` when some services run already: the others join them where they are."""

import os

import psutil
import pytest

from common.files import read_json, write_json
from flows.operate import services
from tasks.engine import prefect_page


@pytest.fixture
def started(store, monkeypatch):
    """The environments of the services that `up` starts, by name; none of them is a real process."""
    environments = {}

    def start(store, launch, log):
        environments[launch.name] = launch.environment
        return services.Service(launch.name, os.getpid(), psutil.Process().create_time(), launch.url, str(log))

    monkeypatch.setattr(services.prefect_server, "configure_prefect", lambda store: None)
    monkeypatch.setattr(services, "_start", start)
    monkeypatch.setattr(services, "_wait", lambda *_: None)
    return environments


def running(store, **urls):
    """Record services that run, as an earlier `up` does; their process is this one."""
    entries = [
        {"name": name, "pid": os.getpid(), "born": psutil.Process().create_time(), "url": url, "log": "log"}
        for name, url in urls.items()
    ]
    write_json(store.root / "services.json", {"services": entries})


def test_services_that_are_started_again_use_the_server_that_runs(store, started):
    running(store, server="http://127.0.0.1:5000/api")
    services.up(store, "local", 4200, 8501, lambda line: None)
    assert set(started) == {"deployments", "dashboard"}
    assert {environment["PREFECT_API_URL"] for environment in started.values()} == {"http://127.0.0.1:5000/api"}


def test_a_server_that_died_is_started_where_the_others_look_for_it(store, started):
    running(store, server="http://127.0.0.1:5987/api", deployments="http://127.0.0.1:5987/api")
    record = read_json(store.root / "services.json")
    record["services"][0]["born"] -= 100.0  # another process has its id now
    write_json(store.root / "services.json", record)
    services.up(store, "local", 4200, 8501, lambda line: None)
    assert set(started) == {"server", "dashboard"}
    assert started["server"]["PREFECT_SERVER_API_PORT"] == "5987"
    assert [service.name for service in services.services(store)] == ["server", "deployments", "dashboard"]
    assert started["dashboard"]["PREFECT_API_URL"] == "http://127.0.0.1:5987/api"


def test_deployments_that_are_started_again_link_to_the_dashboard_that_runs(store, started):
    running(store, server="http://127.0.0.1:5000/api", dashboard="http://127.0.0.1:9000")
    services.up(store, "local", 4200, 8501, lambda line: None)
    assert started["deployments"][prefect_page.DASHBOARD_URL] == "http://127.0.0.1:9000"
