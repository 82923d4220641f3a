import itertools

import pytest

from configs.schema import ProblemsConfig
from configs.section import ConfigError
from data.reasoning import problems, split_of
from rl.problems import Order, gsm8k_problem, load
from tests.rl.conftest import SUMS


def test_splits_never_share_a_question():
    found = {
        split: {p.question for seed in (0, 1) for p in itertools.islice(problems(SUMS, seed, split), 40)}
        for split in ("train", "guard", "held_out")
    }
    assert not found["train"] & found["held_out"]
    assert not found["train"] & found["guard"]
    assert not found["guard"] & found["held_out"]
    assert all(split_of(question) == split for split, questions in found.items() for question in questions)


def test_load_is_fixed_by_config_and_seed_and_says_when_there_are_too_few():
    config = ProblemsConfig(tasks=SUMS, count=20)
    assert load(config, 3) == load(config, 3)
    with pytest.raises(ConfigError, match=r"distinct held_out problems, not 500"):
        load(ProblemsConfig(tasks=SUMS, count=500), 0, "held_out")
    with pytest.raises(ConfigError, match="at least one task"):
        load(ProblemsConfig(count=3), 0)


def test_order_visits_everything_once_an_epoch_and_can_be_entered_anywhere():
    order = Order(7, seed=5)
    first, second = [order[i] for i in range(7)], [order[i] for i in range(7, 14)]
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second
    assert Order(7, seed=5)[9] == second[2]


def test_gsm8k_record():
    row = {"question": " How many? ", "answer": "2 + 2 = <<2+2=4>>4\n#### 1,004"}
    problem = gsm8k_problem(3, row)
    assert (problem.question, problem.answer, problem.index) == ("How many?", "1004", 3)
    with pytest.raises(ConfigError, match="record 4 has no '####'"):
        gsm8k_problem(4, {"question": "?", "answer": "5"})
