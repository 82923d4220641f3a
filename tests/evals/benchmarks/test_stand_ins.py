import re

import pytest

from nautile.common.errors import ConfigError
from nautile.configs.base import TaskConfig
from nautile.configs.evaluation import BenchmarkChoice
from nautile.configs.training import ProblemsConfig
from nautile.data.sources.reasoning_gym import problem_split
from nautile.evals.benchmarks.loading import items_for
from nautile.evals.benchmarks.registry import BENCHMARKS
from nautile.evals.benchmarks.stand_ins import STAND_INS, held_out
from nautile.evals.graders.instructions import check_known
from nautile.evals.running.runner import evaluate, likelihood_row
from nautile.evals.scoring.scores import score

GENERATED = [entry.name for entry in STAND_INS if entry.build]
TASKS = (TaskConfig(name="chain_sum"), TaskConfig(name="spell_backward"), TaskConfig(name="gcd"))


@pytest.mark.slow
@pytest.mark.parametrize("name", GENERATED)
def test_items_are_distinct_repeatable_and_shaped_like_their_benchmark(name):
    items, again, other = (BENCHMARKS[name].build(seed, 24) for seed in (1, 1, 2))
    assert items == again
    assert {item.prompt for item in items} != {item.prompt for item in other}
    assert len({item.prompt for item in items}) == len(items) == 24
    assert [item.index for item in items] == list(range(24))
    assert {item.kind for item in items} == {BENCHMARKS[BENCHMARKS[name].like].kind}


@pytest.mark.parametrize("name", [name for name in GENERATED if name != "instructions"])
def test_an_oracle_scores_everything_and_silence_nothing(model, oracle, tmp_path, name):
    items = items_for(BenchmarkChoice(name=name, items=24), 0)[name]
    result = score(name, evaluate(model(items, oracle), items, tmp_path / "right.jsonl"))
    silent = score(name, evaluate(model(items, lambda item: ""), items, tmp_path / "silent.jsonl"))
    assert (result["accuracy"], silent["accuracy"], silent["no_answer"]) == (1.0, 0.0, 24)
    assert result["stand_in"].startswith("stands in for")
    assert result["paper"] is None


def test_word_problems_are_held_out():
    assert all(problem_split(item.prompt) == "held_out" for item in BENCHMARKS["gsm_symbolic"].build(0, 12))


def test_a_choice_does_not_give_itself_away():
    for item in BENCHMARKS["wiki_choice"].build(0, 200):
        question = item.prompt.partition("\n")[0].casefold()
        right = item.options[item.letters.index(item.expected)]
        assert not [word for word in re.findall(r"\w+", right.casefold()) if len(word) > 3 and word in question.split()]
        assert len(set(item.options)) == 4


def test_a_blank_hides_the_title():
    for item in BENCHMARKS["wiki_trivia"].build(0, 200):
        assert "___" in item.prompt
        assert not re.search(rf"\b{re.escape(item.expected)}\b", item.prompt, re.IGNORECASE)
        # Options are for the likelihood alone: the generated answer is not chosen among them.
        assert len(set(item.options)) == 4
        assert item.options[item.letters.index(item.right_letter)] == item.expected
        assert item.chance == 0
        assert likelihood_row(item, "model", None)["chance"] == 0.25


def test_instructions_are_ifevals_and_can_be_kept_together():
    for item in BENCHMARKS["instructions"].build(0, 100):
        check_known(item.instructions, item.arguments, item.id)
        assert len(set(item.instructions)) == len(item.instructions) in (1, 2)


def test_held_out_problems_carry_a_second_opinion(model, tmp_path):
    items = held_out(ProblemsConfig(tasks=TASKS, count=30), 0)
    assert {item.category for item in items} == {task.name for task in TASKS}
    assert all(problem_split(item.prompt) == "held_out" for item in items)
    rows = evaluate(model(items, lambda item: item.expected if item.index % 2 else "0"), items, tmp_path / "rows.jsonl")
    result = score("held_out", rows)
    assert result["own_scorer"] == {"n": 30, "agree": 30, "only_ours": 0, "only_own": 0}
    assert result["correct"] == 15
    assert sum(category["n"] for category in result["categories"].values()) == 30


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ProblemsConfig(source="gsm8k"), "held_out.source is 'gsm8k'"),
        (ProblemsConfig(source="jsonl", path="problems.jsonl"), "held_out.source is 'jsonl'"),
        (ProblemsConfig(), "held_out.tasks is empty"),
        (ProblemsConfig(tasks=(TaskConfig(name="chess"),)), "no task 'chess'"),
    ],
)
def test_held_out_problems_that_cannot_be_had_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        held_out(config, 0)


def test_a_stand_in_takes_no_revision():
    with pytest.raises(ConfigError, match="takes neither `revision` nor `path`"):
        items_for(BenchmarkChoice(name="wiki_choice", path="x.jsonl"), 0)
