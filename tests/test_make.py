"""The Makefile's promises that can be tried without setting anything up."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def make(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = ["make", "-f", str(ROOT / "Makefile"), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def bare(tmp_path):
    """A folder with the two files that the set-up depends on, and a python that says it is 3.10."""
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "dev.lock").touch()
    (tmp_path / "pyproject.toml").touch()
    old = tmp_path / "python3.10"
    pretend = "import sys; sys.version_info = (3, 10, 0); exec(sys.argv[2])"
    old.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{pretend}' \"$@\"\n")
    old.chmod(0o755)
    return tmp_path


def test_an_old_python_is_refused_with_the_way_out(bare):
    done = make("run", f"PYTHON={bare}/python3.10", folder=bare)
    assert done.returncode != 0
    assert "nautile needs python 3.11, 3.12 or 3.13" in done.stderr
    assert "is 3.10: name another with `make PYTHON=python3.12`" in done.stderr
    assert not (bare / ".venv").exists()


@pytest.mark.parametrize(
    ("target", "does"),
    [
        ("run", ".venv/bin/nautile run local"),
        ("check", '-m "not slow and not heavy"'),
        ("test", '-m "not heavy"'),
        ("test-all", "-m pytest"),
        ("types", "mypy"),
        ("ahead", "--target .venv/ahead"),
        ("harness", "--target .venv/harness"),
        ("trackers", "--target .venv/trackers"),
        ("audit", "bench/operation/audit.py build/audit .venv/audit/bin/pip-audit"),
        ("torch", ".venv/torch/bin/python -m pip install"),
        ("lint", "ruff format --check"),
        ("clean", "rm"),
    ],
)
def test_what_each_target_does(target, does):
    locks = [f"requirements/{name}" for name in ("ahead.lock", "harness.lock", "torch.txt", "trackers.lock")]
    done = make("-n", *(word for lock in locks for word in ("-W", lock)), target)
    assert done.returncode == 0, done.stderr
    assert does in done.stdout


def test_set_up_is_done_once(bare):
    ready = bare / ".venv" / ".ready"
    ready.parent.mkdir()
    ready.touch()
    done = make("-n", "run", folder=bare)
    assert "pip install" not in done.stdout
    again = make("-n", "-W", "requirements/dev.lock", "run", folder=bare).stdout
    assert "pip install" in again
    for line in again.splitlines():
        if "pip install" in line:  # whatever is fetched is pinned by digest; the rest is this folder
            assert "--require-hashes" in line or "--no-build-isolation --editable ." in line


def test_what_is_imported_is_compiled_once(monkeypatch):
    """Containers forbid it by a variable, and each of a run's processes would compile a thousand modules anew."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    done = subprocess.run(
        ["make", "-s", "-f", "-", "told"], input=f"include {ROOT / 'Makefile'}\ntold:\n\t@env\n",
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "PATH=" in done.stdout
    assert "PYTHONDONTWRITEBYTECODE" not in done.stdout
