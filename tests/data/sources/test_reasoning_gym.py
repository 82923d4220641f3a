"""reasoning-gym's generators: only those that are used are imported, and they draw as the whole package does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nautile.configs.base import TaskConfig
from nautile.data.sources.reasoning_gym import problems

ROOT = Path(__file__).parents[3]
NAMES = ("chain_sum", "products", "leg_counting", "spell_backward", "gcd", "gsm_symbolic")
DRAW = f"""
import itertools, json, sys, types
sys.modules |= {{{{name: types.ModuleType(name) for name in ("cellpylib", "pycosat", "zss")}}}}
import {{first}}
from nautile.configs.base import TaskConfig
from nautile.data.sources.reasoning_gym import is_correct, problems

tasks = [TaskConfig(name=name) for name in {NAMES!r}]
drawn = list(itertools.islice(problems(tasks, 5, "train"), 60))
whole = "reasoning_gym" in sys.modules or "sympy" in sys.modules
import reasoning_gym  # also after its generators it loads, with all others

reasoning_gym.create_dataset("chain_sum", size=1, seed=1), reasoning_gym.create_dataset("sudoku", size=1, seed=1)
print(json.dumps([whole, all(is_correct(p, p.answer) for p in drawn), [[p.question, p.answer] for p in drawn]]))
"""


@pytest.fixture(scope="module")
def drawn():
    """What a process draws that has imported the whole package before, and one that has not."""
    outputs = {}
    for first in ("reasoning_gym", "json"):
        command = [sys.executable, "-W", "ignore", "-c", DRAW.format(first=first)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        outputs[first] = json.loads(done.stdout)
    return outputs


@pytest.mark.slow
def test_a_process_imports_the_generators_that_are_used_and_no_others(drawn):
    assert drawn["reasoning_gym"][:2] == [True, True]
    assert drawn["json"][:2] == [False, True]


@pytest.mark.slow
def test_problems_are_those_of_the_whole_package(drawn):
    assert drawn["json"][2] == drawn["reasoning_gym"][2]
    assert len(drawn["json"][2]) == 60


@pytest.mark.parametrize("name", NAMES)
def test_each_task_is_drawn_again_alike(name):
    first, second = (next(problems([TaskConfig(name=name)], 3, "train")) for _ in range(2))
    assert first == second
    assert first.task == name
    assert first.rationale
