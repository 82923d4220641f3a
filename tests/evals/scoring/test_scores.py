from itertools import combinations
from statistics import fmean

import pytest

from nautile.evals.benchmarks.registry import composites
from nautile.evals.scoring.scores import composite, marked_title, pass_at_k, sampled, score, summarise
from nautile.evals.tables import paper_figures as paper
from nautile.evals.tables.results import breakdown, counts_table, sampled_table
from tests.support.servers.benchmark_hub import PUBLIC


def rows(name, right, wrong, **fields):
    plain = {
        "benchmark": name,
        "category": None,
        "chance": 0.25,
        "left_out": None,
        "problem": None,
        "truncated": False,
        "tokens_out": 3,
        "finished_thinking": True,
    }
    verdicts = [True] * right + [False] * wrong
    return [
        plain | {"index": n, "id": str(n), "prompt_digest": str(n), "strict": v, "lenient": v} | fields
        for n, v in enumerate(verdicts)
    ]


def everything(right, wrong):
    return [row for name in PUBLIC for row in rows(name, right, wrong)]


def test_a_score_says_of_how_many_questions_training_text_was_not_screened():
    def score_of(*parts):
        lines = [line for count, screened in parts for line in rows("gsm8k", count, 0, screened=screened)]
        return score("gsm8k", [{**line, "id": str(n)} for n, line in enumerate(lines)])

    none, all_of_them, some = score_of((4, True)), score_of((4, False)), score_of((3, True), (1, False))
    assert (none["not_screened"], marked_title(none)) == (None, "GSM8K (0-shot)")
    assert score("gsm8k", rows("gsm8k", 4, 0))["not_screened"] is None  # of a model behind an endpoint
    assert all_of_them["not_screened"] == "training text was not screened for it"
    assert some["not_screened"] == "training text was not screened for 1 of its 4 questions"
    assert marked_title(some) == "GSM8K (0-shot) (not screened for)"
    parts = {
        "arc_easy": rows("arc_easy", 2, 0, screened=True),
        "arc_challenge": rows("arc_challenge", 2, 0, screened=False),
    }
    assert composite("arc", parts)["not_screened"] == "training text was not screened for 2 of its 4 questions"
    everything_but_one = [line | {"screened": line["benchmark"] != "piqa"} for line in everything(1, 1)]
    average = summarise(everything_but_one, "m", {})["average"]
    assert average["not_screened"] == f"training text was not screened for 2 of its {2 * len(PUBLIC)} questions"


def test_a_score_counts_and_bounds():
    several = [{**row, "id": f"m{row['id']}"} for row in rows("gsm8k", 0, 10, problem="many_answers", lenient=True)]
    result = score("gsm8k", [*rows("gsm8k", 30, 60), *several])
    assert (result["n"], result["correct"], result["accuracy"], result["accuracy_lenient"]) == (100, 30, 0.3, 0.4)
    assert result["interval"] == pytest.approx([0.2189, 0.3958], abs=1e-4)
    assert result["many_answers"] == 10
    assert result["paper"]["nautile_370m"] == 33.4
    assert result["differs"] == ["100 of the split's 1,319 questions"]


def test_what_could_not_be_graded_is_left_out_and_counted():
    missing = rows("gsm8k", 0, 7, strict=None, lenient=None, problem="not_graded", left_out="not_graded")
    missing = [{**row, "id": f"m{row['id']}"} for row in missing]
    result = score("gsm8k", [*rows("gsm8k", 30, 30), *missing])
    assert (result["n"], result["accuracy"], result["left_out"]) == (60, 0.5, {"not_graded": 7})
    assert score("gsm8k", missing)["accuracy"] is None


def test_an_instruction_whose_checker_failed_is_in_no_share():
    followed = {"instruction": "a:b", "strict": True, "lenient": True}
    instructions = [followed, followed | {"strict": None, "lenient": None}, followed | {"strict": False}]
    result = score("ifeval", rows("ifeval", 0, 1, instructions=instructions))
    assert (result["instructions"]["n"], result["instructions"]["correct"]) == (2, 1)


def test_a_scorer_of_the_data_set_that_failed_agrees_with_nobody():
    pair = [rows("gsm8k", 1, 0, own_scorer=value)[0] | {"id": str(value)} for value in (True, None)]
    assert score("gsm8k", pair)["own_scorer"] == {"n": 1, "agree": 1, "only_ours": 0, "only_own": 0}


def trivia(questions, copies, right):
    """`questions` questions in `copies` rows each, the first `right` of them answered."""
    pairs = [(question, copy) for question in range(questions) for copy in range(copies)]
    return [
        {**row, "index": at, "id": f"tc_{question}", "prompt_digest": f"d{question}", "strict": question < right}
        for at, ((question, _), row) in enumerate(zip(pairs, rows("trivia_qa", 0, questions * copies), strict=True))
    ]


def test_a_question_in_several_rows_has_one_vote():
    repeated, once = score("trivia_qa", trivia(50, 4, 10)), score("trivia_qa", trivia(50, 1, 10))
    assert (repeated["n"], repeated["rows"], repeated["items"]) == (50, 200, 200)
    assert repeated["interval"] == once["interval"]
    assert repeated["accuracy"] == repeated["accuracy_rows"] == 0.2
    assert "50 questions in 200 rows, one vote a question; 20.0 by rows" in repeated["differs"]
    assert not any("one vote" in point for point in once["differs"])
    table = counts_table({"benchmarks": {"trivia_qa": repeated}})
    assert table.rows[0][1] == "50 (200 rows)"


def test_questions_with_more_rows_count_no_more_than_others():
    uneven = [*trivia(10, 1, 0), *[{**row, "id": "x", "strict": True} for row in trivia(1, 9, 1)]]
    uneven = [{**row, "index": at, "prompt_digest": row["id"]} for at, row in enumerate(uneven)]
    result = score("trivia_qa", uneven)
    assert (result["accuracy"], result["accuracy_rows"]) == (pytest.approx(1 / 11), pytest.approx(9 / 19))
    mixed = [{**row, "strict": at % 2 == 0} for at, row in enumerate(trivia(1, 4, 1))]
    assert score("trivia_qa", mixed)["accuracy"] == 0.5


def test_other_questions_of_the_same_name_are_not_repeats():
    same_id = [{**row, "id": "chain_sum/3"} for row in rows("held_out", 3, 1)]
    assert score("held_out", same_id)["n"] == 4


def test_bad_rows_are_left_out_of_the_score_and_counted():
    result = score("gsm8k", rows("gsm8k", 3, 1), bad_rows=2)
    assert (result["n"], result["items"], result["left_out"]) == (4, 6, {"bad_row": 2})
    assert summarise(rows("gsm8k", 3, 1), "m", {}, bad_rows={"gsm8k": 2})["benchmarks"]["gsm8k"]["items"] == 6


def test_a_composite_is_the_mean_of_its_parts():
    parts = {"arc_easy": rows("arc_easy", 90, 10), "arc_challenge": rows("arc_challenge", 10, 10)}
    result = composite("arc", parts)
    assert result["accuracy"] == pytest.approx(0.7)
    assert result["interval"][0] < 0.7 < result["interval"][1]
    assert result["n"] == 120
    assert "120 of the splits' 3,548 questions" in result["differs"]
    wrong = composite("arc", {name: rows(name, 0, 1) for name in parts})
    assert wrong["interval"][0] == 0.0
    assert wrong["interval"][1] > 0.5, "one wrong answer to each does not say that none would be right"
    assert composite("arc", {**parts, "arc_easy": []}) is None


def test_the_average_is_of_all_eleven_rows_with_arc_as_one():
    half = everything(1, 1)
    easier = [row for row in half if row["benchmark"] != "arc_easy"] + rows("arc_easy", 2, 0)
    scores = summarise(easier, "m", {})
    assert set(scores["composites"]) == set(composites())
    assert scores["average"]["accuracy"] == pytest.approx((10 * 0.5 + 0.75) / 11)
    low, high = scores["average"]["interval"]
    assert low < scores["average"]["accuracy"] < high
    assert scores["average"]["paper"] == paper.TABLE_2_AVERAGE
    assert any("of the splits'" in point for point in scores["average"]["differs"])
    certain = summarise(everything(1, 0), "m", {})["average"]
    assert certain["accuracy"] == 1.0
    assert certain["interval"][0] < 0.95


def test_there_is_no_average_while_a_row_is_missing():
    some = [row for row in everything(1, 1) if row["benchmark"] != "piqa"]
    assert summarise(some, "m", {})["average"] is None
    assert summarise([row for row in some if row["benchmark"] == "mmlu"], "m", {})["composites"] == {}


def test_categories_and_instruction_types_are_broken_down():
    law = rows("mmlu", 3, 1, category="law")
    art = rows("mmlu", 1, 3, category="art")
    assert {k: v["accuracy"] for k, v in score("mmlu", law + art)["categories"].items()} == {"art": 0.25, "law": 0.75}
    kept = [
        {"instruction": "a:x", "strict": True, "lenient": True},
        {"instruction": "b:y", "strict": False, "lenient": True},
    ]
    result = score("ifeval", rows("ifeval", 0, 4, instructions=kept))["instructions"]
    assert (result["n"], result["accuracy"], result["accuracy_lenient"]) == (8, 0.5, 1.0)
    assert result["types"]["a:x"]["accuracy"] == 1.0
    unfinished = score("ifeval", rows("ifeval", 0, 4, instructions=kept, finished_thinking=False))["instructions"]
    assert unfinished["correct"] == 0


def test_the_second_opinion_is_compared():
    mixed = rows("held_out", 2, 2)
    for row, own in zip(mixed, (True, False, True, False), strict=True):
        row["own_scorer"] = own
    assert score("held_out", mixed)["own_scorer"] == {"n": 4, "agree": 2, "only_ours": 1, "only_own": 1}


@pytest.mark.parametrize(("samples", "right"), [(8, 0), (8, 1), (8, 3), (8, 8), (5, 2)])
def test_pass_at_k_is_the_share_of_all_subsets_with_a_right_answer(samples, right):
    verdicts = [True] * right + [False] * (samples - right)
    for k in range(1, samples + 1):
        assert pass_at_k(samples, right, k) == pytest.approx(fmean(map(any, combinations(verdicts, k))))
    assert pass_at_k(samples, right, samples + 1) is None


def sampled_rows(verdicts):
    """Rows of sampled answers: for each question its verdicts, None for one that was left out."""
    (plain,) = rows("gsm8k", 1, 0)
    return [
        {
            **plain, "index": question, "id": str(question), "prompt_digest": str(question), "sample": number,
            "strict": verdict, "lenient": verdict, "left_out": "not_graded" if verdict is None else None,
            "finished": verdict is not False,
        }
        for question, own in enumerate(verdicts)
        for number, verdict in enumerate(own)
    ]  # fmt: skip


def test_sampled_answers_share_a_vote_and_a_missing_one_is_counted():
    """Of four questions one has three of its four answers, so it is in pass@2 and not in pass@4."""
    verdicts = [[True, True, False, False], [False] * 4, [True, None, False, False], [True] * 4]
    own = sampled(sampled_rows(verdicts))["gsm8k"]
    assert (own["n"], own["samples"], own["left_out"]) == (4, 4, {"not_graded": 1})
    assert own["accuracy"] == pytest.approx(fmean([0.5, 0, 1 / 3, 1]))
    passes = {k: (share["n"], share["accuracy"]) for k, share in own["pass_at"].items()}
    assert passes == {
        "1": (4, pytest.approx(own["accuracy"])),
        "2": (4, pytest.approx(fmean([1 - 1 / 6, 0, 1 - 1 / 3, 1]))),
        "4": (3, pytest.approx(2 / 3)),
    }
    assert own["finished_share"] == 7 / 15
    table = sampled_table({"sampled": {"gsm8k": own}, "protocol": {"sample_temperature": 0.7}})
    assert table.columns[3:6] == ("mean@k", "pass@2", "pass@4")
    assert table.rows[0][-1] == "1"
    assert "GSM8K (0-shot): 1 questions have fewer than 4 graded answers, and are not in pass@4." in table.notes


def test_sampled_answers_have_a_table_and_leave_the_other_scores_alone():
    one = rows("gsm8k", 3, 1)
    alone = summarise(one, "m", {"sample_temperature": 1.0})
    both = summarise(one, "m", {"sample_temperature": 1.0}, sampled_rows=sampled_rows([[True, False]] * 4))
    assert {name: part for name, part in both.items() if name != "sampled"} == alone
    assert [table.title for table in breakdown(both)] == ["Answers and failures", "Sampled answers"]
    nothing = sampled(sampled_rows([[None, None]]))["gsm8k"]
    assert (nothing["accuracy"], nothing["pass_at"], nothing["samples"]) == (None, {}, 0)


def test_form_and_skill_are_told_apart():
    """Of ten answers two were cut off; of the eight that ended six are right."""
    ended = rows("gsm8k", 6, 2, finished=True)
    cut = [{**row, "id": f"c{row['id']}"} for row in rows("gsm8k", 0, 2, finished=False, truncated=True)]
    result = score("gsm8k", [*ended, *cut])
    assert (result["finished"], result["finished_share"], result["accuracy_finished"]) == (8, 0.8, 0.75)
    assert counts_table({"benchmarks": {"gsm8k": result}}).rows[0][4:6] == ("80.0", "75.0")
    unknown = score("gsm8k", rows("gsm8k", 3, 1))
    assert (unknown["finished_share"], unknown["accuracy_finished"]) == (None, None)
