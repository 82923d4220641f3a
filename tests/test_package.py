"""The package `nautile` as it is installed: a wheel has every file, and nothing of it is importable by a short name."""

import json
import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.support.wheel import FOLDERS, PIP, ROOT, built, checkout

PROGRAM = """
import importlib.util, json, nautile
from nautile.flows.dag import build_dag
from nautile.configs.load import load
from nautile.tasks.engine.child_process import child_environment
found = [name for name in {folders} if importlib.util.find_spec(name)]
print(json.dumps([nautile.__file__, found, len(build_dag(load("local"))), child_environment("s")["PYTHONPATH"]]))
"""


def test_every_folder_of_code_is_linked_and_no_link_is_broken():
    with_code = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert set(FOLDERS) == with_code
    assert all(os.readlink(ROOT / "src" / "nautile" / name) == f"../../{name}" for name in FOLDERS)


@pytest.mark.slow
def test_a_wheel_has_every_file_and_runs_beside_folders_of_the_same_names(tmp_path):
    copy = checkout(tmp_path / "checkout")
    files = {str(path.relative_to(copy)) for name in FOLDERS for path in (copy / name).rglob("*") if path.is_file()}
    wheel = built(copy, tmp_path)
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("nautile/")}
    assert names == {f"nautile/{name}" for name in files} | {"nautile/__init__.py", "nautile/py.typed"}
    place, work = tmp_path / "place", tmp_path / "work"
    install = ["install", str(wheel), "--no-deps", "--no-index", "--target", str(place)]
    subprocess.run([*PIP, *install], check=True, timeout=120)
    for name in (*FOLDERS, "nautile"):
        (work / name).mkdir(parents=True)
        (work / name / "__init__.py").write_text("raise SystemExit('imported from the working directory')")
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM.format(folders=FOLDERS)],
        cwd=work, env={**os.environ, "PYTHONPATH": str(place)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    file, found, steps, path_of_children = json.loads(done.stdout)
    assert (file, found) == (str(place / "nautile" / "__init__.py"), [])
    assert steps > 10
    assert path_of_children.split(os.pathsep)[0] == str(place)  # the parent of the package, not its own folder


@pytest.mark.slow
def test_without_the_uses_everything_else_is_imported_and_their_commands_and_pages_are_gone(tmp_path):
    (tmp_path / "nautile").mkdir()
    for name in {*FOLDERS} - {"uses"}:
        (tmp_path / "nautile" / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "src" / "nautile" / "__init__.py", tmp_path / "nautile")
    program = (
        "from nautile.flows.cli.main import PANELS; from nautile.flows.dashboard.pages import PAGES\n"
        "from nautile.configs.keys import key_fields; import nautile.flows.operate.deployments\n"
        "assert 'Use' not in PANELS and 'overview' in PAGES and 'tuning' not in PAGES"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
