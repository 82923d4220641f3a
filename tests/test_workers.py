"""`tests.support.workers`: tests in forked processes, with failures, warnings, and processes that end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

ORDINARY = """
import os, warnings
import pytest

@pytest.fixture(scope="session")
def session(tmp_path_factory):
    folder = tmp_path_factory.mktemp("session")
    yield folder
    (folder.parents[2] / f"ended-{os.getpid()}").touch()

@pytest.mark.parametrize("number", range(2))
def test_passes(number, session, tmp_path, capfd):
    os.write(1, b"captured")
    assert capfd.readouterr().out == "captured"
    assert tmp_path.parent == session.parent

def test_fails():
    warnings.warn("careful")
    print("what", "it printed")
    assert 1 == 2

@pytest.mark.skip
def test_skipped():
    pass
"""
DYING = """
import os, signal

def test_before():
    pass

def test_dies():
    os.kill(os.getpid(), signal.SIGKILL)

def test_after():
    pass
"""
UNTIDY = """
import pytest

@pytest.fixture(scope="session")
def untidy():
    yield
    raise OSError("not ended")

def test_untidy(untidy):
    pass
"""


@pytest.fixture
def run(tmp_path):
    """Run the tests of those files in two workers; returns the exit code and the output."""
    folder = tmp_path / "tests"
    folder.mkdir()

    def call(*more, texts=(ORDINARY, ORDINARY, DYING, UNTIDY)):
        for name, text in zip("abcd", texts, strict=False):
            (folder / f"test_{name}.py").write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.workers", "--workers", "2"]
        command += ["--import-mode=importlib", "--basetemp", str(tmp_path / "base"), "--rootdir", str(folder)]
        environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run(
            [*command, *more, str(folder)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout + done.stderr

    return call


def test_each_test_is_run_and_reported_once_whatever_ends_its_process(run, tmp_path):
    code, output = run()
    assert code == 1
    assert output.splitlines()[-1].startswith("3 failed, 7 passed, 2 skipped, 2 warnings, 1 error in ")
    assert output.count("what it printed") == output.count("UserWarning: careful") == 2
    assert "the process of the test ended by itself: -9" in output
    assert "OSError: not ended" in output
    assert len(list(tmp_path.glob("ended-*"))) in (1, 2)  # both files may have been one worker's


def test_the_first_failure_ends_all_if_that_is_asked(run):
    code, output = run("-x")
    assert code == 1
    assert "stopping after" in output
    assert "test_dies" not in output


def test_threads_of_the_collection_are_refused_for_a_fork_would_lack_them(run):
    text = (
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\ndef test_it(): pass\n"
    )
    code, output = run(texts=[text])
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "collecting the tests has started threads" in output
