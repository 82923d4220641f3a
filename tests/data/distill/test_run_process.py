"""Distillation killed in the middle, by kill -9 from outside, against a faulty teacher in another process."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from nautile.data.distill.run import DOCUMENTS, REJECTED
from tests.support.processes import distilling_process
from tests.support.samples.replies import reply_rows
from tests.support.servers.fake_openai import own_process

ROOT = str(Path(__file__).parents[3])
PROMPTS = 120
FAULTS = {"429": 0.05, "500": 0.02, "cut": 0.01, "invalid": 0.01}


def started(url, folder):
    command = [sys.executable, distilling_process.__file__, url, str(folder), str(PROMPTS)]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": ROOT})


def files(folder):
    """The files of the output, without those that a kill cut short, which publication removes."""
    return {path.name: path.read_bytes() for path in sorted((folder / "out").glob("[!.]*"))}


def killed_at(server, url, folder, answered):
    with started(url, folder) as process:
        while server.counts()["answered"] < answered:
            assert process.poll() is None, "it must not end before it is killed"
            time.sleep(0.02)
        process.kill()


@pytest.mark.slow
@pytest.mark.heavy
def test_killed_twice_every_prompt_ends_once_and_the_files_are_those_of_an_undisturbed_run(tmp_path):
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    distilling_process.write_index(stopped)
    distilling_process.write_index(whole)
    with own_process(faults=FAULTS, per_million=distilling_process.PRICES, delay_s=0.2) as server:
        for answered in (PROMPTS // 4, PROMPTS // 2):
            killed_at(server, server.url, stopped, answered)
        distilling_process.distil(server.url, stopped, PROMPTS)
        counts = server.counts()
    with own_process(per_million=distilling_process.PRICES) as server:
        distilling_process.distil(server.url, whole, PROMPTS)
    assert files(stopped) == files(whole), "faults and kills do not change what is written"
    rows = [
        json.loads(line)
        for pattern in (DOCUMENTS, REJECTED)
        for path in (stopped / "out").glob(pattern)
        for line in path.read_text().splitlines()
    ]
    assert set(Counter(row["provenance"]["prompt"] for row in rows).values()) == {1}
    assert len(rows) == PROMPTS
    counted = json.loads((stopped / "counts.json").read_text())
    assert counted["prompts"] == counted["accepted"] + sum(counted["rejected"].values()) == PROMPTS
    kept = [row["digest"] for row in reply_rows(stopped / "replies")]
    assert len(kept) == len(set(kept)) == counts["prompts"] == PROMPTS
    assert counts["most_for_a_prompt"] <= 3, "only requests in flight when the process was killed are sent again"
