"""Two models on the same questions: McNemar's test against its definition, the bootstrap of means, what changed."""

import math

import pytest

from nautile.common.errors import ConfigError
from nautile.evals.scoring.comparison import compare, comparison_table
from nautile.evals.scoring.intervals import paired_bootstrap
from tests.support.servers.benchmark_hub import PUBLIC


def row(benchmark, index, right, **fields):
    plain = {"benchmark": benchmark, "index": index, "prompt_digest": f"{benchmark}{index}", "left_out": None}
    verdicts = {"strict": right, "lenient": True, "output": str(right), "parsed": None, "problem": None}
    return {**plain, **verdicts, "prompt": "?", "expected": "1", "id": str(index), "category": None, **fields}


def rows(benchmark, verdicts):
    return [row(benchmark, index, bool(right)) for index, right in enumerate(verdicts)]


def test_a_comparison_says_which_side_was_not_screened_for():
    a = [row("gsm8k", n, True, screened=True) for n in range(4)]
    b = [row("gsm8k", n, True, screened=n > 0) for n in range(4)]
    result = compare(a, b)
    note = "training text was not screened for 1 of its 4 questions"
    assert result["benchmarks"]["gsm8k"]["not_screened"] == {"b": note}
    table = comparison_table(result, "Before", "After")
    assert table.rows[0][0] == "GSM8K (0-shot) (not screened for)"
    assert f"GSM8K (0-shot) (not screened for): {note} (After)." in table.notes
    plain = compare(a, a)["benchmarks"]["gsm8k"]
    assert (plain["title"], plain["not_screened"]) == ("GSM8K (0-shot)", {})


def test_leads_and_p_are_those_of_the_discordant_pairs():
    a, b = rows("gsm8k", [1] * 10 + [0] * 10), rows("gsm8k", [1] * 8 + [0] * 2 + [1] * 9 + [0])
    result = compare(a, b)["benchmarks"]["gsm8k"]
    assert (result["n"], result["both"], result["only_a"], result["only_b"], result["neither"]) == (20, 8, 2, 9, 1)
    assert (result["a"], result["b"], result["lead"]) == (0.5, 0.85, pytest.approx(0.35))
    assert result["p"] == pytest.approx(2 * sum(math.comb(11, k) for k in range(3)) / 2**11)
    assert result["low"] < 0.35 < result["high"]


def test_a_question_in_several_rows_is_compared_once():
    a = [row("trivia_qa", at, at % 40 >= 20, id=f"q{at % 40}", prompt_digest=f"d{at % 40}") for at in range(120)]
    b = [{**entry, "strict": int(entry["id"][1:]) >= 14} for entry in a]
    result = compare(a, b)
    test = result["benchmarks"]["trivia_qa"]
    assert (result["common"], test["n"], test["only_b"], test["lead"]) == (120, 40, 6, pytest.approx(0.15))
    assert test["p"] == pytest.approx(2 / 2**6)
    assert len(result["changed"]) == 18


def test_a_model_does_not_lead_itself():
    both = rows("gsm8k", [1, 0] * 20)
    result = compare(both, both)
    assert (result["benchmarks"]["gsm8k"]["p"], result["changed"]) == (1.0, [])


def test_what_changed_is_told_with_both_outputs():
    result = compare(rows("piqa", [1, 0, 1]), rows("piqa", [0, 1, 1]))
    assert [(item["index"], item["change"], item["a"]["strict"]) for item in result["changed"]] == [
        (0, "lost", True),
        (1, "gained", False),
    ]
    assert compare(rows("piqa", [1, 0]), rows("piqa", [0, 1]), "lenient")["changed"] == []


def test_only_the_same_question_with_the_same_prompt_is_compared():
    a = [row("piqa", 0, True), row("piqa", 1, True, left_out="too_long"), row("piqa", 2, True), row("mmlu", 0, True)]
    b = [row("piqa", 0, True), row("piqa", 1, True), row("piqa", 2, True, prompt_digest="another")]
    result = compare(a, b)
    assert (result["common"], result["only_in_a"], result["only_in_b"]) == (1, 3, 2)
    assert "Left out: 3 rows only in the first" in comparison_table(result, "A", "B").notes[1]
    with pytest.raises(ConfigError, match="no question in common"):
        compare(a[3:], b)


def test_composites_and_the_average_are_paired_too():
    def everything(right):
        return [entry for name in PUBLIC for entry in rows(name, right)]

    result = compare(everything([1, 0] * 20), everything([1, 1] * 10 + [1, 0] * 10))
    assert set(result["means"]) == {"arc", "average"}
    mean = result["means"]["average"]
    assert (mean["a"], mean["b"]) == (pytest.approx(0.5), pytest.approx(0.75))
    assert mean["lead"] == pytest.approx(0.25)
    assert mean["low"] < 0.25 < mean["high"]
    assert mean["p"] < 0.01
    assert set(compare(rows("arc_easy", [1]), rows("arc_easy", [0]))["means"]) == set()
    table = comparison_table(result, "A", "B")
    assert [candidate[0] for candidate in table.rows[-2:]] == ["ARC", "Average"]


def test_a_paired_interval_is_narrower_than_one_of_independent_models():
    a = [True] * 50 + [False] * 50
    lead, low, high, p = paired_bootstrap([(a, [*a[:49], False, *a[50:]])], [1.0])
    assert lead == pytest.approx(-0.01)
    assert -0.05 < low <= -0.01 <= high <= 0
    assert p > 0.05
    with pytest.raises(ValueError, match="the same questions"):
        paired_bootstrap([([True], [])], [1.0])


def test_the_lead_of_a_mean_is_the_difference_of_what_it_shows():
    # A question in two rows, of which a model may have one right: its vote is a half.
    def pair(index, question, right):
        shared = {"id": f"q{question}", "prompt_digest": f"d{question}"}
        return [row("arc_easy", 2 * index + copy, verdict, **shared) for copy, verdict in enumerate(right)]

    a = [*pair(0, 0, (True, False)), *pair(1, 1, (True, True)), row("arc_challenge", 0, True)]
    b = [*pair(0, 0, (True, True)), *pair(1, 1, (True, False)), row("arc_challenge", 0, True)]
    b[2]["strict"] = b[3]["strict"] = False
    result = compare(a, b)
    arc, easy = result["means"]["arc"], result["benchmarks"]["arc_easy"]
    assert easy["lead"] == pytest.approx(-0.25)
    assert arc["lead"] == pytest.approx(arc["b"] - arc["a"]) == pytest.approx(easy["lead"] / 2)
    assert arc["low"] <= arc["lead"] <= arc["high"]
    assert paired_bootstrap([([0.5] * 40, [1.0] * 40)], [1.0])[0] == 0.5


def test_models_that_differ_on_no_question_may_differ_on_the_next():
    """The interval is as wide as if one more question had been won or lost."""
    lead, low, high, p = paired_bootstrap([([True, False] * 20, [True, False] * 20)], [1.0])
    assert (lead, p) == (0.0, 1.0)
    assert high == -low == pytest.approx(1.96 / 42)
    assert paired_bootstrap([([0.0] * 8, [1.0] * 8)], [1.0])[:3] == (1.0, pytest.approx(1 - 1.96 / 10), 1.0)


def test_sampled_answers_are_compared_by_their_shares_and_by_pass_at_k():
    """Two questions of four answers: 1 and 2 right against 3 and 2. B has lost an answer to a third question."""
    a, b = (
        [
            row("gsm8k", at, n < right, sample=n, finished=True, finished_thinking=True)
            for at, right in enumerate(rights)
            for n in range(4)
        ]
        for rights in ([1, 2, 0], [3, 2, 4])
    )
    b[-1]["left_out"] = "not_graded"
    mean = compare(a, b)
    assert mean["benchmarks"]["gsm8k"]["lead"] == pytest.approx((2 / 4 + 0 + 1) / 3)
    assert (mean["common"], mean["only_in_a"], mean["changed"]) == (11, 1, [])
    passed = compare(a, b, "pass@4")
    assert passed["benchmarks"]["gsm8k"]["n"] == 2
    assert (passed["benchmarks"]["gsm8k"]["lead"], passed["too_few_answers"]) == (0, 1)
    assert "1 questions have too few graded answers and are left out." in comparison_table(passed, "A", "B").notes
    with pytest.raises(ConfigError, match="--verdict pass@5: no question has so many graded answers"):
        compare(a, b, "pass@5")


def test_a_comparison_tells_form_from_skill():
    a = [row("gsm8k", n, n < 3, finished=n < 5, finished_thinking=True) for n in range(10)]
    b = [row("gsm8k", n, n < 6, finished=True, finished_thinking=True) for n in range(10)]
    result = compare(a, b)
    form = result["benchmarks"]["gsm8k"]
    assert form["finished_share"] == {"a": 0.5, "b": 1.0}
    assert form["accuracy_finished"] == {"a": 0.6, "b": 0.6}
    expected = "GSM8K (0-shot): of A's answers 50.0 % finished, 60.0 % of these right; of B's 100.0 % finished, 60.0 %"
    assert any(note.startswith(expected) for note in comparison_table(result, "A", "B").notes)
