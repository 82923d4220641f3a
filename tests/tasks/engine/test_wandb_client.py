"""What W&B's offline files have after a failed attempt and one that went on, read with W&B's own messages."""

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


def test_wandb_has_one_id_with_each_step_once_and_its_rows_go_on(tracked):
    first, second = tracked["wandb"]
    assert first["id"] == second["id"]
    assert first["name"] == second["name"] == f"sums:A-{first['id'][:8]}"
    assert [(row["_step"], row["step"], row["value"]) for row in first["rows"]] == [(n, n, n) for n in range(4)]
    assert second["rows"] == []
    assert [(file["group"], file["project"], file["config"]["sums.count"]) for file in (first, second)] == [
        ("r1", "toys", "4"),
        ("r2", "toys", "4"),
    ]
    assert first["summary"]["state"] == "failed"
    assert second["summary"].items() >= {"state": "done", "output/numbers": tracked["outputs"]["numbers"]}.items()
