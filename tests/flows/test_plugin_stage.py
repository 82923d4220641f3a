"""Plug-ins: a stage of one file is in every place that shows stages; keys follow sources; broken ones are one line."""

import json
import shutil
import subprocess
import sys

import pytest
from pydantic import TypeAdapter

from nautile.flows.cli.document import OUTPUTS
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


@pytest.mark.heavy
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
    assert not places["form sets its section"]
    assert places["refused in a form"].startswith("overrides: dedupe: a form may not set it")
    assert "unknown key `dedupes`" in places["refused key"]


KEYS = """
import json, sys
from nautile.configs.load import load; from nautile.flows.dag import build_dag
sys.stdout.write(json.dumps({step.label: step.key for step in build_dag(load(sys.argv[1]))}))
"""


@pytest.mark.slow
def test_the_source_of_a_plug_in_that_declares_no_version_is_in_the_keys_of_its_steps_alone(tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "own")
    (tmp_path / "letters.mbox").write_text("From a@b.example\n\nDear reader\n")
    parts = tmp_path / "own" / "nautile_examples"
    names = ("stages=stage:lengths", "vendors=vendor:acme", "readers=reader:mbox", "rewards=reward:brief")
    plugged = ",".join(name.replace("=", "=nautile_examples.") for name in (*names, "benchmarks=benchmark:json_sums"))
    more = {"NAUTILE_PLUGINS": plugged, "NAUTILE_DAG": "nautile_examples.stage:steps"}
    more["PYTHONPATH"] = f"{ROOT / 'src'}:{tmp_path / 'own'}"

    def keys():
        command = [sys.executable, "-P", "-c", KEYS, str(tmp_path / "own" / "run.toml")]
        variables = environment(tmp_path / "store", **more)
        asked = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True)
        assert asked.returncode == 0, asked.stderr
        return json.loads(asked.stdout)

    def edited(name, old="", new=""):
        text = (parts / name).read_text()
        assert old in text
        (parts / name).write_text(f"{text.replace(old, new)}# edited\n")

    first = keys()
    edited("stage.py")
    second = keys()
    assert {label for label in first if first[label] != second[label]} == {"lengths"}
    edited("vendor.py")
    edited("reader.py")  # which declares a version
    assert keys() == second
    edited("reader.py", "version=1", "version=None")
    third = keys()
    changed = {label for label in third if third[label] != second[label]}
    assert {"ingest:letters", "lengths", "pretrain"} <= changed
    assert not {"held_out", "evaluate:acme"} & changed
    edited("reader.py")
    assert keys()["ingest:letters"] != third["ingest:letters"]


BROKEN = {
    "stage=a:b": "it is not REGISTRY=module:attribute; the registries are stages, vendors,",
    "vendors=no_such_module:acme": "cannot be imported (ModuleNotFoundError: No module named 'no_such_module')",
    "vendors=raising:other": "cannot be imported (SystemExit: not now)",
    "rewards=skipping:other": "cannot be imported (Skipped: not here)",
    "rewards=odd:named": "its `version` is of the class str, and not int",
    "rewards=odd:failing": "no `version` (ValueError: not today)",
    "readers=json:nothing": "cannot be imported (AttributeError: module 'json' has no attribute 'nothing')",
    "readers=json:dumps": "is of the class function, and not Reader",
    "stages=nautile.tasks.ingest:ingest": "the project itself has an entry 'ingest' too",
    "stages=json:model": "the configuration has an entry 'model' too",
    "vendors=json:loads,vendors=pickle:loads": "vendors=json:loads of NAUTILE_PLUGINS has an entry 'loads' too",
}


@pytest.mark.slow
def test_broken_plug_ins_are_listed_each_with_its_fault(tmp_path):
    (tmp_path / "raising.py").write_text("raise SystemExit('not now')")
    (tmp_path / "skipping.py").write_text("class Skipped(BaseException): pass\nraise Skipped('not here')")
    # What it prints is not among the JSON.
    (tmp_path / "odd.py").write_text(
        "print('loaded')\ndef named(): pass\nnamed.version = '1'\n"
        "class Failing:\n def __call__(self): pass\n @property\n def version(self): raise ValueError('not today')\n"
        "failing = Failing()\n"
    )
    more = PATH | {"PYTHONPATH": f"{PATH['PYTHONPATH']}:{tmp_path}", "NAUTILE_PLUGINS": ",".join(BROKEN)}
    # An installed package whose metadata is not UTF-8.
    (tmp_path / "torn-1.dist-info").mkdir()
    (tmp_path / "torn-1.dist-info" / "METADATA").write_bytes(b"Name: torn\nVersion: \xff\n")
    (tmp_path / "torn-1.dist-info" / "entry_points.txt").write_text("[nautile.rewards]\ntorn = no_such_module:torn\n")
    asked = nautile("plugins", "--json", store=tmp_path / "store", cwd=tmp_path, **more)
    assert asked.returncode == 2, asked.stderr
    assert "loaded" in asked.stderr
    TypeAdapter(OUTPUTS["plugins"]).validate_json(asked.stdout, strict=True)
    rows = {f"{row['registry']}={row['reference']}": row["fault"] for row in json.loads(asked.stdout)}
    for text, fault in BROKEN.items():
        assert fault in rows[text.rpartition(",")[2]], text
    assert all(row.count("\n") == 0 for row in rows.values())
    assert "of an installed package cannot be imported" in rows["rewards=no_such_module:torn"]
    for command in ("runs", "status"):  # which show what is recorded all the same
        shown = nautile(command, store=tmp_path / "store", cwd=tmp_path, **more)
        assert (shown.returncode, shown.stderr) == (0, ""), command
    none = nautile("plugins", store=tmp_path / "store", cwd=tmp_path, **PATH)
    assert (none.returncode, "NAUTILE_PLUGINS=REGISTRY=module:attribute" in none.stdout) == (0, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plugged", "settings", "fault"),
    [
        ("stages=json:model", (), "the configuration has an entry 'model' too"),
        ("vendors=no_such_module:acme", (), "No module named 'no_such_module'"),
        ("", ('endpoints.smollm2.kind="acme"',), "no kind 'acme'; the kinds are openai, mistral, embedded, checker"),
        ("", ('ingest.sources.0.reader="mbox"',), "no reader 'mbox'; the readers are hub, parquet, jsonl, wikipedia"),
        ("", "tests.support.stages.plugin_stage:plugin_dag", "has no attribute 'dedupe'); `nautile plugins` lists"),
    ],
    ids=["clash", "module", "vendor", "reader", "stage"],
)
def test_what_no_plug_in_has_or_a_broken_one_ends_a_run_before_it_starts(tmp_path, plugged, settings, fault):
    more = PATH | {"NAUTILE_PLUGINS": plugged}
    more |= {"NAUTILE_DAG": settings} if isinstance(settings, str) else {}
    words = [word for setting in settings for word in ("--set", setting)] if isinstance(settings, tuple) else []
    ran = nautile("run", str(TOY), *words, store=tmp_path / "store", cwd=tmp_path, **more)
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert fault in ran.stderr
    assert len(ran.stderr.strip().splitlines()) == 1
    assert not list((tmp_path / "store").glob("staging/*"))
