"""The figures of the ladder's table, from the rows of an evaluation and the values of its seeds."""

import pytest

from bench.studies.ladder import StageFigures, figures_of, markdown, statements_of
from nautile.configs.ingest import SlipsConfig, TextTaskConfig
from nautile.data.sources.slips import FactTable

TASK = TextTaskConfig(name="chain_sum", parameters={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})


def row(reasoning, strict, finished=True):
    return {"benchmark": "held_out", "left_out": None, "reasoning": reasoning, "strict": strict, "finished": finished}


def test_steps_and_misconceived_facts_are_counted_in_the_reasoning():
    table = FactTable([TASK], SlipsConfig(misconceived=0.3))
    (operator, left, right), *_ = table.misconceptions
    wrong = statements_of(f"{left} {operator} {right} = 99.")[0]
    right_step = f"{left} {operator} {right} = {wrong.truth}."
    rows = [row(right_step, True), row(str(wrong), False), row("", False, finished=False), row(right_step, True)]
    assert figures_of(rows, table) == {
        "accuracy": 0.5,
        "with_steps": 0.75,
        "accuracy_given_steps": pytest.approx(2 / 3),
        "finished": 0.75,
        "misconceived_wrong": pytest.approx(1 / 3),
    }


def test_the_tables_compare_stages_and_arms_over_seeds():
    def seeds(*accuracies, processor=10.0, factors=()):
        return {n: StageFigures(a, 1.0, a, 1.0, 0.5, processor, factors) for n, a in enumerate(accuracies, 1)}

    ladder = {
        "pretrain": seeds(0.40, 0.44, 0.42, processor=100.0),
        "reason": seeds(0.70, 0.76, 0.72, factors=(0.5, 1.0, 2.0)),
    }
    supervised = {"pretrain": seeds(0.42, 0.45, 0.43, processor=115.0)}
    unfinished = {"pretrain": seeds(0.40, 0.44, 0.42)}
    ends = {"ladder": "reason", "plain": "reason", "supervised": "pretrain"}
    text = markdown({"ladder": ladder, "plain": unfinished, "supervised": supervised}, ends, 0.42, 1000)
    assert "plain" not in text
    assert "| pretrain | 42.0 [37.0, 47.0] | 40.0, 44.0 |" in text
    assert "| reason | 72.7 [65.1, 80.3] | 70.0, 76.0 | +30.7 [" in text
    assert "could have found" in text
    assert "| supervised | 3 | 43.3 [39.5, 47.1] | -29.3 [" in text
    assert text.index("| ladder | 3 | 72.7") < text.index("| supervised | 3 | 43.3")
    assert "0.50 to 2.00, median 1.00" in text
    assert "| 2 | 44.0 | 76.0 | 45.0 |" in text
