"""What an operator does, in a real browser: ask for a run in Prefect's form, watch it in both pages, cancel, rerun.

The stages are the stand-ins; server, deployments and dashboard are those of `nautile up`. Screenshots are kept in
test-output/browser. That a scheduled evaluation fires is tested without a browser.
"""

import json
import os
import shutil
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from common.processes import free_port
from flows.operate import services
from store.artifacts import Store
from store.catalog import Catalog
from store.events import EventWriter
from tests.support.browser import chromium, save_screenshot, table_text, wait_for_page, watch
from tests.support.toy_cli import environment
from tests.support.toy_stages import TOY, TOY_DAG

pytestmark = pytest.mark.slow
STAGE = "ingest"  # the one that waits to be cancelled
REJECTED = {
    "query": "how?",
    "reasoning": None,
    "answer": None,
    "rejected": "too_short",
    "reply": "dunno",
    "teacher": "local",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory, made):
    """A folder with a copy of the store of the toy chain, with one rejected document."""
    real, outputs = made
    folder = tmp_path_factory.mktemp("operated")
    store = Store(folder / "store")
    shutil.copytree(real.root, store.root)
    execution = store.get(outputs["distill"]["documents"]).execution
    emit = EventWriter(store.root / "events" / "more.jsonl", execution, stage="distill")
    emit("sample", set="documents", index=0, **REJECTED)
    emit.close()
    Catalog(store).ingest()
    return folder, outputs


@pytest.fixture(scope="module")
def found(place):
    """Name -> service, of `nautile up` over that store."""
    folder, _ = place
    store = Store(folder / "store")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("NAUTILE_", "PREFECT_"))]:
            patch.delenv(name)
        for name, value in environment(store.root, **TOY_DAG).items():
            patch.setenv(name, value)
        patch.setenv("NAUTILE_TOY_FAULT", f"{STAGE}:wait={folder}")
        yield {one.name: one for one in services.up(store, str(TOY), free_port(), free_port(), lambda _: None)}
        services.down(store)


@pytest.fixture(scope="module")
def window():
    with chromium() as context:
        yield context


def until(condition: Callable[[], Any], what: str, seconds: float = 90.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.2)
    return found


class Prefect:
    """Prefect's page and API, of a server on loopback."""

    def __init__(self, service: services.Service, window: Any) -> None:
        self.api, self.page = service.url, window.new_page()
        self.ui = self.api.removesuffix("/api")

    def ask(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.api}{path}", timeout=30) as reply:
            return json.loads(reply.read())

    def form(self, deployment: str) -> None:
        self.page.goto(
            f"{self.ui}/deployments/deployment/{self.ask(f'/deployments/name/{deployment}')['id']}/run",
            wait_until="commit",
        )

    def fill(self, label: str, value: str) -> None:
        name = f".schema-form-property__label:text-is('{label}')"
        field = self.page.locator(f".schema-form-property:has(> .p-label__header {name})").first
        field.locator("input").fill(value)

    def submit(self) -> None:
        self.page.get_by_role("button", name="Submit").click()

    def view_run(self) -> str:
        """Go to the run that was asked for, by the deployment's list of runs; returns its id."""
        self.page.wait_for_url("**tab=Runs", wait_until="commit")
        self.page.locator("a[href*='/runs/flow-run/']").first.click()
        self.page.wait_for_url("**/runs/flow-run/**", wait_until="commit")
        return self.page.url.rpartition("/")[2].partition("?")[0]

    def state(self, run: str) -> str:
        return self.ask(f"/flow_runs/{run}")["state"]["type"]


def test_a_run_is_asked_for_watched_cancelled_and_its_stage_rerun(place, found, window):
    folder, _ = place
    left = watch(window)
    prefect = Prefect(found["server"], window)

    prefect.form("pipeline/toy")
    prefect.fill("Seed (Optional)", "-3")
    prefect.submit()
    prefect.page.get_by_text("Validation failed for field 'config.seed'").first.wait_for()
    save_screenshot(prefect.page, "prefect a bad parameter")

    prefect.form("pipeline/toy")
    prefect.fill("Seed (Optional)", "7")
    prefect.submit()
    run = prefect.view_run()
    until((folder / "reached").exists, f"{STAGE} under way")
    prefect.page.get_by_text("Running", exact=True).first.wait_for()
    prefect.page.get_by_role("tab", name="Artifacts").or_(
        prefect.page.get_by_text("Artifacts", exact=True)
    ).first.click()
    prefect.page.get_by_text("progress-ingest-wikipedia").first.wait_for()
    save_screenshot(prefect.page, "prefect a run under way")

    board = window.new_page()
    board.goto(f"{found['dashboard'].url}/?run={run}")
    wait_for_page(board, "Overview")
    until(lambda: "ingest:wikipedia▸ running" in table_text(board) and "ticks" in table_text(board), "the stage's row")
    before = table_text(board)
    until(lambda: table_text(board) != before, "a page that moves by itself")
    save_screenshot(board, "dashboard a run under way")
    assert (
        board.get_by_role("link", name="This run in Prefect").get_attribute("href")
        == prefect.page.url.partition("?")[0]
    )

    child = psutil.Process(int((folder / "reached").read_text()))
    prefect.page.get_by_role("button", name="Cancel").first.click()
    prefect.page.get_by_role("button", name="Confirm").click()
    until(lambda: not child.is_running(), "the stage's process gone", 30)
    until(lambda: prefect.state(run) == "CANCELLED", "the run cancelled", 30)
    prefect.page.get_by_text("Cancelled", exact=True).first.wait_for()
    save_screenshot(prefect.page, "prefect a cancelled run")
    until(lambda: "ingest:wikipedia■ cancelled" in table_text(board), "the cancelled stage's row")
    save_screenshot(board, "dashboard a cancelled run")

    (folder / "go").touch()
    prefect.form(f"{STAGE}/toy")
    prefect.fill("Seed (Optional)", "7")
    prefect.submit()
    again = prefect.view_run()
    until(lambda: prefect.state(again) == "COMPLETED", "the stage alone")
    prefect.page.get_by_text("Completed", exact=True).first.wait_for()
    save_screenshot(prefect.page, "prefect the stage alone")
    made = [one for one in Store(folder / "store").list("tokens") if one.manifest["run"] == again]
    assert {one.manifest["config"]["seed"] for one in made} == {7}
    board.goto(f"{found['dashboard'].url}/?run={again}")
    until(lambda: "ingest:synth✓ done" in table_text(board), "the rerun's row")
    prefect.page.get_by_text("Artifacts", exact=True).first.click()
    prefect.page.get_by_text("this run in the dashboard").or_(
        prefect.page.get_by_text("dashboard", exact=True)
    ).first.wait_for()
    assert left == []


def test_a_rollout_a_rejected_document_and_the_lineage_of_a_score_are_opened(place, found, window):
    _, outputs = place
    page, base = window.new_page(), f"{found['dashboard'].url}"
    page.goto(f"{base}/rollouts?run=toy&live=off")
    wait_for_page(page, "Rollouts and traces")
    page.get_by_text("4 + 1?").first.wait_for()
    page.get_by_text("reward 1", exact=False).first.wait_for()
    save_screenshot(page, "dashboard rollouts")

    page.goto(f"{base}/distillation?run=toy&live=off")
    wait_for_page(page, "Distillation")
    page.get_by_text("rejected: too_short, by local").wait_for()
    page.get_by_text("dunno").scroll_into_view_if_needed()
    save_screenshot(page, "dashboard a rejected document")

    page.goto(f"{base}/evaluations?run=toy&live=off")
    wait_for_page(page, "Evaluations")
    way = page.get_by_role("link", name="Where these scores come from").get_attribute("href")
    page.goto(f"{base}/{way}&live=off")
    wait_for_page(page, "Lineage")
    graph = page.locator("[data-testid=stGraphVizChart] svg")
    graph.locator("text", has_text=outputs["pretrain"]["checkpoint"].partition("/")[2]).first.wait_for()
    save_screenshot(page, "dashboard the lineage of a score")
