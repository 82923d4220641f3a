"""What trackio and W&B themselves read from their folders after a failed attempt and one that went on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.stages.toy_cli import ROOT, environment

FOLDER = Path(os.environ.get("TRACKERS_FOLDER", Path(sys.prefix) / "trackers"))

pytestmark = [pytest.mark.slow, pytest.mark.heavy]


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """What `tests.support.processes.tracked_run` prints."""
    folder = tmp_path_factory.mktemp("tracked")
    path = os.pathsep.join((str(ROOT), str(FOLDER)))
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.processes.tracked_run", folder],
        env=environment(folder / "store", HOME=str(folder)) | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_trackio_has_one_run_with_each_step_once(tracked):
    project = tracked["trackio"]
    [run] = project["runs"]
    assert run["name"] == f"sums:A-{run['id'][:8]}"
    assert [(row["step"], row["value"]) for row in project["logs"] if "value" in row] == [(n, n) for n in range(4)]
    assert [row["done"] for row in project["logs"] if "done" in row] == [0, 1]
    expected = {"seeds.data": "5", "sums.count": "4", "nautile.config": "toy", "state": "done", "_Group": "r2"}
    assert project["config"].items() >= {**expected, "output.numbers": tracked["outputs"]["numbers"]}.items()


def test_wandb_has_one_id_with_each_step_once_and_its_rows_go_on(tracked):
    first, second = tracked["wandb"]
    assert first["id"] == second["id"] == tracked["trackio"]["runs"][0]["id"]
    assert [(row["_step"], row["step"], row["value"]) for row in first["rows"]] == [(n, n, n) for n in range(4)]
    assert second["rows"] == []
    assert [(file["group"], file["project"], file["config"]["sums.count"]) for file in (first, second)] == [
        ("r1", "toys", "4"),
        ("r2", "toys", "4"),
    ]
    assert first["summary"]["state"] == "failed"
    assert second["summary"].items() >= {"state": "done", "output/numbers": tracked["outputs"]["numbers"]}.items()
