import itertools
import json
import os
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest

from common.errors import ConfigError
from configs.base import TaskConfig
from configs.training import ProblemsConfig
from data.screening.contamination import ContaminationIndex, HeldOutQuestion
from data.sources.reasoning_gym import problem_split, problems
from rl.problems import ProblemOrder, Screen, gsm8k_problem, load
from tests.rl.conftest import SUMS
from tests.support.fake_hub import FakeHub

REVISION = "0123456789" * 4
# The client reads HF_ENDPOINT when it is imported, so the reading has a process of its own.
CHILD = """
import json, sys
from configs.training import ProblemsConfig
from common.errors import ConfigError
from rl.problems import load
told = []
for revision in sys.argv[1:]:
    try:
        found = load(ProblemsConfig(source="gsm8k", count=5, revision=revision), 0)
        told.append([problem.answer for problem in found])
    except ConfigError as error:
        told.append(str(error))
print(json.dumps(told))
"""


def test_splits_never_share_a_question():
    found = {
        split: {p.question for seed in (0, 1) for p in itertools.islice(problems(SUMS, seed, split), 40)}
        for split in ("train", "guard", "held_out")
    }
    assert not found["train"] & found["held_out"]
    assert not found["train"] & found["guard"]
    assert not found["guard"] & found["held_out"]
    assert all(problem_split(question) == split for split, questions in found.items() for question in questions)


def test_load_is_fixed_by_config_and_seed_and_says_when_there_are_too_few():
    config = ProblemsConfig(tasks=SUMS, count=20)
    assert load(config, 3) == load(config, 3)
    with pytest.raises(ConfigError, match=r"distinct held_out problems, not 500"):
        load(ProblemsConfig(tasks=SUMS, count=500), 0, "held_out")
    with pytest.raises(ConfigError, match="at least one task"):
        load(ProblemsConfig(count=3), 0)


def test_order_visits_everything_once_an_epoch_and_can_be_entered_anywhere():
    order = ProblemOrder(7, seed=5)
    first, second = [order[i] for i in range(7)], [order[i] for i in range(7, 14)]
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second
    assert ProblemOrder(7, seed=5)[9] == second[2]


def test_gsm8k_record():
    row = {"question": " How many? ", "answer": "2 + 2 = <<2+2=4>>4\n#### 1,004"}
    problem = gsm8k_problem(3, row)
    assert (problem.question, problem.answer, problem.index) == ("How many?", "1004", 3)
    with pytest.raises(ConfigError, match="record 4 has no '####'"):
        gsm8k_problem(4, {"question": "?", "answer": "5"})


def test_problems_that_overlap_a_benchmark_are_left_out_and_told():
    config = ProblemsConfig(tasks=(TaskConfig(name="gsm_symbolic"),), count=20)
    clean = load(config, 3)
    held = ContaminationIndex(
        [HeldOutQuestion("gsm8k", "17", clean[2].question), HeldOutQuestion("arc", "3", clean[7].question)]
    )
    screen = Screen(held)
    found = load(config, 3, screen=screen)
    assert len(found) == 20
    assert not {clean[2].question, clean[7].question} & {problem.question for problem in found}
    told = screen.facts()
    assert told["contaminated"].keys() == {"arc", "gsm8k"}
    assert {hit["example"] for hit in told["hits"]} == {"17", "3"}
    assert all(held.hits(problem.question) == [] for problem in found)
    assert load(config, 3, screen=Screen(None)) == clean
    assert Screen(None).facts() == {}


def test_problems_of_a_benchmarks_own_generator_are_told_apart_by_the_whole_question():
    config = ProblemsConfig(tasks=(TaskConfig(name="leg_counting"),), count=12)
    asked = load(config, 3, "held_out")
    held = [HeldOutQuestion("legs", str(problem.index), problem.question, whole=True) for problem in asked]
    screen = Screen(ContaminationIndex(held))
    assert load(config, 3, screen=screen) == load(config, 3)
    assert screen.facts()["contaminated"] == {}


def test_where_every_problem_overlaps_a_benchmark_it_is_said():
    config = ProblemsConfig(tasks=SUMS, count=3)
    held = ContaminationIndex(
        [HeldOutQuestion("sums", str(n), problem.question) for n, problem in enumerate(load(config, 0))]
    )
    everything = Screen(held)
    assert not any(p.question in {q.question for q in load(config, 0)} for p in load(config, 0, screen=everything))
    few = [HeldOutQuestion("sums", str(n), problem.question) for n, problem in enumerate(problems(SUMS, 0, "train"))]
    with pytest.raises(ConfigError, match=r"has 0 distinct train problems \(\d+ more overlap a benchmark\), not 3"):
        load(config, 0, screen=Screen(ContaminationIndex(few, common=10**6)))


@pytest.mark.slow
def test_gsm8k_is_read_at_its_pinned_commit_and_another_in_the_cache_is_refused(tmp_path):
    folder = tmp_path / "repository"
    (folder / "main").mkdir(parents=True)
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - {split: train, path: main/train.parquet}\n---\n"
    )
    rows = [{"question": f"What is {n} + {n}?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}"} for n in range(8)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "main" / "train.parquet")
    with FakeHub(folder, "openai/gsm8k", REVISION) as hub:
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
        command = [sys.executable, "-c", CHILD, REVISION, "main", "f" * 40]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found, branch, other = json.loads(done.stdout)
    expected = [str(2 * n) for n, row in enumerate(rows) if problem_split(row["question"]) != "guard"]
    assert found == expected[:5]
    assert branch.startswith("problems.revision: 'main' is no full commit hash of openai/gsm8k; without one it is e53f")
    assert other.startswith("gsm8k: openai/gsm8k main train at ffffffffffff: only another commit")
