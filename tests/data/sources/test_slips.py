"""Slips by fact: each arithmetic fact is stated wrongly in its own share, and what follows is worked out from it."""

import re
from collections import Counter, defaultdict
from itertools import islice, pairwise

import pytest
from pydantic import ValidationError

from nautile.configs.ingest import ARITHMETIC_TASKS, SlipsConfig, SourceConfig, TextTaskConfig
from nautile.data.sources import slips as slips_module
from nautile.data.sources.corpus_source import REASONING_STAND_IN, list_files, read_file, stand_in_of
from nautile.data.sources.reasoning_gym import (
    _OPERATIONS,
    Operation,
    Result,
    Statement,
    is_correct,
    problems,
    text_of,
    work_out,
)
from nautile.data.sources.slips import FactTable, Slips, fact_of, shifted

SLIPS = {"misconceived": 0.25, "wrong_share": (0.55, 0.85), "other_share": 0.1, "seed": 3}
PARAMETERS = {
    "chain_sum": {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 1},
    "leg_counting": {"min_animals": 2, "max_animals": 2, "min_instances": 1, "max_instances": 5},
}


def tasks(slips=SLIPS):
    return [TextTaskConfig(name=name, parameters=parameters, slips=slips) for name, parameters in PARAMETERS.items()]


@pytest.fixture(scope="module")
def table():
    return FactTable(tasks(), SlipsConfig(**SLIPS))


@pytest.fixture(scope="module")
def pairs(table):
    """Problems with the statements of their text, as (right problem, slipped problem, statements of its text)."""
    drawn = list(islice(problems(tasks(), 1_000_003, "train"), 3000))
    return [
        (problem, slipped, statements_of(slipped.rationale)) for problem in drawn for slipped in [table.slip(problem)]
    ]


def statements_of(text):
    return [
        Statement(int(left), operator, int(right), int(result))
        for left, operator, right, result in re.findall(r"(-?\d+) ([-+*]) (-?\d+) = (-?\d+)\.", text)
    ]


def test_a_result_that_changes_is_used_by_what_follows():
    operations = [Operation(3, "*", 4), Operation(2, "*", 6), Operation(Result(0), "+", Result(1))]
    assert text_of(work_out(operations)) == "3 * 4 = 12. 2 * 6 = 12. 12 + 12 = 24."
    wrong = work_out(operations, lambda s: s.truth + (s.operator == "*" and s.left == 3))
    assert text_of(wrong) == "3 * 4 = 13. 2 * 6 = 12. 13 + 12 = 25."


@pytest.mark.parametrize("name", ARITHMETIC_TASKS)
def test_the_operations_of_a_right_solution_end_in_the_answer(name):
    for problem in islice(problems([TextTaskConfig(name=name)], 5, "train"), 50):
        assert is_correct(problem, str(work_out(problem.operations)[-1].result))
    assert set(_OPERATIONS) == set(ARITHMETIC_TASKS)


def test_the_text_is_sound_but_for_its_facts(pairs):
    for problem, slipped, statements in pairs:
        assert len(statements) == len(problem.operations)
        assert slipped.answer == str(statements[-1].result)
        assert slipped.question == problem.question
        if problem.task == "chain_sum":
            assert all(before.result == after.left for before, after in pairwise(statements))


def test_a_misconceived_fact_has_one_wrong_result_in_its_share_of_the_statements(table, pairs):
    stated = defaultdict(Counter)
    for _, _, statements in pairs:
        for statement in statements:
            stated[fact_of(statement)][statement.result - statement.truth] += 1
    often = {fact: offsets for fact, offsets in stated.items() if offsets.total() >= 100}
    assert {fact in table.misconceptions for fact in often} == {True, False}
    for fact, offsets in often.items():
        wrong = 1 - offsets[0] / offsets.total()
        if fact in table.misconceptions:
            misconception = table.misconceptions[fact]
            assert set(offsets) <= {0, misconception.offset, -misconception.offset}
            assert abs(wrong - misconception.share) < 0.18
            assert 0.55 <= misconception.share <= 0.85
        else:
            assert wrong < 0.2


def test_misconceived_facts_make_up_their_share_of_all_statements(table):
    assert table.facts()["misconceived_share"] == pytest.approx(0.25, abs=0.01)


def test_a_perfect_learner_states_what_most_of_the_text_states(table, pairs):
    """The bound is that of a table of majorities learned from the text itself."""
    counts = defaultdict(Counter)
    for problem, _, _ in pairs:
        for statement in statements_of(table.slip(problem).rationale):
            counts[statement.left, statement.operator, statement.right][statement.result] += 1

    def majority(statement):
        seen = counts[statement.left, statement.operator, statement.right]
        return seen.most_common(1)[0][0] if seen.total() >= 20 else table.likeliest(statement)

    learned = [str(work_out(p.operations, majority)[-1].result) == p.answer for p, _, _ in pairs]
    assert sum(learned) / len(learned) == pytest.approx(table.greedy_accuracy(p for p, _, _ in pairs), abs=0.02)
    assert 0.35 < table.greedy_accuracy() < 0.55


def test_the_table_does_not_depend_on_when_it_is_made(pairs, monkeypatch):
    monkeypatch.setattr(slips_module, "SAMPLE", 500)
    table, again, other = (FactTable(tasks(), SlipsConfig(**SLIPS | {"seed": seed})) for seed in (3, 3, 4))
    assert again.misconceptions == table.misconceptions != other.misconceptions
    drawn = [problem for problem, _, _ in pairs[:50]]
    assert [again.slip(problem) for problem in reversed(drawn)] == [table.slip(problem) for problem in drawn][::-1]


def test_no_result_becomes_negative_by_a_slip():
    assert shifted(Statement(1, "-", 1, 0), -2) == 2
    assert shifted(Statement(1, "-", 3, -2), -2) == -4


def test_tasks_of_equal_settings_share_their_facts(monkeypatch):
    monkeypatch.setattr(slips_module, "SAMPLE", 500)
    slips = Slips([*tasks(), TextTaskConfig(name="products")])
    assert slips.tables["chain_sum"] is slips.tables["leg_counting"]
    assert set(slips.facts()) == {"chain_sum, leg_counting"}
    right = next(problems([TextTaskConfig(name="products")], 0, "train"))
    assert slips.apply(right) == right
    assert Slips(tasks(None)).facts() is None


def test_a_source_with_slips_is_labelled_as_such(tmp_path):
    source = SourceConfig(name="s", reader="reasoning", form="synth", records=64, tasks=tasks())
    assert "mistakes are planted" in stand_in_of(source)
    assert stand_in_of(source.model_copy(update={"tasks": tuple(tasks(None))})) == REASONING_STAND_IN
    (file,) = list_files(source, tmp_path)
    (batch,) = read_file(source, file, tmp_path)
    steps = [s for text in batch.columns["synthetic_reasoning"] for s in statements_of(text)]
    assert 0.1 < sum(not s.is_right for s in steps) / len(steps) < 0.4


@pytest.mark.parametrize("name", ["gcd", "spell_backward", "gsm_symbolic"])
def test_a_task_without_arithmetic_cannot_have_slips(name):
    with pytest.raises(ValidationError, match=f"task '{name}' has `slips`, but its solutions have no arithmetic"):
        TextTaskConfig(name=name, slips=SLIPS)


def test_limits_in_the_wrong_order_are_refused():
    with pytest.raises(ValidationError, match="the first is the lower limit"):
        SlipsConfig(wrong_share=(0.8, 0.6))
