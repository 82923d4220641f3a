"""EleutherAI's lm-eval against `nautile serve`: the same scores as our own runner, option by option."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nautile.configs.load import load
from nautile.evals.benchmarks.stand_ins import wiki_choice
from nautile.evals.running.runner import PROMPT, CheckpointScorer
from tests.support.processes.serving import CONTEXT, NAME
from tests.support.stages.toy_cli import ROOT, environment

HARNESS = Path(os.environ.get("HARNESS_FOLDER", Path(sys.prefix) / "harness"))
ITEMS = 24

pytestmark = [pytest.mark.slow, pytest.mark.heavy]


def fits(item) -> bool:
    """A token of this tokenizer is a byte; lm-eval keeps one position free, and requests one token more."""
    longest = max(len(option.encode()) for option in item.options)
    return len(PROMPT.format(question=item.question).encode()) + 1 + longest < CONTEXT - 1


@pytest.fixture(scope="module")
def items():
    return [item for item in wiki_choice(0, 500) if fits(item)][:ITEMS]


@pytest.fixture(scope="module")
def lm_eval_results(items, server, tmp_path_factory):
    """The results of lm-eval, in a process of its own without network."""
    folder = tmp_path_factory.mktemp("lm_eval")
    rows = [
        {"question": item.question, "options": list(item.options), "gold": item.letters.index(item.expected)}
        for item in items
    ]
    (folder / "items.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    offline = {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    path = os.pathsep.join((str(ROOT), str(HARNESS)))
    command = [sys.executable, "-m", "tests.support.processes.harness_run", server.root, NAME, str(CONTEXT)]
    done = subprocess.run(
        [*command, folder / "items.jsonl"],
        env=environment(folder / "store", **offline) | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_lm_eval_and_our_runner_agree_on_every_item(items, checkpoint, lm_eval_results):
    ours = CheckpointScorer(checkpoint, load("local").evaluate).weigh(items)
    assert len(items) == len(lm_eval_results["rows"]) == ITEMS
    for item, weighed, row in zip(items, ours, lm_eval_results["rows"], strict=True):
        np.testing.assert_allclose(row["logprobs"], weighed.logprobs, atol=1e-3)
        assert row["acc_bytes"] == (item.letters[weighed.by_bytes] == item.expected)
        assert row["acc"] == (item.letters[weighed.by_sum] == item.expected)
    right = [item.letters[weighed.by_bytes] == item.expected for item, weighed in zip(items, ours, strict=True)]
    assert lm_eval_results["acc_bytes"] == pytest.approx(np.mean(right))
    assert 0 < sum(right) < ITEMS  # a score of all or none would prove little
    assert not any(any(row["greedy"]) for row in lm_eval_results["rows"])
