"""The toy chain through the real command, in real processes, against a fake endpoint on a real socket."""

import json
import os
import shutil
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest

from flows.cli import inspect
from model.exports.web.folder import export_web
from store.artifacts import Store
from store.catalog import Catalog
from tests.support.pages.page_check import both_replies
from tests.support.servers.fake_openai import FakeOpenAI, useful
from tests.support.servers.prefect_calls import remove_limits
from tests.support.stages.toy_cli import start

CHAIN = Path(__file__).parents[1] / "support" / "stages" / "chain.toml"
KILLED = ("distill", "reason")  # one pays for replies, one has checkpoints; the other stages: tests/tasks
TABLES = ("artifacts", "inputs", "runs", "metrics", "calls", "samples")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def endpoint():
    with FakeOpenAI(useful) as server:
        yield server


@pytest.fixture(scope="module")
def run(endpoint, prefect_url, prefect_home, tmp_path_factory):
    """Start `nautile run` of the chain in a store. The embedded server of a run alone is tested in test_run.py."""
    remove_limits(prefect_url)
    folder = tmp_path_factory.mktemp("config")
    teacher = f'kind = "openai"\nmodel = "fake"\nurl = "{endpoint.url}"\nstand_in = true\n'
    text = f"{CHAIN.read_text(encoding='utf-8')}\n[endpoints.teacher]\n{teacher}"
    (folder / "chain.toml").write_text(text, encoding="utf-8")
    more = {"PREFECT_API_URL": prefect_url, "PREFECT_HOME": str(prefect_home)}
    more |= {"NAUTILE_DAG": "tests.support.stages.toy_dag:chain_dag"}
    return partial(start, "run", str(folder / "chain.toml"), cwd=folder, **more)


def done(process: subprocess.Popen) -> None:
    output = process.communicate(timeout=800)
    assert process.returncode == 0, output


def query(store: Store, text: str) -> list[dict]:
    columns, rows = inspect.sql(store, text)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def digests(store: Store) -> dict[str, dict[str, str]]:
    """Artifact id -> file -> sha256, of everything published but what tells times: the report, the card, scores."""
    return {
        artifact.id: {file: entry["sha256"] for file, entry in artifact.manifest["files"].items()}
        for artifact in store.list()
        if artifact.kind not in ("report", "data_card", "evaluation")
    }


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("whole") / "store")
    done(run(store=store.root))
    return store


def test_it_runs_whole_and_again_as_all_reused(run, whole, endpoint):
    rows = query(whole, "select label, state from runs where not reused")
    assert {row["state"] for row in rows} == {"done"}
    labels = {row["label"] for row in rows}
    assert {"distill", "pretrain", "align", "reason", "self_distill", "evaluate:self_distill", "report"} <= labels
    requests, before = endpoint.answered, digests(whole)
    done(run(store=whole.root))
    assert endpoint.answered == requests
    assert digests(whole) == before
    again = query(whole, "select count(*) as n from runs where not reused")
    assert again[0]["n"] == len(rows)


def test_the_catalog_comes_back_from_manifests_and_events(whole):
    def everything():
        return {table: sorted(map(str, query(whole, f"select * from {table}"))) for table in TABLES}

    before = everything()
    assert all(before.values())
    whole.catalog_path.unlink()
    Catalog(whole).rebuild()
    assert everything() == before


def test_lineage_of_the_last_score_reaches_shards_and_calls(whole):
    last = query(whole, "select id from artifacts where kind = 'evaluation' order by created desc limit 1")[0]["id"]
    stages = {row["stage"] for row in inspect.lineage(whole, last)}
    assert {"ingest", "distill", "pretrain", "align", "reason", "self_distill"} <= stages
    files = query(whole, f"select * from lineage_files('{last}')")
    assert any(str(row).count("shards/") for row in files)
    calls = query(whole, f"select purpose, count(*) as n from lineage_calls('{last}') group by purpose")
    assert {row["purpose"] for row in calls} == {"teacher", "judge"}


def test_in_a_browser_the_last_checkpoint_answers_as_the_command_does(whole, tmp_path):
    """What the pipeline has trained, exported as a page; with the model of `make run`: docs/export.md."""
    if not shutil.which("npm"):
        pytest.skip("no npm to fetch the runtime with")
    last = query(whole, "select id from artifacts where kind = 'checkpoint' order by created desc limit 1")[0]["id"]
    checkpoint = whole.get(last).path
    assert whole.get(last).manifest["stage"] == "self_distill"
    export_web(checkpoint, tmp_path / "page")
    for command, page in both_replies(checkpoint, tmp_path / "page", ["What is 7 + 5?", "the sea"]):
        assert page == command


def test_killed_anywhere_it_resumes_to_the_same_bytes(run, whole, tmp_path):
    """kill -9 of the whole session in two stages; then it ends as if undisturbed. The stages between those are reused:
    they have been made once from the same bytes."""
    store = Store(shutil.copytree(whole.root, tmp_path / "store", symlinks=True))
    removed = [artifact for artifact in store.list() if artifact.manifest["label"] in KILLED]
    assert {artifact.manifest["label"] for artifact in removed} == set(KILLED)
    for artifact in removed:
        shutil.rmtree(artifact.folder)
    for label in KILLED:
        process, stage = run(store=store.root), label.partition(":")[0]
        deadline = time.monotonic() + 300
        while process.poll() is None and time.monotonic() < deadline and not staged(store.root, stage):
            time.sleep(0.02)
        assert process.poll() is None, process.communicate()
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    done(run(store=store.root))
    assert digests(store) == digests(whole)
    assert inspect.verify(store, None)["damaged"] == {}


def staged(store: Path, stage: str) -> bool:
    """Whether the stage has begun to write: its scratch or output folder has a file."""
    for request in store.glob("staging/*/request.json"):
        try:
            if json.loads(request.read_text(encoding="utf-8"))["module"] != f"tasks.{stage}":
                continue
        except (OSError, ValueError):
            continue
        if any(path.is_file() for part in ("scratch", "output") for path in request.parent.glob(f"{part}/**/*")):
            return True
    return False
