"""`nautile up` on a bare folder: server, deployments and dashboard answer, a form's run works, `down` ends all."""

import json
import time
import urllib.error
import urllib.request
from typing import Any

import pytest

from configs.load import load
from flows import services
from flows.deployments import deployments
from flows.prefect_env import free_port
from store.artifacts import Store
from tests.support.listening import listening
from tests.support.toy_cli import environment

pytestmark = pytest.mark.slow
ENDED = ("COMPLETED", "FAILED", "CRASHED")
SMALL = {"name": "fineweb_edu", "reader": "wikipedia", "form": "web", "records": 30}


def call(url: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, json.loads(reply.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"null")


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("up") / "store")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(store.root).items():
            patch.setenv(name, value)
        found = services.up(store, "local", free_port(), free_port(), lambda _: None)
        yield store, {service.name: service for service in found}
        services.down(store)


def ask(api: str, deployment: str, parameters: dict[str, Any]) -> tuple[int, Any]:
    _, found = call(f"{api}/deployments/name/{deployment}")
    return call(f"{api}/deployments/{found['id']}/create_flow_run", {"parameters": parameters})


def small() -> dict[str, Any]:
    config = load("local").model_dump(mode="json", exclude_defaults=True)
    synth = next(source for source in config["ingest"]["sources"] if source["name"] == "synth")
    config["ingest"]["sources"] = [SMALL, {**synth, "records": 300}]
    return config


def test_all_three_answer_on_loopback(running):
    _, found = running
    assert set(found) == {"server", "deployments", "dashboard"}
    assert all(service.alive() and service.url.startswith("http://127.0.0.1:") for service in found.values())
    assert {service.name: listening(service.pid) for service in found.values()} == {
        "server": {"127.0.0.1"},
        "deployments": set(),
        "dashboard": {"127.0.0.1"},
    }


def test_every_stage_and_the_pipeline_have_a_form(running):
    _, found = running
    _, told = call(f"{found['server'].url}/deployments/filter", {})
    assert {one["name"] for one in told} == {"local"}
    assert len(told) == len(deployments(load("local")))
    assert all("RunConfig" in json.dumps(one["parameter_openapi_schema"]) for one in told)


def test_runs_asked_for_in_the_form_do_their_work(running):
    store, found = running
    api = found["server"].url
    for stage in ("held_out", "ingest"):
        status, run = ask(api, f"{stage}/local", {"config": small()})
        assert status == 201, run
        deadline = time.monotonic() + 120
        while (state := call(f"{api}/flow_runs/{run['id']}")[1]["state"])["type"] not in ENDED:
            assert time.monotonic() < deadline
            time.sleep(0.5)
        assert state["type"] == "COMPLETED", state["message"]
    assert len(store.list("tokens")) == 2


def test_a_bad_parameter_is_refused_with_the_field_named(running):
    _, found = running
    wrong = small()
    wrong["ingest"]["row_length"] = -5
    status, told = ask(found["server"].url, "ingest/local", {"config": wrong})
    assert status in (409, 422)
    assert "row_length" in json.dumps(told)


def test_up_again_starts_nothing_and_down_ends_exactly_these(running):
    store, found = running
    again = services.up(store, "local", 1, 1, lambda name: pytest.fail(f"{name} again"))
    assert {one.pid for one in again} == {one.pid for one in found.values()}
    ended = services.down(store)
    assert {one.pid for one in ended} == {one.pid for one in found.values()}
    assert not any(service.alive() for service in found.values())
    assert services.services(store) == []
    assert services.down(store) == []
