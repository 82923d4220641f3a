"""Training sets of the Hub: read from their training splits, asked and graded as the benchmarks of their names."""

import re

import pytest

from nautile.common.errors import ConfigError
from nautile.configs.training import ProblemsConfig, ProblemSource, WeightedSource
from nautile.data.chat_template import ParsedReply
from nautile.evals.benchmarks.catalogue import items_of
from nautile.evals.benchmarks.registry import BENCHMARKS
from nautile.rl.problems import TRAINING_SETS, ProblemScreen, load, training_problems
from nautile.rl.rewards import verifiable
from tests.evals.conftest import records


@pytest.fixture
def hub(monkeypatch):
    """The Hub with 200 records a split; what is read from it, as (repository, subset, split, commit)."""
    asked = []

    def read(benchmark, revision):
        asked.append((benchmark.hub, benchmark.subset, benchmark.split, revision))
        if benchmark.name != "math":
            return iter(records(benchmark.name, 200))
        answers = (r"\boxed{x} or rather \boxed{\frac{%d}{7}}", r"$\boxed{%d}$")
        return iter(
            {"problem": f"Find it in {benchmark.subset}, {n}.", "level": "Level 5", "type": "Algebra",
             "solution": f"Then it is {answers[n % 2] % (n + 1)}."} for n in range(40)
        )  # fmt: skip

    monkeypatch.setattr("nautile.rl.problems.read_hub", read)
    return asked


@pytest.mark.parametrize("name", TRAINING_SETS)
def test_problems_are_of_the_training_split_and_graded_as_the_benchmark(hub, name):
    problems = load(ProblemsConfig(source=name, count=100), 0)
    assert {split for _, _, split, _ in hub} == {"train"}
    assert all(re.fullmatch(r"[0-9a-f]{40}", revision) for *_, revision in hub)
    assert {problem.kind for problem in problems} == {BENCHMARKS["math_500" if name == "math" else name].kind}
    for problem in problems[:8]:
        right = f"\\boxed{{{problem.answer}}}" if name == "math" else problem.answer
        assert verifiable(problem, ParsedReply("", right, True, True)) == 1.0
        assert verifiable(problem, ParsedReply("", "no idea", True, True)) == 0.0
    guard = load(ProblemsConfig(source=name, count=2), 0, "guard")
    assert not {problem.question for problem in guard} & {problem.question for problem in problems}


@pytest.mark.parametrize("name", ["arc_easy", "commonsense_qa", "openbookqa", "gsm8k"])
def test_the_prompt_is_the_benchmarks(hub, name):
    prompts = {item.prompt for item in items_of(BENCHMARKS[name], records(name, 200), 0)}
    assert {problem.question for problem in load(ProblemsConfig(source=name, count=30), 0)} < prompts


def test_expressions_are_asked_for_in_a_box_and_mix_the_subjects(hub):
    problems = load(ProblemsConfig(source="math", count=30), 0)
    assert len({problem.question.split()[3] for problem in problems}) >= 5
    assert len(hub) == 7
    assert all(problem.question.endswith("Give the final answer once, in \\boxed{}.") for problem in problems)
    assert r"\frac{1}{7}" in {p.answer for p in training_problems(ProblemSource(source="math"), 0, "train")}


def test_gsm8ks_worked_text_is_the_rationale_and_a_record_without_a_number_is_refused(monkeypatch):
    rows = [{"question": " How many? ", "answer": "2 + 2 = <<2+2=4>>4\n#### 1,004"}]
    monkeypatch.setattr("nautile.rl.problems.read_hub", lambda benchmark, revision: iter(rows))
    (problem,) = training_problems(ProblemSource(source="gsm8k"), 0, "train")
    assert (problem.question, problem.answer, problem.rationale) == ("How many?", "1004", "2 + 2 = <<2+2=4>>4")
    rows.append({"question": "?", "answer": "5"})
    with pytest.raises(ConfigError, match=r"gsm8k: record 1 of openai/gsm8k train: .*`#### <number>`"):
        training_problems(ProblemSource(source="gsm8k"), 0, "train")


def test_prompts_that_are_too_long_are_left_out_and_counted(hub):
    screen = ProblemScreen(None)
    sources = (WeightedSource(source="openbookqa"), WeightedSource(source="math", weight=2.0))
    problems = load(
        ProblemsConfig(count=60, sources=sources), 0, screen=screen, fits=lambda prompt: "geometry" not in prompt
    )
    assert not any("geometry" in problem.question for problem in problems)
    choices, expressions = screen.facts()["problem_sources"]
    assert (choices["source"], choices["problems"], choices["left_out"]["overlap a benchmark"]) == ("openbookqa", 20, 0)
    assert expressions["left_out"]["are longer than rollout.prompt_length"] > 0


def test_another_commit_must_be_a_whole_one(hub):
    with pytest.raises(ConfigError, match=r"problems.revision: 'main' is not a full commit hash of allenai/ai2_arc"):
        load(ProblemsConfig(source="arc_easy", revision="main"), 0)
    load(ProblemsConfig(source="arc_easy", revision="a" * 40, count=5), 0)
    assert hub[-1][-1] == "a" * 40
