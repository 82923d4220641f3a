"""EleutherAI's lm-eval against `nautile serve`: the same score as our own runner's, option by option, item by item."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from configs.load import load
from evals.benchmarks.stand_ins import wiki_choice
from evals.running.likelihood import PROMPT, CheckpointScorer
from tests.support.serving import CONTEXT, NAME, save_checkpoint, serving
from tests.support.toy_cli import ROOT, environment

HARNESS = Path(os.environ.get("HARNESS_FOLDER", Path(sys.prefix) / "harness"))
ITEMS = 24

pytestmark = [pytest.mark.slow, pytest.mark.heavy]


def fits(item) -> bool:
    """A token of this tokenizer is a byte; lm-eval keeps one place of the context free, and asks for one token more."""
    longest = max(len(option.encode()) for option in item.options)
    return len(PROMPT.format(question=item.question).encode()) + 1 + longest < CONTEXT - 1


@pytest.fixture(scope="module")
def items():
    return [item for item in wiki_choice(0, 500) if fits(item)][:ITEMS]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("harness") / "checkpoint")


@pytest.fixture(scope="module")
def theirs(items, checkpoint, tmp_path_factory):
    """What lm-eval finds, in a process of its own, with no network."""
    folder = tmp_path_factory.mktemp("lm_eval")
    rows = [
        {"question": item.question, "options": list(item.options), "gold": item.letters.index(item.expected)}
        for item in items
    ]
    (folder / "items.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    offline = {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    path = os.pathsep.join((str(ROOT), str(HARNESS)))
    with serving(checkpoint, folder / "store") as server:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.support.harness_run",
                server.root,
                NAME,
                str(CONTEXT),
                folder / "items.jsonl",
            ],
            env=environment(folder / "store", **offline) | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_lm_eval_and_our_runner_agree_on_every_item(items, checkpoint, theirs):
    ours = CheckpointScorer(checkpoint, load("local").evaluate).weigh(items)
    assert len(items) == len(theirs["rows"]) == ITEMS
    for item, weighed, row in zip(items, ours, theirs["rows"], strict=True):
        np.testing.assert_allclose(row["logprobs"], weighed.logprobs, atol=1e-3)
        assert row["acc_bytes"] == (item.letters[weighed.by_bytes] == item.expected)
        assert row["acc"] == (item.letters[weighed.by_sum] == item.expected)
    right = [item.letters[one.by_bytes] == item.expected for item, one in zip(items, ours, strict=True)]
    assert theirs["acc_bytes"] == pytest.approx(np.mean(right))
    assert 0 < sum(right) < ITEMS  # a score that all or none get would show little
    assert not any(any(row["greedy"]) for row in theirs["rows"])
