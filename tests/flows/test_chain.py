"""The toy chain through the real command, in real processes, against a fake endpoint on a real socket."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.fake_openai import FakeOpenAI, useful

CHAIN = Path(__file__).parents[1] / "support" / "chain.toml"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def endpoint():
    with FakeOpenAI(useful) as server:
        yield server


@pytest.fixture(scope="module")
def config(endpoint, tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "chain.toml"
    teacher = f'kind = "openai"\nmodel = "fake"\nurl = "{endpoint.url}"\nstand_in = true\n'
    path.write_text(f"{CHAIN.read_text(encoding='utf-8')}\n[endpoints.teacher]\n{teacher}", encoding="utf-8")
    return path


def nautile(store: Path, *words: str) -> subprocess.Popen:
    environment = {**os.environ, "NAUTILE_STORE": str(store), "PREFECT_HOME": str(store.parent / "prefect")}
    return subprocess.Popen(
        [sys.executable, "-m", "flows.cli.main", *words],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def done(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output
    return output


def read(store: Path, *words: str):
    output, _ = (process := nautile(store, *words, "--json")).communicate(timeout=60)
    assert process.returncode == 0, output
    return json.loads(output)


def digests(store: Path) -> dict[str, dict[str, str]]:
    """Artifact folder -> file -> sha256, of everything published but what tells times: the report and the card."""
    manifests = (store / "artifacts").glob("*/*/manifest.json")
    files_by_artifact = {
        str(m.parent.relative_to(store)): json.loads(m.read_text(encoding="utf-8"))["files"] for m in manifests
    }
    return {
        name: {file: entry["sha256"] for file, entry in files.items()}
        for name, files in files_by_artifact.items()
        if not name.startswith(("artifacts/report/", "artifacts/data_card/", "artifacts/evaluation/"))
    }


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    store = tmp_path_factory.mktemp("whole") / "store"
    return store, done(nautile(store, "run", str(config)))


def test_it_runs_whole_and_again_as_all_reused(config, whole, endpoint):
    store, _ = whole
    rows = read(store, "sql", "select label, state from runs where not reused")
    assert {row["state"] for row in rows} == {"done"}
    labels = {row["label"] for row in rows}
    assert {"distill", "pretrain", "align", "reason", "self_distill", "evaluate:self_distill", "report"} <= labels
    requests, before = endpoint.answered, digests(store)
    done(nautile(store, "run", str(config)))
    assert endpoint.answered == requests
    assert digests(store) == before
    again = read(store, "sql", "select count(*) as n from runs where not reused")
    assert again[0]["n"] == len(rows)


def test_the_catalog_comes_back_from_manifests_and_events(whole):
    store, _ = whole
    tables = ("artifacts", "inputs", "runs", "metrics", "calls", "samples")

    def everything():
        return {table: sorted(map(str, read(store, "sql", f"select * from {table}"))) for table in tables}

    before = everything()
    assert all(before.values())
    (store / "catalog.duckdb").unlink()
    done(nautile(store, "store", "rebuild"))
    assert everything() == before


def test_lineage_of_the_last_score_reaches_shards_and_calls(config, whole):
    store, _ = whole
    last = read(store, "sql", "select id from artifacts where kind = 'evaluation' order by created desc limit 1")[0][
        "id"
    ]
    stages = {row["stage"] for row in read(store, "lineage", last)}
    assert {"ingest", "distill", "pretrain", "align", "reason", "self_distill"} <= stages
    files = read(store, "sql", f"select * from lineage_files('{last}')")
    assert any(str(row).count("shards/") for row in files)
    calls = read(store, "sql", f"select purpose, count(*) as n from lineage_calls('{last}') group by purpose")
    assert {row["purpose"] for row in calls} == {"teacher", "judge"}


def test_killed_anywhere_it_resumes_to_the_same_bytes(config, whole, tmp_path):
    """kill -9 of the whole session, four times, at moments spread over the run; then it ends as if undisturbed."""
    undisturbed, _ = whole
    store = tmp_path / "store"
    for stage in ("ingest", "distill", "pretrain", "reason"):
        process = nautile(store, "run", str(config))
        deadline = time.monotonic() + 300
        while process.poll() is None and time.monotonic() < deadline and not staged(store, stage):
            time.sleep(0.02)
        assert process.poll() is None, process.communicate()[0]
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    done(nautile(store, "run", str(config)))
    assert digests(store) == digests(undisturbed)
    assert not [row for row in read(store, "store", "verify").get("damaged", [])]


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
