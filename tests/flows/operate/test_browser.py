"""What an operator does, in a real browser: start a run in Prefect's form, watch it, cancel, rerun a stage, approve.

The stages are the stand-ins; server, deployments and dashboard are those of `nautile up`. Screenshots are kept in
test-output/browser. That a scheduled evaluation fires is tested without a browser.
"""

import shutil
import threading
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import psutil
import pytest

from nautile.common.processes import free_port
from nautile.flows.operate import services
from nautile.flows.operate.questions import waiting
from nautile.store.artifacts import Store
from nautile.store.catalog import Catalog
from nautile.store.events import EventWriter
from tests.support.pages.browser import chromium, save_screenshot, table_text, wait_for_page, watch
from tests.support.servers.prefect_calls import fetch
from tests.support.stages.stage_parent import wait_for
from tests.support.stages.toy_cli import environment_of_operator
from tests.support.stages.toy_dag import TOY_DAG
from tests.support.stages.toy_stages import TOY

pytestmark = pytest.mark.heavy
STAGE = "ingest"  # waits in the first run, to be cancelled there
ROW_LENGTH = 32  # of every run here: the store has the toy chain of another one, and with it no text of theirs
REJECTED = {
    "query": "how?",
    "reasoning": None,
    "answer": None,
    "rejected": "too_short",
    "reply": "dunno",
    "teacher": "local",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, made):
    """A folder with a copy of the store of the toy chain, with one rejected document."""
    original, outputs = made
    folder = tmp_path_factory.mktemp("operated")
    store = Store(folder / "store")
    shutil.copytree(original.root, store.root)
    execution = store.get(outputs["distill"]["documents"]).execution
    emit = EventWriter(store.root / "events" / "more.jsonl", execution, stage="distill")
    emit("sample", set="documents", index=0, **REJECTED)
    emit.close()
    Catalog(store).ingest()
    return folder


@pytest.fixture(scope="module")
def running(folder, prefect_home):
    """Name -> service, of `nautile up` over that store. Its `index` asks for approval."""
    store, config = Store(folder / "store"), folder / "toy.toml"
    shutil.copytree(prefect_home, store.root / "prefect")
    config.write_text(f'extends = "{TOY}"\n[operation.index]\napprove = true\n', encoding="utf-8")
    with environment_of_operator(store.root, NAUTILE_TOY_FAULT=f"{STAGE}:wait={folder}", **TOY_DAG):
        try:
            services.up(store, str(config), free_port(), free_port(), lambda _: None)
            yield {service.name: service for service in services.services(store)}
        finally:
            services.down(store)


@pytest.fixture(scope="module")
def window():
    with chromium() as context:
        yield context


@pytest.fixture(scope="module")
def violations(window):
    """What must not happen in any page: requests to other machines, and dialogs."""
    return watch(window)


@pytest.fixture(autouse=True)
def no_violation(violations):
    yield
    assert violations == []


def has_process(run: str, deployments: services.Service) -> bool:
    """Whether a process of that flow run is there: its environment has the run's id."""
    for process in psutil.Process(deployments.pid).children(recursive=True):
        with suppress(psutil.Error):
            if run in process.environ().values():
                return True
    return False


class Prefect:
    """Prefect's page and API, of a server on loopback."""

    def __init__(self, service: services.Service, window: Any) -> None:
        self.api, self.page = service.url, window.new_page()
        self.ui = self.api.removesuffix("/api")

    def get(self, path: str) -> Any:
        return fetch(f"{self.api}{path}")

    def submit_form(self, deployment: str, override: str) -> None:
        """Fill in the form of a deployment with one override, and submit it."""
        deployment_id = self.get(f"/deployments/name/{deployment}")["id"]
        self.page.goto(f"{self.ui}/deployments/deployment/{deployment_id}/run", wait_until="commit")
        self.page.get_by_role("button", name="Add item").first.click()
        self.page.locator(".schema-form-property-array-item textarea").first.fill(override)
        self.page.get_by_role("button", name="Submit").click()

    def start_run(self, deployment: str) -> str:
        """Start a run by the form and go to its page, by the deployment's list of runs; returns its id."""
        self.submit_form(deployment, f"ingest.row_length={ROW_LENGTH}")
        self.page.wait_for_url("**tab=Runs", wait_until="commit")
        self.page.locator("a[href*='/runs/flow-run/']").first.click()
        self.page.wait_for_url("**/runs/flow-run/**", wait_until="commit")
        return self.page.url.rpartition("/")[2].partition("?")[0]

    def open_artifacts(self) -> None:
        tab = self.page.get_by_role("tab", name="Artifacts")
        tab.or_(self.page.get_by_text("Artifacts", exact=True)).first.click()

    def state(self, run: str) -> str:
        return self.get(f"/flow_runs/{run}")["state"]["type"]


@pytest.fixture(scope="module")
def prefect(running, window):
    return Prefect(running["server"], window)


@pytest.fixture(scope="module")
def dashboard(window):
    return window.new_page()


@pytest.fixture(scope="module")
def waiting_run(folder, running, prefect):
    """A run of the whole pipeline, started by the form; its stage waits in its process. Prefect's page shows it."""
    run = prefect.start_run("pipeline/pipeline-toy")
    wait_for((folder / "reached").exists, f"{STAGE} under way")
    assert has_process(run, running["deployments"])
    return run


def test_a_page_of_another_origin_reads_and_starts_nothing(running, window, prefect, tmp_path):
    api = running["server"].url
    deployment = prefect.get("/deployments/name/pipeline/pipeline-toy")["id"]
    (tmp_path / "index.html").write_text("<title>elsewhere</title>", encoding="utf-8")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as elsewhere:
        threading.Thread(target=elsewhere.serve_forever, daemon=True).start()
        page = window.new_page()
        page.goto(f"http://127.0.0.1:{elsewhere.server_port}/")
        ask = "([url, options]) => fetch(url, options).then(reply => reply.type, error => error.name)"
        read = {"method": "POST", "headers": {"Content-Type": "application/json"}, "body": "{}"}
        assert page.evaluate(ask, [f"{api}/flow_runs/filter", read]) == "TypeError"
        assert page.evaluate(ask, [f"{api}/health", {}]) == "TypeError"
        # What a browser sends without asking: a body without a content type, which Prefect takes for JSON.
        send = """url => fetch(url, {method: "POST", mode: "no-cors", body: new Blob(['{"parameters": {}}'])})
            .then(reply => reply.type)"""
        assert page.evaluate(send, f"{api}/deployments/{deployment}/create_flow_run") == "opaque"
        listen = """url => new Promise(done => {
            const socket = new WebSocket(url, "prefect");
            socket.onopen = () => done("open");
            socket.onerror = () => done("refused");
        })"""
        assert page.evaluate(listen, f"{api.replace('http', 'ws', 1)}/events/out") == "refused"
        page.close()
        elsewhere.shutdown()
    assert fetch(f"{api}/flow_runs/filter", {}) == []


def test_a_bad_value_in_the_form_is_refused_with_its_field(prefect):
    prefect.submit_form("pipeline/pipeline-toy", "sed=3")
    prefect.page.get_by_text("'sed=3' does not match").first.wait_for()
    save_screenshot(prefect.page, "prefect a bad parameter")


def test_a_run_under_way_is_shown_by_prefect(prefect, waiting_run):
    prefect.page.get_by_text("Running", exact=True).first.wait_for()
    prefect.open_artifacts()
    prefect.page.get_by_text("progress-ingest-wikipedia").first.wait_for()
    save_screenshot(prefect.page, "prefect a run under way")


def test_a_run_under_way_moves_in_the_dashboard_which_links_to_prefect(prefect, dashboard, running, waiting_run):
    dashboard.goto(f"{running['dashboard'].url}/?run={waiting_run}")
    wait_for_page(dashboard, "Overview")
    row = "ingest:wikipedia▸ running"
    wait_for(lambda: row in table_text(dashboard) and "ticks" in table_text(dashboard), "the stage's row")
    before = table_text(dashboard)
    wait_for(lambda: table_text(dashboard) != before, "a page that moves by itself")
    save_screenshot(dashboard, "dashboard a run under way")
    link = dashboard.get_by_role("link", name="This run in Prefect").get_attribute("href")
    assert link == prefect.page.url.partition("?")[0].replace("/runs/", "/v2/runs/")
    newer_page = dashboard.context.new_page()
    newer_page.goto(link)
    newer_page.get_by_text(fetch(f"{prefect.api}/flow_runs/{waiting_run}")["name"]).first.wait_for()
    save_screenshot(newer_page, "prefect newer page of a run")
    newer_page.close()


def test_cancel_ends_the_stages_process_and_both_pages_show_it(folder, prefect, dashboard, waiting_run):
    child = psutil.Process(int((folder / "reached").read_text()))
    prefect.page.get_by_role("button", name="Cancel").first.click()
    prefect.page.get_by_role("button", name="Confirm").click()
    wait_for(lambda: not child.is_running(), "the stage's process gone")
    wait_for(lambda: prefect.state(waiting_run) == "CANCELLED", "the run cancelled")
    limits = fetch(f"{prefect.api}/v2/concurrency_limits/filter", {})
    assert {entry["name"] for entry in limits} >= {"nautile-accelerator", "nautile-cpu", "nautile-network"}
    assert {entry["active_slots"] for entry in limits} == {0}
    prefect.page.get_by_text("Cancelled", exact=True).first.wait_for()
    save_screenshot(prefect.page, "prefect a cancelled run")
    wait_for(lambda: "ingest:wikipedia■ cancelled" in table_text(dashboard), "the cancelled stage's row")
    save_screenshot(dashboard, "dashboard a cancelled run")


@pytest.fixture(scope="module")
def rerun(folder, prefect):
    """A run of the one stage, which does not wait any more, at its end. Prefect's page shows it."""
    (folder / "go").touch()
    run = prefect.start_run(f"pipeline/{STAGE}-toy")
    wait_for(lambda: prefect.state(run) == "COMPLETED", "the stage alone")
    return run


def test_a_stage_alone_is_rerun_with_the_forms_values(folder, prefect, dashboard, running, rerun):
    prefect.page.get_by_text("Completed", exact=True).first.wait_for()
    save_screenshot(prefect.page, "prefect the stage alone")
    written = [artifact for artifact in Store(folder / "store").list("tokens") if artifact.manifest["run"] == rerun]
    assert {artifact.manifest["config"]["ingest"]["row_length"] for artifact in written} == {ROW_LENGTH}
    dashboard.goto(f"{running['dashboard'].url}/?run={rerun}")
    wait_for(lambda: "ingest:synth✓ done" in table_text(dashboard), "the rerun's row")
    prefect.open_artifacts()
    link = prefect.page.get_by_text("this run in the dashboard")
    link.or_(prefect.page.get_by_text("dashboard", exact=True)).first.wait_for()


def test_a_cancelled_run_is_retried_and_resume_shows_the_expected_cost_and_continues_it(
    folder, running, prefect, waiting_run, rerun
):
    """As the button Retry: the same run goes on, with the values of its form, to the step that asks for approval.

    While it waits no process of it is left; it goes on in a new one.
    """
    store = Store(folder / "store")
    again = {"state": {"type": "SCHEDULED", "name": "AwaitingRetry"}}
    assert fetch(f"{prefect.api}/flow_runs/{waiting_run}/set_state", again)["status"] == "ACCEPT"
    wait_for(lambda: prefect.state(waiting_run) == "PAUSED", "the run suspended")
    assert prefect.get(f"/flow_runs/{waiting_run}")["state"]["name"] == "Suspended"
    (note,) = wait_for(lambda: waiting(store), "the note of its question")
    assert (note["run"], note["pid"]) == (waiting_run, None)
    wait_for(lambda: not has_process(waiting_run, running["deployments"]), "the end of its process")
    assert store.begun_runs() == []
    prefect.page.goto(f"{prefect.ui}/runs/flow-run/{waiting_run}", wait_until="commit")
    prefect.page.get_by_role("button", name="Resume").click()
    dialog = prefect.page.get_by_role("dialog")
    dialog.get_by_text("Stage index of toy asks for approval").wait_for()
    dialog.get_by_text("Expected cost: the last time").wait_for()
    save_screenshot(prefect.page, "prefect an approval")
    dialog.get_by_role("button", name="Submit").click()
    wait_for(lambda: prefect.state(waiting_run) in ("COMPLETED", "FAILED", "CRASHED"), "the end of the approved run")
    assert prefect.state(waiting_run) == "COMPLETED"
    assert waiting(store) == []
    written = [artifact for artifact in store.list() if artifact.manifest["run"] == waiting_run]
    assert {"retrieval", "report"} <= {artifact.kind for artifact in written}
    assert {artifact.manifest["config"].get("row_length", ROW_LENGTH) for artifact in written} == {ROW_LENGTH}


def test_a_rollout_a_rejected_document_and_the_lineage_of_a_score_are_opened(made, running, window):
    _, outputs = made
    page, base = window.new_page(), f"{running['dashboard'].url}"
    page.goto(f"{base}/rollouts?run=toy&live=off")
    wait_for_page(page, "Rollouts and traces")
    page.get_by_text("4 + 1?").first.wait_for()
    page.get_by_text("reward 1", exact=False).first.wait_for()
    save_screenshot(page, "dashboard rollouts")

    page.goto(f"{base}/distillation?run=toy&live=off")
    wait_for_page(page, "Distillation")
    page.get_by_text("rejected: too_short").wait_for()
    page.get_by_text("dunno").scroll_into_view_if_needed()
    save_screenshot(page, "dashboard a rejected document")

    page.goto(f"{base}/evaluations?run=toy&live=off")
    wait_for_page(page, "Evaluations")
    lineage = page.get_by_role("link", name="Where these scores come from").get_attribute("href")
    page.goto(f"{base}/{lineage}&live=off")
    wait_for_page(page, "Lineage")
    graph = page.locator("[data-testid=stGraphVizChart] svg")
    graph.locator("text", has_text=outputs["pretrain"]["checkpoint"].partition("/")[2]).first.wait_for()
    save_screenshot(page, "dashboard the lineage of a score")
