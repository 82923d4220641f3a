"""A reinforcement run that is killed goes on to the same bytes; what has no score is counted and left out."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from rl.reinforce import keep_steps
from tests.support.reinforcing import run


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder)


@pytest.mark.slow
def test_killed_in_a_rollout_it_resumes_to_the_same_bytes(whole, tmp_path):
    command = [sys.executable, "-m", "tests.support.reinforcing", str(tmp_path)]
    log = tmp_path / "rollouts.jsonl"
    child = subprocess.Popen(command, env=os.environ.copy())
    try:
        # Past the save of step 2, before the end: the log has rows of step 3 that the resumed run must draw again.
        while child.poll() is None and not any(row["step"] >= 3 for row in lines_so_far(log)):
            time.sleep(0.01)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert not (tmp_path / "final").exists()
    subprocess.run(command, check=True)
    folder, _ = whole
    assert (tmp_path / "rollouts.jsonl").read_bytes() == (folder / "rollouts.jsonl").read_bytes()
    for name in ("weights.safetensors", "config.json"):
        assert (tmp_path / "final" / name).read_bytes() == (folder / "final" / name).read_bytes()


def lines_so_far(path):
    """The whole lines of a file that is still being written."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def test_what_has_no_score_is_counted_and_left_out(whole):
    folder, facts = whole
    rows = lines(folder / "rollouts.jsonl")
    assert len(rows) == facts["rollouts"]
    unscored = [row for row in rows if row["reward"] is None]
    assert 0 < len(unscored) == facts["unscored"]
    assert all(row["advantage"] is None for row in unscored)
    assert all(len(row["logprobs"]) == len(row["ids"]) == row["length"] for row in rows)


def test_keep_steps_drops_later_rows_and_a_torn_line(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"st', encoding="utf-8")
    keep_steps(log, 2)
    assert log.read_text(encoding="utf-8") == '{"step": 0}\n{"step": 1}\n'
    keep_steps(tmp_path / "absent.jsonl", 2)
