"""The toy chain through the real command, in real processes, against a fake endpoint on a real socket."""

import json
import os
import shutil
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from nautile.evals.running.rows import read_rows
from nautile.flows.cli import inspect
from nautile.flows.operate import reconcile
from nautile.store.artifacts import Store
from nautile.store.catalog import Catalog
from tests.support.servers.fake_openai import FakeOpenAI, useful
from tests.support.servers.prefect_calls import remove_limits
from tests.support.servers.sockets import events_to_other_hosts, socket_events, watch_sockets
from tests.support.stages.toy_cli import start

CHAIN = Path(__file__).parents[1] / "support" / "stages" / "chain.toml"
KILLED = "reason"  # it has checkpoints, and begins from those of others; what the other stages keep: tests/tasks
KEY = "sk-planted-2718281828459045"  # of the endpoint
TABLES = ("artifacts", "inputs", "attempts", "metrics", "calls", "samples")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def endpoint():
    with FakeOpenAI(useful) as server:
        yield server


class Whole(NamedTuple):
    """A store in which the chain has run once, alone in a folder with a home, with what it printed."""

    store: Store
    folder: Path
    out: str
    err: str
    sockets: Path  # the log of its connections


@pytest.fixture(scope="module")
def run(endpoint, tmp_path_factory):
    """Start `nautile run` of the chain in a store."""
    folder = tmp_path_factory.mktemp("config")
    teacher = f'kind = "openai"\nmodel = "fake"\nurl = "{endpoint.url}"\nkey_variable = "CHAIN_KEY"\nstand_in = true\n'
    text = f"{CHAIN.read_text(encoding='utf-8')}\n[endpoints.teacher]\n{teacher}"
    (folder / "chain.toml").write_text(text, encoding="utf-8")
    more = {"CHAIN_KEY": KEY, "NAUTILE_DAG": "tests.support.stages.toy_dag:chain_dag"}
    return partial(start, "run", str(folder / "chain.toml"), **more)


def done(process: subprocess.Popen) -> tuple[str, str]:
    output = process.communicate(timeout=800)
    assert process.returncode == 0, output
    return output


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
def chain(run, prefect_home, tmp_path_factory):
    """The first run, with the Prefect server that it brings. `prefect_home` was made by such a server."""
    folder, sockets = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("sockets") / "log"
    (folder / "home").mkdir()
    shutil.copytree(prefect_home, folder / "store" / "prefect")
    output = done(run(store=folder / "store", cwd=folder, HOME=str(folder / "home"), **watch_sockets(sockets)))
    return Whole(Store(folder / "store"), folder, *output, sockets)


@pytest.fixture(scope="module")
def whole(chain):
    return chain.store


def test_it_runs_whole_and_quietly_and_writes_nothing_outside_its_store(chain):
    rows = query(chain.store, "select label, state from attempts where not reused")
    assert {row["state"] for row in rows} == {"done"}
    labels = {row["label"] for row in rows}
    stages = {"distill", "pretrain", "supervise", "align", "reason", "self_distill", "report"}
    assert stages | {"evaluate:self_distill"} <= labels
    assert chain.err == ""
    assert f"{len(labels)} stages in" in chain.out
    assert "Prefect" not in chain.out.replace("starting the embedded Prefect server", "")
    page = chain.out.strip().splitlines()[-1].removeprefix("report: ")
    assert (chain.folder / page).read_text().startswith("<!doctype html>")
    assert list((chain.folder / "home").iterdir()) == []
    assert sorted(path.name for path in chain.folder.iterdir()) == ["home", "store"]


def test_by_default_nothing_leaves_the_machine(chain):
    events = socket_events(chain.sockets)
    programs = [what for kind, what in events if kind == "start"]
    watched = {word for program in programs if "nautile.tasks.engine.child_main" in program for word in program.split()}
    keys = query(chain.store, "select distinct key from attempts")
    assert all(any(f"/{row['key']}/request.json" in word for word in watched) for row in keys)
    assert any("nautile.flows.operate.prefect_server" in program for program in programs)
    assert any(kind == "connect" for kind, _ in events)
    assert events_to_other_hosts(chain.sockets) == []


def test_a_key_is_in_no_file_and_no_line_of_a_run(chain):
    assert KEY not in chain.out + chain.err
    written = {path: path.read_bytes() for path in chain.folder.rglob("*") if path.is_file()}
    assert any(b"CHAIN_KEY" in content for path, content in written.items() if path.name == "manifest.json")
    assert not [path for path, content in written.items() if KEY.encode() in content]


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


def test_its_text_was_screened_for_what_it_is_asked(whole):
    for evaluation in whole.list("evaluation"):
        assert evaluation.manifest["facts"]["not_screened"] == {}
        rows = read_rows(evaluation.path / "rows.jsonl")
        assert {row["screened"] for row in rows if row["benchmark"] == "wiki_trivia"} == {True}


def test_killed_it_resumes_to_the_same_bytes_and_does_nothing_else_again(
    run, whole, endpoint, prefect_url, prefect_home, tmp_path
):
    """kill -9 of the whole session in a stage; then it ends as if undisturbed. All other stages are reused."""
    remove_limits(prefect_url)
    server = {"PREFECT_API_URL": prefect_url, "PREFECT_HOME": str(prefect_home)}
    store = Store(shutil.copytree(whole.root, tmp_path / "store", symlinks=True))
    removed = [artifact for artifact in store.list() if artifact.manifest["label"] == KILLED]
    assert removed
    for artifact in removed:
        shutil.rmtree(artifact.folder)
    requests, before = endpoint.answered, query(store, "select id from attempts where not reused")
    process = run(store=store.root, cwd=tmp_path, **server)
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline and not staged(store.root, KILLED):
        time.sleep(0.02)
    assert process.poll() is None, process.communicate()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    with temporary_settings({PREFECT_API_URL: prefect_url}):
        settled = {result.what for result in reconcile.reconcile(store)}
    assert settled >= {"stage", "Prefect run", "Prefect task run"}
    done(run(store=store.root, cwd=tmp_path, **server))
    assert digests(store) == digests(whole)
    assert inspect.verify(store, None)["damaged"] == {}
    known = [row["id"] for row in before]
    again = query(store, "select id, label from attempts where not reused")
    assert {row["label"] for row in again if row["id"] not in known} == {KILLED}
    assert endpoint.answered == requests


def staged(store: Path, stage: str) -> bool:
    """Whether the stage has begun to write: its scratch or output folder has a file."""
    for request in store.glob("staging/*/request.json"):
        try:
            if json.loads(request.read_text(encoding="utf-8"))["stage"] != stage:
                continue
        except (OSError, ValueError):
            continue
        if any(path.is_file() for part in ("scratch", "output") for path in request.parent.glob(f"{part}/**/*")):
            return True
    return False
