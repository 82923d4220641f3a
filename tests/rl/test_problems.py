"""Problems of each source: fixed by config and seed, in one split only, screened against the benchmarks."""

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
from data.chat_template import ParsedReply
from data.screening.contamination import ContaminationIndex, HeldOutQuestion
from data.sources.reasoning_gym import problem_split, problems
from evals.benchmarks.catalogue import BENCHMARKS, items_of
from rl.problems import ProblemOrder, ProblemScreen, from_file, gsm8k_problem, load
from rl.rewards import verifiable
from tests.rl.conftest import SUMS
from tests.support.fake_hub import FakeHub

REVISION = "0123456789" * 4
# The client reads HF_ENDPOINT when it is imported, so the reading has a process of its own.
CHILD = """
import json, sys
from configs.training import ProblemsConfig
from common.errors import ConfigError
from rl.problems import load
results = []
for revision in sys.argv[1:]:
    try:
        found = load(ProblemsConfig(source="gsm8k", count=5, revision=revision), 0)
        results.append([problem.answer for problem in found])
    except ConfigError as error:
        results.append(str(error))
print(json.dumps(results))
"""


@pytest.mark.slow
def test_splits_never_share_a_question():
    by_name = {
        split: {p.question for seed in (0, 1) for p in itertools.islice(problems(SUMS, seed, split), 40)}
        for split in ("train", "guard", "held_out")
    }
    assert not by_name["train"] & by_name["held_out"]
    assert not by_name["train"] & by_name["guard"]
    assert not by_name["guard"] & by_name["held_out"]
    assert all(problem_split(question) == split for split, questions in by_name.items() for question in questions)


@pytest.mark.slow
def test_load_depends_on_config_and_seed_alone_and_refuses_too_few():
    config = ProblemsConfig(tasks=SUMS, count=20)
    assert load(config, 3) == load(config, 3)
    with pytest.raises(ConfigError, match=r"distinct held_out problems, not 500"):
        load(ProblemsConfig(tasks=SUMS, count=500), 0, "held_out")
    with pytest.raises(ConfigError, match="at least one task"):
        load(ProblemsConfig(count=3), 0)


def test_the_order_visits_everything_once_an_epoch_and_starts_anywhere():
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


@pytest.mark.parametrize("split", ["train", "guard"])
def test_gsm8k_is_asked_in_training_and_guard_as_in_the_benchmark(monkeypatch, split):
    rows = [{"question": f"What {{is}} {n} + 1?", "answer": f"We add.\n#### {n + 1}"} for n in range(99)]
    monkeypatch.setattr("rl.problems.read_hub", lambda benchmark, revision: iter(rows))
    held = ContaminationIndex([])
    asked = {item.prompt for item in items_of(BENCHMARKS["gsm8k"], rows, 0)}
    problems_ = load(ProblemsConfig(source="gsm8k", count=3), 0, split, ProblemScreen(held))
    assert {problem.question for problem in problems_} < asked
    bare = [rows[problem.index]["question"] for problem in problems_]
    assert {problem_split(question) == "guard" for question in bare} == {split == "guard"}


def test_problems_that_overlap_a_benchmark_are_left_out_and_listed():
    config = ProblemsConfig(tasks=(TaskConfig(name="gsm_symbolic"),), count=20)
    clean = load(config, 3)
    held = ContaminationIndex(
        [HeldOutQuestion("gsm8k", "17", clean[2].question), HeldOutQuestion("arc", "3", clean[7].question)]
    )
    screen = ProblemScreen(held)
    result = load(config, 3, screen=screen)
    assert len(result) == 20
    assert not {clean[2].question, clean[7].question} & {problem.question for problem in result}
    facts = screen.facts()
    assert facts["contaminated"].keys() == {"arc", "gsm8k"}
    assert {hit["example"] for hit in facts["hits"]} == {"17", "3"}
    assert all(held.hits(problem.question) == [] for problem in result)
    assert load(config, 3, screen=ProblemScreen(None)) == clean
    assert ProblemScreen(None).facts() == {}


def test_problems_of_a_benchmarks_own_generator_are_compared_by_the_whole_question():
    config = ProblemsConfig(tasks=(TaskConfig(name="leg_counting"),), count=12)
    asked = load(config, 3, "held_out")
    held = [HeldOutQuestion("legs", str(problem.index), problem.question, whole=True) for problem in asked]
    screen = ProblemScreen(ContaminationIndex(held))
    assert load(config, 3, screen=screen) == load(config, 3)
    assert screen.facts()["contaminated"] == {}


def test_too_few_problems_after_screening_is_an_error():
    config = ProblemsConfig(tasks=SUMS, count=3)
    held = ContaminationIndex(
        [HeldOutQuestion("sums", str(n), problem.question) for n, problem in enumerate(load(config, 0))]
    )
    everything = ProblemScreen(held)
    assert not any(p.question in {q.question for q in load(config, 0)} for p in load(config, 0, screen=everything))
    few = [HeldOutQuestion("sums", str(n), problem.question) for n, problem in enumerate(problems(SUMS, 0, "train"))]
    with pytest.raises(ConfigError, match=r"has 0 distinct train problems \(\d+ more overlap a benchmark\), not 3"):
        load(config, 0, screen=ProblemScreen(ContaminationIndex(few, common=10**6)))


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
    result, branch, other = json.loads(done.stdout)
    expected = [str(2 * n) for n, row in enumerate(rows) if problem_split(row["question"]) != "guard"]
    assert result == expected[:5]
    message = "problems.revision: 'main' is not a full commit hash of openai/gsm8k; leave it out to read e53f"
    assert branch.startswith(message)
    assert other.startswith("gsm8k: openai/gsm8k main train at ffffffffffff: only another commit")


def from_path(path, **changes):
    return ProblemsConfig(source="jsonl", path=str(path), **changes)


@pytest.fixture
def problem_file(tmp_path):
    path = tmp_path / "problems.jsonl"
    rows = [{"question": f"What is {n} / 4?", "answer": f"{n}/4"} for n in range(60)]
    path.write_text("\n".join(map(json.dumps, [*rows, rows[0]])) + "\n\n", encoding="utf-8")
    return path


def test_every_question_is_in_one_split_once(problem_file):
    splits = {split: list(from_file(from_path(problem_file), 0, split)) for split in ("train", "guard", "held_out")}
    questions = [p.question for drawn in splits.values() for p in drawn]
    assert sorted(questions) == sorted({f"What is {n} / 4?" for n in range(60)})
    assert all(problem_split(p.question) == split for split, drawn in splits.items() for p in drawn)


def test_answers_count_by_the_graders_of_the_evaluation(problem_file):
    problem = next(p for p in from_file(from_path(problem_file), 0, "train") if p.answer == "14/4")
    assert verifiable(problem, ParsedReply("", "14/4", True, True)) == 1.0
    assert verifiable(problem, ParsedReply("", "15/4", True, True)) == 0.0


def test_an_answer_may_be_a_number(tmp_path):
    path = tmp_path / "numbers.jsonl"
    rows = [{"question": f"{n} + 1?", "answer": n + 1, "task": "sums", "rationale": "so"} for n in range(9)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    problem = load(from_path(path, count=1), 0)[0]
    assert (problem.task, problem.rationale) == ("sums", "so")
    assert verifiable(problem, ParsedReply("", problem.answer, True, True)) == 1.0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "Q?"}', "no `answer`"),
        ('{"question": "Q?", "answer": " "}', "no `answer`"),
        ('{"answer": "1"}', "no `question`"),
        ('{"question": "Q?", "answer": ["1"]}', r"`answer` is \['1'\]"),
        ('{"question": 7, "answer": "1"}', "`question` is 7"),
        ('["Q?", "1"]', "not an object"),
        ('{"question": "Q?", ', "not a line of JSON"),
    ],
)
def test_a_line_at_fault_is_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"question": "1 + 1?", "answer": "2"}\n' + line, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"bad\.jsonl:2: .*{message}"):
        list(from_file(from_path(path), 0, "train"))


def test_a_file_that_is_not_there_or_is_too_small(tmp_path, problem_file):
    with pytest.raises(ConfigError, match=r"problems\.path: .*none\.jsonl cannot be read"):
        load(from_path(tmp_path / "none.jsonl"), 0)
    with pytest.raises(ConfigError, match=r"problems\.path: source 'jsonl' needs the file"):
        load(ProblemsConfig(source="jsonl"), 0)
    with pytest.raises(ConfigError, match=r"'jsonl' has \d+ distinct train problems, not 1000"):
        load(from_path(problem_file, count=1000), 0)
