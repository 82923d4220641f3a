"""Steps of one run at the same time: on different resources, within the limits, beside a failure, and on Ctrl-C."""

import os
import signal
import time

import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from common.errors import ConfigError
from configs.operation import ResourcesConfig
from flows.operate.concurrency import declared_limits
from flows.pipeline import StageFailed, pipeline
from flows.selection import Selection, prepare_run
from store.artifacts import Store
from tasks.engine.child_process import cancelling
from tests.support.stage_parent import is_alive
from tests.support.toy_cli import start
from tests.support.toy_stages import TOY

pytestmark = pytest.mark.slow
DAGS = "tests.support.side_by_side_dags"


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


@pytest.fixture
def run(store, tmp_path, toy, prefect_url, monkeypatch):
    """Run a DAG of that module in this process: label -> how many steps worked when it ended."""
    monkeypatch.setenv("NAUTILE_MARKERS", str(tmp_path))

    def call(dag: str, **resources: int) -> dict[str, int]:
        monkeypatch.setenv("NAUTILE_DAG", f"{DAGS}:{dag}")
        config = toy.model_copy(update={"resources": ResourcesConfig(**resources)})
        with temporary_settings({PREFECT_API_URL: prefect_url}), get_client(sync_client=True) as client:
            for name in declared_limits().values():  # of other tests: they would limit this run too
                client.delete_global_concurrency_limit_by_name(name)
            outputs = pipeline(config, Selection(), str(store.root))
        return {
            label: int((store.get(kinds["mark"]).path / "at_work.txt").read_text()) for label, kinds in outputs.items()
        }

    yield call
    with cancelling():
        """A flow that fails leaves its process cancelled; the next one begins afresh."""


def test_steps_on_different_resources_work_at_the_same_time(run):
    assert run("pair").keys() == {"text", "teachers"}  # each waited until the other had begun


@pytest.mark.parametrize("slots", [1, 2])
def test_a_resource_has_no_more_steps_at_work_than_its_limit(run, tmp_path, slots):
    at_work = run("turns", accelerator=slots)
    assert max(at_work.values()) == slots
    begun = {path.stem: path.stat().st_mtime_ns for path in tmp_path.glob("*.begun")}
    assert begun["one"] < begun["three"] < begun["last"]
    assert slots > 1 or begun["one"] < begun["two"] < begun["three"]  # in the order of the DAG


def test_a_failure_lets_what_does_not_need_it_finish(run, store):
    with pytest.raises(StageFailed, match="bad has bad input") as failure:
        run("broken")
    assert failure.value.failures.keys() == {"bad"}
    assert isinstance(failure.value.failures["bad"], ConfigError)
    assert {artifact.manifest["label"] for artifact in store.list()} == {"long", "after_long"}


def test_the_command_accounts_for_a_failure_beside_other_work(store, tmp_path, prefect_url):
    process = start_command("broken", store, tmp_path, prefect_url)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2, err
    assert "after_long: done" in out
    assert "stage bad failed: bad has bad input" in err
    assert "not started, for they need what failed: after_bad, report" in err


def test_ctrl_c_ends_the_processes_of_all_steps(store, tmp_path, prefect_url):
    process = start_command("stuck", store, tmp_path, prefect_url)
    begun = [tmp_path / "text.begun", tmp_path / "teachers.begun"]
    deadline = time.monotonic() + 120
    while not all(path.exists() and path.read_text() for path in begun):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped in text, teachers" in err
    assert not any(is_alive(int(path.read_text())) for path in begun)


def test_a_resource_without_a_limit_is_refused_in_plain_words(store, tmp_path, toy, monkeypatch):
    monkeypatch.setenv("NAUTILE_MARKERS", str(tmp_path))
    monkeypatch.setenv("NAUTILE_DAG", f"{DAGS}:unlimited")
    message = r"odd uses the resource 'quantum', which has no limit: \[resources\] has accelerator, cpu, network"
    with pytest.raises(ConfigError, match=message):
        prepare_run(toy, Selection(), store)


def start_command(dag, store, tmp_path, prefect_url):
    more = {"PREFECT_API_URL": prefect_url, "PREFECT_HOME": str(tmp_path / "prefect")}
    more |= {"NAUTILE_DAG": f"{DAGS}:{dag}", "NAUTILE_MARKERS": str(tmp_path)}
    return start("run", str(TOY), store=store.root, cwd=tmp_path, **more)
