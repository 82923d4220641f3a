"""Problems of each source: fixed by config and seed, in one split only, screened against the benchmarks."""

import json
from collections import Counter

import pytest

from nautile.common.errors import ConfigError
from nautile.configs.base import TaskConfig
from nautile.configs.training import ProblemsConfig, WeightedSource
from nautile.data.screening.contamination import ContaminationIndex, HeldOutQuestion
from nautile.data.sources.reasoning_gym import problem_split, problems
from nautile.evals.benchmarks.catalogue import items_of
from nautile.evals.benchmarks.registry import BENCHMARKS
from nautile.rl.problems import ProblemOrder, ProblemScreen, load, load_guard
from tests.rl.conftest import SUMS, policy


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


@pytest.mark.parametrize("split", ["train", "guard"])
def test_gsm8k_is_asked_in_training_and_guard_as_in_the_benchmark(monkeypatch, split):
    rows = [{"question": f"What {{is}} {n} + 1?", "answer": f"We add.\n#### {n + 1}"} for n in range(99)]
    monkeypatch.setattr("nautile.rl.problems.read_hub", lambda benchmark, revision: iter(rows))
    held = ContaminationIndex([])
    asked = {item.prompt for item in items_of(BENCHMARKS["gsm8k"], rows, 0)}
    problems_ = load(ProblemsConfig(source="gsm8k", count=3), 0, split, ProblemScreen(held))
    assert {problem.question for problem in problems_} < asked
    bare = [rows[problem.index]["question"] for problem in problems_]
    assert {problem_split(question) == "guard" for question in bare} == {split == "guard"}


@pytest.mark.slow
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
    few = [
        HeldOutQuestion("sums", str(n), problem.question) for n, problem in enumerate(problems(SUMS, 0, "reinforce"))
    ]
    with pytest.raises(ConfigError, match=r"has 0 distinct train problems \(\d+ more overlap a benchmark\), not 3"):
        load(config, 0, screen=ProblemScreen(ContaminationIndex(few, common=10**6)))


@pytest.fixture
def problem_file(tmp_path):
    """A file of sixty fractions; every third row has no answer."""
    path = tmp_path / "problems.jsonl"
    text = (
        "Four children share {} cakes that were left over after a party: how many of these cakes does each child get?"
    )
    rows = [{"question": text.format(n), "answer": f"{n}/4" if n % 3 else None} for n in range(60)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def test_problems_without_an_answer_are_refused_kept_or_skipped(problem_file):
    config = ProblemsConfig(source="jsonl", path=str(problem_file), count=30)
    with pytest.raises(ConfigError, match=r"problems\.jsonl:1: no `answer`: this stage rewards right answers"):
        load(config, 0)
    kept = load(config, 0, unanswered="keep")
    assert {problem.answer == "" for problem in kept} == {True, False}
    screen = ProblemScreen(None)
    skipped = load(config, 0, screen=screen, unanswered="skip")
    assert all(problem.answer for problem in skipped)
    (facts,) = screen.facts()["problem_sources"]
    assert facts["left_out"]["have no answer"] > 5
    assert (facts["source"], facts["problems"], facts["without_answer"]) == (str(problem_file), 30, 0)
    with pytest.raises(ConfigError, match=r"has \d+ distinct guard problems.*, not 128"):
        load_guard(config, policy(guard_every=1, guard_problems=128))
    problem_file.write_text('{"question": "Say hello."}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"policy\.guard_every: `problems` has no guard problem with an answer"):
        load_guard(config, policy(guard_every=1))


def test_a_file_that_is_not_there_or_is_too_small(tmp_path, problem_file):
    with pytest.raises(ConfigError, match=r"problems\.path: .*none\.jsonl: cannot be read"):
        load(ProblemsConfig(source="jsonl", path=str(tmp_path / "none.jsonl")), 0)
    with pytest.raises(ConfigError, match=r"problems\.path: source 'jsonl' needs the file"):
        load(ProblemsConfig(source="jsonl"), 0)
    with pytest.raises(ConfigError, match=r"'jsonl' has \d+ distinct train problems, not 1000"):
        load(ProblemsConfig(source="jsonl", path=str(problem_file), count=1000), 0, unanswered="keep")


def test_several_sources_give_their_shares_evenly_mixed_and_screened(problem_file):
    sums = WeightedSource(tasks=SUMS, weight=3.0)
    config = ProblemsConfig(count=41, sources=(sums, WeightedSource(source="jsonl", path=str(problem_file))))
    problems_ = load(config, 0, unanswered="skip")
    assert problems_ == load(config, 0, unanswered="skip")
    assert Counter(problem.task for problem in problems_) == {"chain_sum": 31, "file": 10}
    assert {Counter(p.task for p in problems_[n : n + 8])["file"] for n in range(0, 40, 8)} <= {1, 2, 3}
    alone = {problem.question for problem in load(ProblemsConfig(tasks=SUMS, count=31), 0)}
    assert {problem.question for problem in problems_ if problem.task == "chain_sum"} == alone

    file_problem = next(problem for problem in problems_ if problem.task == "file")
    held = [HeldOutQuestion("mine", "1", file_problem.question, whole=True)]
    screen = ProblemScreen(ContaminationIndex(held))
    screened = load(config, 0, screen=screen, unanswered="skip")
    assert not {problem.question for problem in screened} & {entry.text for entry in held}
    assert screen.facts()["contaminated"] == {"mine": 1}
    counts = [(facts["source"], facts["split"], facts["problems"]) for facts in screen.facts()["problem_sources"]]
    assert counts == [("reasoning", "train", 31), (str(problem_file), "train", 10)]


def test_a_share_that_cannot_be_met_is_refused(problem_file):
    file = WeightedSource(source="jsonl", path=str(problem_file))
    config = ProblemsConfig(count=200, sources=(file, WeightedSource(tasks=SUMS)))
    with pytest.raises(ConfigError, match=r"problems\.sources\[0\]: 'jsonl' has \d+ .*, not 100; lower `count` or"):
        load(config, 0, unanswered="keep")
    with pytest.raises(ConfigError, match=r"problems\.sources\[1\]: its weight is too small"):
        load(ProblemsConfig(count=10, sources=(WeightedSource(tasks=SUMS, weight=99.0), file)), 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"source": "gsm8k", "sources": [{"source": "math"}]}, "`source` and `sources` are both set"),
        ({"path": "x", "sources": [{"source": "math"}]}, "`path` and `sources` are both set"),
        ({"sources": [{"source": "math", "weight": 0}]}, "greater than 0"),
    ],
)
def test_a_section_has_one_form(fields, message):
    with pytest.raises(ValueError, match=message):
        ProblemsConfig.model_validate(fields)


def test_a_section_with_sources_survives_being_written_out():
    config = ProblemsConfig.model_validate({"count": 9, "sources": [{"source": "math"}, {"source": "gsm8k"}]})
    assert ProblemsConfig.model_validate(config.model_dump(mode="json")) == config
    assert ProblemsConfig.model_validate({"source": "gsm8k", "sources": []}).sources is None
