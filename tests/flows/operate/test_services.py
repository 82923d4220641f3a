"""`nautile up` on a bare folder: server, deployments and dashboard answer, a form's run works, `down` ends all."""

import json
import shutil
import time
from typing import Any

import pytest

from nautile.common.processes import free_port
from nautile.configs.load import load
from nautile.flows.operate import services
from nautile.flows.operate.deployments import deployments
from nautile.store.artifacts import Store
from nautile.store.catalog import Catalog
from tests.support.samples.evaluations import checkpoint, evaluation
from tests.support.servers.fake_webhook import SECRET, FakeWebhook
from tests.support.servers.listening import listening
from tests.support.servers.prefect_calls import fetch, request
from tests.support.stages.stage_parent import wait_for
from tests.support.stages.toy_cli import environment_of_operator

pytestmark = pytest.mark.heavy
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
SMALL = [f"ingest.sources.{number}.records={records}" for number, records in enumerate((30, 300, 300))]


def call(url: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    response = request(url, body)
    return response.status_code, response.json()


@pytest.fixture(scope="module")
def webhook():
    with FakeWebhook(204) as server:
        yield server


@pytest.fixture(scope="module")
def worse(tmp_path_factory):
    """A store in which the newest checkpoint's evaluation is worse than that of the one before: ids, the worse last."""
    store, local = Store(tmp_path_factory.mktemp("up") / "store"), load("local")
    store.prepare()
    skills = {"good": lambda item: item.index < 38, "bad": lambda item: item.index < 20}
    return store, [evaluation(store, local, checkpoint(store, name), right).id for name, right in skills.items()]


@pytest.fixture(scope="module")
def running(tmp_path_factory, webhook, worse, prefect_home):
    store, _ = worse
    shutil.copytree(prefect_home, store.root / "prefect")
    config = tmp_path_factory.mktemp("config") / "minutely.toml"
    config.write_text(
        'extends = "local"\n[schedule]\ncron = "* * * * *"\n[operation]\nnotify = "HOOK"\n', encoding="utf-8"
    )
    with environment_of_operator(store.root, HOOK=webhook.secret_url):
        try:
            started = services.up(store, str(config), free_port(), free_port(), lambda _: None)
            yield store, {service.name: service for service in started}
        finally:
            services.down(store)


def ask(api: str, deployment: str, parameters: dict[str, Any]) -> tuple[int, Any]:
    _, entry = call(f"{api}/deployments/name/{deployment}")
    return call(f"{api}/deployments/{entry['id']}/create_flow_run", {"parameters": parameters})


def test_all_three_answer_on_loopback(running):
    _, services_by_name = running
    assert set(services_by_name) == {"server", "deployments", "dashboard"}
    assert all(service.alive() and service.url.startswith("http://127.0.0.1:") for service in services_by_name.values())
    addresses = {service.name: listening(service.pid) for service in services_by_name.values()}
    assert addresses["server"] == addresses["dashboard"] == {"127.0.0.1"}
    assert addresses["deployments"] <= {"127.0.0.1"}  # a flow run on its way may listen, to itself


def test_every_stage_and_the_pipeline_have_a_form(running):
    _, services_by_name = running
    _, answer = call(f"{services_by_name['server'].url}/deployments/filter", {})
    assert {entry["name"] for entry in answer} == {entry.name for entry in deployments(load("local"), "local")}
    with_config = [entry for entry in answer if "overrides" in entry["parameter_openapi_schema"]["properties"]]
    assert len(with_config) == len(answer) - 1  # what shows a regression is given two evaluations
    assert all("nautile" in entry["tags"] and entry["description"] for entry in answer)


def test_the_server_settles_silent_runs_and_reacts_to_regressions(running):
    _, services_by_name = running
    _, answer = call(f"{services_by_name['server'].url}/automations/filter", {})
    by_name = {entry["name"]: entry for entry in answer if entry["enabled"]}
    silent = by_name["nautile: crash runs that fell silent"]
    assert silent["trigger"]["posture"] == "Proactive"
    assert "prefect.flow-run.heartbeat" in silent["trigger"]["after"]
    assert silent["trigger"]["within"] > 2 * 30
    assert silent["actions"][0] | {"type": "change-flow-run-state", "state": "CRASHED"} == silent["actions"][0]
    reacts = by_name["nautile: show regressions of local"]
    assert reacts["trigger"]["expect"] == ["nautile.regression"]
    assert [entry["type"] for entry in reacts["actions"]] == ["run-deployment"]


def test_a_run_asked_for_in_the_form_does_its_work(running):
    store, services_by_name = running
    api = services_by_name["server"].url
    status, run = ask(api, "pipeline/held_out-local", {"overrides": SMALL, "name": "small"})
    assert status == 201, run
    deadline = time.monotonic() + 600
    while (state := call(f"{api}/flow_runs/{run['id']}")[1]["state"])["type"] not in ENDED:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert state["type"] == "COMPLETED", state["message"]
    assert call(f"{api}/flow_runs/{run['id']}")[1]["name"] == "small"
    assert len(store.list("questions")) == 1
    newest = Catalog(store).query("SELECT name, changes FROM plans ORDER BY started DESC LIMIT 1")[0]
    assert newest["name"] == "small"
    changed = {change["field"]: change["after"] for change in json.loads(newest["changes"])}
    assert changed["ingest.sources.0.records"] == 30


def test_a_bad_parameter_is_refused_with_the_field_named(running):
    api = running[1]["server"].url
    # What starts processes is the worker's own: the server itself refuses it.
    for overrides in (["ingestion.row_length=5"], ["launch.command=id"]):
        status, answer = ask(api, "pipeline/ingest-local", {"overrides": overrides})
        assert status in (409, 422)
        assert "Validation failed for field 'overrides[0]'" in json.dumps(answer)
    _, run = ask(api, "pipeline/ingest-local", {"overrides": ["ingest.row_length=-5"]})
    wait_for(lambda: call(f"{api}/flow_runs/{run['id']}")[1]["state"]["type"] in ENDED)
    ended = call(f"{api}/flow_runs/{run['id']}")[1]
    refusal = "The form cannot be followed: overrides: `ingest.row_length`: Input should be greater than"
    assert (ended["state"]["type"], refusal in ended["state"]["message"]) == ("FAILED", True)
    assert ended["name"] == run["name"]  # the one that the server gave it, for the form named none
    logs = call(f"{api}/logs/filter", {"logs": {"flow_run_id": {"any_": [run["id"]]}}})[1]
    assert [line["message"] for line in logs if "Traceback" in line["message"]] == []


def ended_runs(api: str, flow: str) -> list[dict[str, Any]]:
    body = {"flows": {"name": {"any_": [flow]}}, "flow_runs": {"state": {"type": {"any_": list(ENDED)}}}}
    return call(f"{api}/flow_runs/filter", {**body, "sort": "START_TIME_ASC"})[1]


def test_the_schedule_fires_and_what_has_fallen_is_raised_told_and_shown(running, worse, webhook):
    store, services_by_name = running
    good, bad = worse[1]
    api = services_by_name["server"].url
    first = wait_for(lambda: ended_runs(api, "evaluation"))[0]
    # The next minute's run would only cost time.
    deployment = fetch(f"{api}/deployments/name/evaluation/evaluation-local")
    fetch(f"{api}/deployments/{deployment['id']}/pause_deployment", {})
    assert first["auto_scheduled"]
    assert first["name"] == "evaluation of local"  # the configuration, as in the name of the deployment
    assert first["state"]["type"] == "COMPLETED", first["state"]["message"]
    assert "has REGRESSED: " in first["state"]["message"]
    (comparison,) = store.list("comparison")
    assert {entry["benchmark"] for entry in comparison.manifest["facts"]["regressions"]} == {"sums", "more"}
    (message,) = [entry for entry in webhook.messages if entry["event"] == "nautile.regression"]
    assert (message["event"], message["before"], message["after"]) == ("nautile.regression", good, bad)
    shown = wait_for(lambda: ended_runs(api, "regression"))[0]  # the automation has started it
    assert shown["state"]["type"] == "COMPLETED", shown["state"]["message"]
    assert shown["parameters"] == {"after": bad, "before": good}
    assert shown["state"]["message"].startswith("36 samples were lost")
    _, pages = call(f"{api}/artifacts/latest/filter", {})
    by_key = {entry["key"]: entry["data"] for entry in pages}
    assert "All changed samples: `nautile compare" in by_key["regression"]
    assert "REGRESSED" in by_key["evaluation-local"]
    logs = "".join(path.read_text(errors="replace") for path in (store.root / "logs").glob("*.log*"))
    assert SECRET not in logs + json.dumps([first, shown, pages])


def test_the_schedules_run_and_its_table_are_seen_in_prefects_page(running):
    from tests.support.pages.browser import chromium, save_screenshot, watch

    api = running[1]["server"].url
    ui = api.removesuffix("/api")
    fired = wait_for(lambda: ended_runs(api, "evaluation"))[0]
    with chromium() as window:
        left, page = watch(window), window.new_page()
        page.goto(f"{ui}/runs/flow-run/{fired['id']}", wait_until="commit")
        page.get_by_text("Completed", exact=True).first.wait_for()
        page.get_by_text("auto-scheduled").first.wait_for()
        save_screenshot(page, "prefect the scheduled evaluation")
        page.goto(f"{ui}/artifacts/key/evaluation-local", wait_until="commit")
        page.get_by_text("REGRESSED").first.wait_for()
        save_screenshot(page, "prefect a regression")
    assert left == []


def test_up_again_starts_nothing_and_down_ends_exactly_these(running):
    store, services_by_name = running
    again = services.up(store, "local", 1, 1, lambda name: pytest.fail(f"{name} again"))
    assert {service.pid for service in again} == {service.pid for service in services_by_name.values()}
    ended = services.down(store)
    assert {service.pid for service in ended} == {service.pid for service in services_by_name.values()}
    assert not any(service.alive() for service in services_by_name.values())
    assert services.services(store) == []
    assert services.down(store) == []
