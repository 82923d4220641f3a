"""A stage that is one file outside the packages and one line of a DAG is in every place that shows stages."""

import json
import subprocess
import sys

import pytest

from tests.support.stages.plugin_stage import PLUGIN
from tests.support.stages.toy_cli import ROOT, environment, nautile
from tests.support.stages.toy_stages import TOY

PATH = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
SETTINGS = """
name = "plugged"
[dedupe]
threshold = 0.9
[operation.dedupe]
approve = true
[deploy.dedupe]
pool = "dedupers"
"""


@pytest.mark.slow
def test_a_plug_ins_stage_is_found_in_every_place(tmp_path):
    store, config = tmp_path / "store", tmp_path / "plugged.toml"
    config.write_text(f'extends = "{TOY}"\n{SETTINGS}')
    more = {"store": store, "cwd": tmp_path} | PATH | PLUGIN
    ran = nautile("run", str(config), "--set", "operation.dedupe.approve=false", **more)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "dedupe" in ran.stdout
    again = nautile("status", str(config), **more)
    assert "dedupe" in again.stdout, again.stderr
    (folder,) = (store / "artifacts" / "report").iterdir()
    report = (folder / "report.md").read_text(encoding="utf-8")
    assert "## Deduplication" in report
    assert "dedupe: share that is kept" in (folder / "report.html").read_text(encoding="utf-8")
    run = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["run"]
    command = [sys.executable, "-P", str(ROOT / "tests/support/processes/plugin_places.py"), str(config), run]
    asked = subprocess.run(command, env=environment(store, **PATH, **PLUGIN), capture_output=True, text=True)
    assert asked.returncode == 0, asked.stderr
    places = json.loads(asked.stdout)
    assert places["keys differ"]
    assert places["deployments"]["dedupe-plugged"] == {"config": str(config), "only": "dedupe"}
    assert (places["pool"], places["form"], places["asks"]) == ("dedupers", True, True)
    assert places["approval"].startswith("a similarity of 90%; the last time")
    assert f'href="training?run={run}"' in places["graph"]
    assert "kept_share" in str(places["curves"])
    assert "a text that was kept" in str(places["samples"])
    assert "dedupe" in places["refused value"]
    assert "unknown key `dedupes`" in places["refused key"]
