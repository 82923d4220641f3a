"""reasoning-gym's generators: only those that are used are imported, and they draw as the whole package does."""

import ast
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import pytest

from nautile.common.errors import ConfigError
from nautile.configs.base import TaskConfig
from nautile.data.sources.reasoning_gym import (
    EVALUATED,
    REFUSED,
    UNREPEATABLE,
    _dataset,
    _factory,
    _modules,
    _root,
    own_score,
    problem_split,
    problems,
)

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


PLAIN = ("sudoku", "knights_knaves", "pool_matrix", "maze", "simple_equations", "chain_sum")


@pytest.mark.parametrize("name", PLAIN)
def test_an_environment_is_drawn_again_alike_and_scored_as_the_package_does(name):
    draw = partial(problems, [TaskConfig(name=name)], split="reinforce", worked=False)
    first, other = (list(islice(draw(seed=seed), 3)) for seed in (3, 4))
    assert first == list(islice(draw(seed=3), 3)) != other
    for problem in first:
        assert problem_split(problem.question) == "reinforce"
        assert own_score(problem, problem.answer) == 1.0
        (seed, _), factory = json.loads(problem.origin), _factory(name)
        entry = _dataset(name, seed, ())[problem.index]
        for answer in (problem.answer, f"It is {problem.answer}.", "wrong", "", None):
            assert own_score(problem, answer) == factory.get_score_answer_fn(name)(answer, entry)
    assert own_score(replace(first[0], origin=""), first[0].answer) is None


# Scorers that evaluate what the generator itself has made, and no answer.
OF_ITS_OWN = {"bitwise_arithmetic", "number_sorting"}


def test_every_scorer_that_evaluates_an_answer_is_known():
    """Of a new version of the package too: `eval`, and what SymPy reads by it, in the method that scores."""
    evaluating = set()
    for name, module in _modules().items():
        source = (_root() / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        scorers = [
            ast.unparse(node)
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef) and "score" in node.name
        ]
        if any(re.search(r"(?<!literal_)\b(eval|exec|parse_expr|sympify|Poly|S)\(", scorer) for scorer in scorers):
            evaluating.add(name)
    assert evaluating - OF_ITS_OWN == {name for name, why in REFUSED.items() if why == EVALUATED}


DRAWN_ELSEWHERE = """
import json
from nautile.common.errors import ConfigError
from nautile.data.sources.reasoning_gym import REFUSED, UNREPEATABLE, _dataset, _modules
drawn = {}
for name in sorted(_modules()):
    if name in ("acre", "futoshiki") or REFUSED.get(name, UNREPEATABLE) != UNREPEATABLE:  # those take long
        continue
    try:
        entries = [_dataset(name, 7, ())[index] for index in range(0, 60, 5)]
        drawn[name] = [[entry["question"], str(entry["answer"])] for entry in entries]
    except (ConfigError, ModuleNotFoundError):  # a package that is not installed
        pass
print("\\n" + json.dumps(drawn))
"""


@pytest.mark.heavy
def test_a_task_draws_the_same_problems_in_every_process_or_is_refused():
    drawn = []
    for seed in ("1", "77"):
        command = [sys.executable, "-W", "ignore", "-c", DRAWN_ELSEWHERE]
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=environment)
        drawn.append(json.loads(done.stdout.splitlines()[-1]))
    assert len(drawn[0]) > 80
    other = {name for name, entries in drawn[0].items() if drawn[1][name] != entries}
    refused = {name for name, why in REFUSED.items() if why == UNREPEATABLE}
    assert other <= refused
    assert len(other) >= len(refused) - 2  # two of them differ at times


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("word_ladder", "draws other problems in every process"),
        ("countdown", "evaluates an answer as Python code"),
        ("sudokus", "no task 'sudokus' (did you mean 'sudoku'?)"),
        ("composite", "no task 'composite'"),
    ],
)
def test_a_task_that_cannot_be_used_is_refused_by_name(name, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        next(problems([TaskConfig(name=name)], 3, "reinforce", worked=False))
    with pytest.raises(ConfigError, match="with a worked rationale"):
        next(problems([TaskConfig(name=name)], 3, "train"))
