"""Units of a stage without Prefect: marks, set aside, gone on with by any number of workers, ended with the parent."""

import pytest

from configs.schema import LaunchConfig
from store.artifacts import Store
from store.catalog import Catalog
from tasks.progress import subscribe
from tasks.stage import RunContext
from tests.support.stage_pieces import pieces, section, whole


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


@pytest.fixture
def context(store):
    return RunContext("r1", str(store.root), label="pieces", launch=LaunchConfig(workers=2))


@pytest.fixture
def gate(tmp_path):
    gate = tmp_path / "gate"
    gate.mkdir()
    return gate


@pytest.fixture
def updates():
    heard = []
    unsubscribe = subscribe(heard.append)
    yield heard
    unsubscribe()


def text(store, made):
    return (store.get(made["numbers"]).path / "all.txt").read_text()


def test_rounds_are_done_in_order_and_their_events_reach_the_catalog(store, context, updates):
    made = pieces.run(section(4), {}, context)
    assert text(store, made) == whole(4)
    assert store.get(made["numbers"]).manifest["facts"] == {"set_aside": {}, "platforms": "cpu"}
    shown = [(update.note, update.done, update.total, update.unit) for update in updates if update.total]
    assert ("cut", 4.0, 4, "files") in shown
    assert ("double", 4.0, 4, "pieces") in shown
    Catalog(store).ingest()
    rows = Catalog(store).query("SELECT name, source, value FROM metrics ORDER BY name, source")
    assert [(row["name"], row["source"], row["value"]) for row in rows] == [
        ("cut_set_aside", None, 0.0),
        ("cut_units", None, 4.0),
        ("double_set_aside", None, 0.0),
        ("double_units", None, 4.0),
        ("joined", None, 4.0),
        *(("rows", f"cut/piece-{index}", 5.0) for index in range(4)),
    ]
    (run,) = Catalog(store).query("SELECT state, peak_bytes FROM runs")
    assert run["state"] == "done"
    assert run["peak_bytes"] > 10**7
    logs = "".join(path.read_text() for path in (store.root / "logs").glob("pieces-*.txt"))
    assert "Traceback" not in logs
    assert pieces.run(section(4), {}, context) == made
