import pytest

from evals.graders.equivalence import Equivalence, grade_math

SLOW = "9" * 50 + "^{" + "9" * 50 + "}"


@pytest.fixture(scope="module")
def equivalence():
    instance = Equivalence(limit_s=30.0)
    yield instance
    instance.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("expected", "given", "same"),
    [
        ("\\frac{1}{2}", "0.5", True),
        ("x^2+2x+1", "(x+1)^2", True),
        ("\\frac{\\sqrt{3}}{2}", "\\sqrt{3}/2", True),
        ("\\{1,2\\}", "\\{2,1\\}", True),
        ("12", "12 \\text{ cm}", True),
        ("90^\\circ", "90", True),
        ("5", "x=5", True),
        ("1,234", "1234", True),
        ("\\text{(C)}", "C", True),
        ("\\text{Friday}", "friday", True),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3, \\pi/2)", True),
        ("1000", "1 000", True),
        ("10", "11", False),
        ("12", "1 2", False),
        ("12", "1\\  2", False),
        ("31/2", "3 1/2", False),
        ("\\frac{1}{2}", "half", False),
        ("1", "", False),
        ("x", "1" * 3000, False),
    ],
)
def test_equivalence(equivalence, expected, given, same):
    assert equivalence.equal(expected, given) is same


@pytest.mark.parametrize(
    ("answer", "strict", "lenient", "problem"),
    [
        ("\\boxed{1/2}", True, True, None),
        ("$\\frac12$", True, True, None),
        ("The answer is $\\frac{1}{2}$.", True, True, None),
        ("\\boxed{0.5}, that is \\boxed{\\frac12}", True, True, None),
        ("\\boxed{1}, no, \\boxed{0.5}", False, True, "many_answers"),
        ("0.5 or 2", False, False, "many_answers"),
        ("no idea", False, False, None),
        ("", False, False, "no_answer"),
        (None, False, False, "unfinished"),
    ],
)
def test_math_verdicts(equivalence, reply, answer, strict, lenient, problem):
    verdict = grade_math(reply(answer), "\\frac{1}{2}", equivalence)
    assert (verdict.strict, verdict.lenient, verdict.problem) == (strict, lenient, problem)


@pytest.mark.slow
def test_a_comparison_that_takes_too_long_is_given_up_and_its_process_replaced(equivalence):
    assert equivalence.equal("\\frac{2}{4}", "0.5")
    equivalence.limit_s = 1.0
    assert not equivalence.equal("1", SLOW)
    assert (equivalence.timeouts, equivalence._process) == (1, None)
    equivalence.limit_s = 30.0
    assert equivalence.equal("\\frac{2}{4}", "0.5")


@pytest.mark.slow
def test_a_process_that_died_is_replaced(equivalence):
    assert equivalence.equal("\\frac{2}{4}", "0.5")
    equivalence._process.kill()
    equivalence._process.wait()
    assert equivalence.equal("\\frac{2}{4}", "0.5")
