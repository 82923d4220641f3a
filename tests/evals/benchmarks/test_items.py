"""The grader of an item fails: that is a missing score, wherever it is counted. And the kind of an answer."""

import json

import pytest

from nautile.common.errors import Retryable
from nautile.data.chat_template import ParsedReply
from nautile.data.sources.reasoning_gym import Problem
from nautile.evals.benchmarks import items as benchmark_items
from nautile.evals.benchmarks.items import BenchmarkItem, answer_kind, grade
from nautile.evals.graders.grading import NOT_GRADED
from nautile.evals.running.runner import evaluate
from nautile.rl.rewards import advantages, verifiable

REPLY = ParsedReply("", "\\boxed{x+1}", True, True)


@pytest.fixture
def grader(monkeypatch):
    """grader(error) lets every mathematical grade raise it."""

    def install(error):
        def fail(reply, expected):
            raise error

        monkeypatch.setattr(benchmark_items, "grade_math", fail)

    return install


@pytest.mark.parametrize("error", [ValueError("boom"), RecursionError(), MemoryError(), KeyError("x")])
def test_a_grader_that_raises_gives_no_verdict_and_no_reward(grader, error):
    grader(error)
    assert grade(BenchmarkItem("b", 0, "0", "?", "math", "x+1"), REPLY).verdict == NOT_GRADED
    problem = Problem("file", 0, "?", "x+1", "", "math")
    rewards = [verifiable(problem, REPLY), 1.0, 1.0, 0.0]
    assert rewards[0] is None
    assert advantages(rewards) == pytest.approx([None, 1 / 3, 1 / 3, -2 / 3])


def test_what_concerns_more_than_a_reply_ends_the_stage(grader):
    grader(Retryable("the process does not start"))
    with pytest.raises(Retryable, match="does not start"):
        grade(BenchmarkItem("b", 0, "0", "?", "math", "x+1"), REPLY)


def test_a_scorer_of_the_data_set_that_raises_gives_none(reply):
    def fail(answer):
        raise ZeroDivisionError

    item = BenchmarkItem("b", 0, "0", "?", "number", "12", own_check=fail)
    graded = grade(item, reply("12"))
    assert (graded.verdict.strict, graded.details) == (True, {"own_scorer": None})


def test_an_evaluation_leaves_out_what_could_not_be_graded_and_keeps_the_reply(grader, model, tmp_path):
    grader(OSError("the process died"))
    items = [BenchmarkItem("b", n, str(n), f"What {n}?", "math", "x") for n in range(3)]
    events = []
    rows = evaluate(
        model(items, lambda item: "x"), items, tmp_path / "rows.jsonl", emit=lambda kind, **e: events.append((kind, e))
    )
    assert [e["note"] for kind, e in events if kind == "progress"][-1] == (
        "b; 3 replies could not be graded and are left out"
    )
    assert [(row["left_out"], row["strict"], row["lenient"], row["output"]) for row in rows] == [
        ("not_graded", None, None, "x")
    ] * 3
    assert [json.loads(line)["problem"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == [
        "not_graded"
    ] * 3


KINDS = {
    "number": ["18", "-3", "$18", "7/2", "50%", "3 1/2", "1e3", "1.5e3", "1,200", "½"],
    "math": [
        "(3, 4)", "2x+3", "[1, 2)", "{1, 2}", "x = 5", "x^2", "2**3", "sqrt(3)/2", "sin(x)", "exp(x)", "|x|", "n!",
        r"\frac{1}{2}", r"0.\overline{3}", "$x$", "x > 3",
    ],
    "text": [
        "Paris", "no solution", "x", "A", "A, B", "1, 2, 3", "['81.0', '2.0']", "2024-01-05", "3-4-5", "10:30", "C++",
        "5 km", "yes/no", "St. Paul", "Ann's", "1/2 cup",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "answer"), [(kind, answer) for kind in KINDS for answer in KINDS[kind]])
def test_the_kind_of_an_answer_is_found_by_reading_it(kind, answer):
    assert answer_kind(answer) == kind


def test_an_error_that_repeats_a_reply_is_not_logged_as_a_whole(monkeypatch, caplog):
    text = "a long reply " * 300
    item = BenchmarkItem("b", 0, "0", "?", "number", "12", own_check=float)
    monkeypatch.setattr(benchmark_items.grading, "grade_number", lambda reply, expected: float(reply.answer))
    graded = grade(item, ParsedReply("", text, True, True))
    assert (graded.verdict.problem, graded.details["own_scorer"]) == ("not_graded", None)
    assert caplog.text.count("could not convert string to float: 'a long reply") == 2
    assert text[:200] not in caplog.text
