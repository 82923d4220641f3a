"""Several hosts that make one artifact and share nothing but the store's remote, each with a folder of its own."""

import shutil
from pathlib import Path

import pytest

from nautile.common.errors import Retryable
from nautile.common.processes import free_port
from nautile.configs.operation import LaunchConfig
from nautile.store.catalog import Catalog
from nautile.tasks.engine.attempt import run_stage
from nautile.tasks.engine.stage import RunContext
from tests.support.samples.stage_store import published
from tests.support.stages.stage_psum import visit
from tests.support.stages.toy_cli import ROOT


@pytest.mark.heavy
def test_hosts_without_a_shared_disk_go_on_from_the_remote_when_one_is_replaced(machine, tmp_path, monkeypatch):
    driver = machine("driver")
    given = published(driver, "tokens", "x", {"a.txt": "20"})
    driver.push([given])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the hosts have the module of the stage
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    monkeypatch.setenv("VISIT_STOPS", str(tmp_path / "stops"))
    (tmp_path / "stops").touch()
    folders = [tmp_path / "host0", tmp_path / "host1"]
    member = f"cd {ROOT} && exec env NAUTILE_STORE_CACHE={tmp_path}/host{{host}} {{member}}"
    launch = LaunchConfig(processes=2, stages=("visit",), command=f"sh -c '{member}'", silent_s=30)

    def run(name):
        where = launch.model_copy(update={"coordinator": f"127.0.0.1:{free_port()}"})
        context = RunContext(name, str(driver.root), label="visit", launch=where)
        return driver.get(run_stage(visit, {}, {"x": given.id}, context)["numbers"])

    with pytest.raises(Retryable, match="was asked to stop"):
        run("r1")
    assert (folders[1] / "artifacts" / "tokens").is_dir()
    shutil.rmtree(folders[0])  # another machine takes its place
    (tmp_path / "stops").unlink()
    numbers = run("r2")
    assert (numbers.path / "sum.txt").read_text() == "41.0"
    facts = numbers.manifest["facts"]
    assert (facts["resumed"], Path(facts["folder"]).parents[1]) == (True, folders[0])
    assert driver.remote.names("staging") == driver.remote.names("hosts") == {}
    assert not any((folders[0] / "staging").iterdir())
    Catalog(driver).ingest()
    assert Catalog(driver).query("SELECT count(*) AS n FROM metrics WHERE name = 'visits'") == [{"n": 1}]
