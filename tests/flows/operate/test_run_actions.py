"""`nautile retry`: what a server starts again, and what is said where it cannot."""

import uuid
from dataclasses import replace

import pytest

from nautile.flows.operate import services
from nautile.store.manifest import now
from nautile.tasks.engine.attempt_log import write_row
from tests.support.servers.http_server import FakeServer, Response, json_response

RUN = "9bdd20f2-7a6c-49ae-83fd-8758cc196433"


class FakePrefect(FakeServer):
    """Has one run, in `state`, perhaps of a deployment."""

    base_path = "/api"

    def __init__(self, state="FAILED", deployment="d1"):
        self.run = {"state": {"type": state, "name": state.capitalize()}, "deployment_id": deployment}
        self.asked = []

    def respond(self, request):
        if request.method == "GET":
            return json_response(self.run, 200 if request.path.endswith(RUN) else 404)
        self.asked.append(request.json()["state"]["type"])
        return json_response({"status": "ACCEPT"})


@pytest.fixture
def recorded(store, monkeypatch):
    """The store that the environment names, with the run in its catalog."""
    monkeypatch.setenv("NAUTILE_STORE", str(store.root))
    write_row(store, "plan", {"id": "p", "run": RUN, "state": "failed", "steps": [], "started": now()})
    row = {"id": "a", "run": RUN, "stage": "align", "label": "align", "state": "failed", "started": now()}
    write_row(store, "run", row)
    return store


@pytest.mark.parametrize(("name", "state"), [(RUN, "FAILED"), (RUN[:8], "CRASHED"), (RUN[:8], "CANCELLED")])
def test_a_run_that_did_not_end_well_starts_again(recorded, monkeypatch, command_line, name, state):
    with FakePrefect(state) as server:
        monkeypatch.setenv("PREFECT_API_URL", server.url)
        assert command_line("retry", name)[:2] == (
            0,
            f"run {RUN[:8]} starts again: `nautile status {RUN[:8]}` shows it\n",
        )
    assert server.asked == ["SCHEDULED"]


@pytest.mark.parametrize(
    ("state", "deployment", "message"),
    [
        ("RUNNING", "d1", "is Running: only one that has ended without success"),
        ("COMPLETED", "d1", "is Completed: only one that has ended without success"),
        ("PAUSED", "d1", "is Paused: only one that has ended without success"),
        ("FAILED", None, f"was started in a terminal: `nautile status {RUN[:8]}` shows the command"),
    ],
)
def test_any_other_run_is_left_alone(recorded, monkeypatch, command_line, state, deployment, message):
    with FakePrefect(state, deployment) as server:
        monkeypatch.setenv("PREFECT_API_URL", server.url)
        code, _, error = command_line("retry", RUN)
    assert (code, server.asked, message in error) == (2, [], True)


def test_without_its_server_the_command_says_what_is_missing(recorded, monkeypatch, command_line):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    code, _, error = command_line("retry", RUN)
    assert (code, "`nautile up`" in error, "PREFECT_API_URL" in error) == (2, True, True)
    with FakePrefect() as server:
        monkeypatch.setenv("PREFECT_API_URL", server.url)
        code, _, error = command_line("retry", str(uuid.UUID(int=1)))
        assert (code, "PREFECT_API_URL must name the one" in error) == (2, True)
        code, _, error = command_line("retry", "zzz")
        assert (code, "matches no run" in error) == (2, True)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:port/api")
    for command in ("retry", "approve"):
        code, _, error = command_line(command, RUN)
        assert (code, "at http://127.0.0.1:port/api" in error) == (2, True)
    monkeypatch.setenv("PREFECT_API_URL", server.url)
    code, _, error = command_line("retry", RUN)  # the server is gone
    assert (code, f"no Prefect server answers at {server.url}" in error) == (2, True)


def test_after_down_the_services_are_started_again_as_up_was_called(recorded, monkeypatch, command_line, tmp_path):
    """Here that fails at once, for the configuration is gone since: what is said, and that nothing was started."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    last = services.LastUp("gone.toml", str(tmp_path), 4310, 8610, "127.0.0.1", "")
    services._write(recorded, [], last)
    assert services.last_up(recorded) == last
    assert services.down(recorded) == []
    assert services.last_up(recorded) == last  # it outlives `down`
    code, _, error = command_line("retry", RUN)
    command = "nautile up gone.toml --port 4310 --dashboard-port 8610 --host 127.0.0.1"
    assert (code, f"`{command}` in {tmp_path} has failed, as said above" in error) == (2, True)
    services._write(recorded, [], replace(last, folder=str(tmp_path / "gone")))
    code, _, error = command_line("retry", RUN)
    assert (code, f"its folder {tmp_path / 'gone'} is gone; start one with `{command}`" in error) == (2, True)
    recorded.services.write_text('{"services": [], "last": {"config": 5}}')
    code, _, error = command_line("retry", RUN)
    assert (code, "start it with `nautile up`" in error) == (2, True)


class Page(FakeServer):
    """Something else than a Prefect server."""

    base_path = "/api"

    def respond(self, request):
        return Response(body=b"<html>hello</html>", content_type="text/html")


def test_a_page_that_is_no_prefect_is_named(recorded, monkeypatch, command_line):
    with Page() as server:
        monkeypatch.setenv("PREFECT_API_URL", server.url)
        code, _, error = command_line("retry", RUN)
    assert (code, f"no Prefect server answers at {server.url}" in error) == (2, True)
