"""Mathematical equivalence: values by SymPy in a process, and what happens when that process hangs, dies or fails."""

import os
import signal
import threading

import pytest

from nautile.common.errors import Retryable
from nautile.data.chat_template import ParsedReply
from nautile.evals.graders import equivalence as equivalence_module
from nautile.evals.graders.equivalence import Equivalence, grade_math

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
        # exactly, where both are exact
        ("\\frac{1}{2004!}", "\\frac{1}{2006!}", False),
        ("1 - \\frac{1}{e}", "1 + \\frac{1}{e}", False),
        ("1 - \\frac{1}{\\mathrm{e}}", "\\frac{e-1}{e}", True),
        ("e + \\frac{1}{2004!}", "e + \\frac{1}{2006!}", False),
        ("2^{-99}", "2^{-98}", False),
        ("e^{-1000}", "e^{-1001}", False),
        ("\\sin 10^{-20}", "10^{-20}", False),
        ("\\frac{1}{3}", "0.333", False),
        ("\\sqrt{17}", "4.123106", True),
        ("\\sqrt{17}", "4.12311", True),
        ("\\sqrt{17}", "4.1231", False),
        ("\\sqrt{17}", "4.123107", False),
        ("(\\frac{1}{2004!}, 1)", "(\\frac{1}{2006!}, 1)", False),
        ("x + \\frac{1}{2004!}", "x + \\frac{1}{2006!}", False),
        # what a parser may drop
        ("a^2", "A^2", False),
        ("x_1 + x_2", "x_1 + x_3", False),
        ("f'(x)", "f''(x)", False),
        ("2", "2^T", False),
        ("2^{T}", "2^T", True),
        ("5", "5\\text{bn}", False),
        ("300000", "3\\text{ lakh}", True),
        ("f'(x)", "f(x)", False),
        ("\\sin 30^\\circ", "\\frac{1}{2}", True),
        ("3 + 4i", "4i + 3", True),
        ("i^2", "-1", True),
        ("|x|", "x", False),
        ("\\sqrt{x^2}", "|x|", True),
        ("\\log_2 8", "3", True),
        ("\\binom{5}{2}", "10", True),
        ("5!", "120", True),
        ("2x + 3y = 6", "y = 2 - \\frac{2}{3}x", True),
        ("2x + 3y = 6", "y = 2 + \\frac{2}{3}x", False),
        ("y = x", "x = y", True),
        ("2x > 4", "x > 2", True),
        ("2x > 4", "x < 2", False),
        ("-2x > 4", "x > -2", False),
        ("\\begin{pmatrix} 1/2 & \\sqrt{4} \\end{pmatrix}", "\\begin{pmatrix} 0.5 & 2 \\end{pmatrix}", True),
        ("\\frac{1}{0}", "1", False),
        ("\\infty", "\\frac{1}{0}", False),
        ("60", "5 \\text{ dozen}", True),
        ("5", "5 \\text{ dozen}", False),
        ("\\sqrt{2} \\pmod 7", "\\sqrt 2", True),
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
        ("Answer: the value of $x$ is $\\boxed{0.5}$.", True, True, None),
        ("Is the answer: $\\frac12$?", False, False, None),
        ("The answer is anything but $\\frac12$", False, False, None),
        ("\\boxed{\\cancel{2}\\frac12}", True, True, None),
        ("~~$2$~~ $\\frac12$", True, True, None),
        ("\\boxed{0.5} bn", False, False, None),
        # More than any number of candidates that is looked at: the last one is the last.
        (" ".join(f"\\boxed{{{n}}}" for n in range(2, 40)) + " \\boxed{0.5}", False, True, "many_answers"),
        ("\\boxed{0.5} " + " ".join(f"\\boxed{{{n}}}" for n in range(2, 40)), False, False, "many_answers"),
        ("\\boxed{0.5}, or \\boxed{2}, no, \\boxed{\\frac12}", False, True, "many_answers"),
    ],
)
def test_math_verdicts(equivalence, reply, answer, strict, lenient, problem):
    verdict = grade_math(reply(answer), "\\frac{1}{2}", equivalence)
    assert (verdict.strict, verdict.lenient, verdict.problem) == (strict, lenient, problem)


@pytest.mark.parametrize(
    ("answer", "strict"),
    [
        ("\\boxed{1} and \\boxed{-2}", True),
        ("$x = 1$ or $x = -2$", True),
        ("\\boxed{-2, 1}", True),
        ("\\boxed{1}", False),
        ("\\boxed{1}, \\boxed{-2} and \\boxed{3}", False),
        ("\\boxed{1}\n\n\\boxed{-2}", False),
    ],
)
def test_an_answer_of_several_parts(equivalence, reply, answer, strict):
    assert grade_math(reply(answer), "1, -2", equivalence).strict is strict


@pytest.fixture
def failing(monkeypatch):
    """failing(Exception) -> an Equivalence whose comparisons of values raise it."""

    def make(error):
        instance = Equivalence()

        def fail(*_):
            raise error

        monkeypatch.setattr(instance, "_ask", fail)
        return instance

    return make


@pytest.mark.parametrize(
    ("answer", "strict", "lenient", "problem"),
    [
        ("\\boxed{x+1}", None, None, "not_graded"),
        ("\\boxed{x + 1}, \\boxed{1+x}", None, True, "not_graded"),
        ("\\boxed{1+x}", True, True, None),  # needs no comparison of values
        ("\\boxed{2}, \\boxed{(2, 3)}", False, False, "many_answers"),
        ("", False, False, "no_answer"),
        (None, False, None, "unfinished"),
    ],
)
def test_a_verdict_that_depends_on_a_comparison_without_a_result_is_none(failing, answer, strict, lenient, problem):
    reply = ParsedReply("\\boxed{x+1}" if answer is None else "", answer, answer is not None, True)
    verdict = grade_math(reply, "1+x", failing(equivalence_module.NoComparison("hung")))
    assert (verdict.strict, verdict.lenient, verdict.problem) == (strict, lenient, problem)


@pytest.mark.slow
def test_a_comparison_that_takes_too_long_has_no_result_and_its_process_is_replaced(equivalence):
    assert equivalence.equal("\\frac{2}{4}x", "0.5x")
    equivalence.limit_s = 1.0
    assert equivalence.equal("1", SLOW) is None
    assert (equivalence.failures, equivalence._process) == (1, None)
    equivalence.limit_s = 30.0
    assert equivalence.equal("\\frac{2}{4}x", "0.5x")


@pytest.mark.slow
def test_the_comparisons_of_a_reply_have_one_limit_together(reply):
    instance = Equivalence(limit_s=30.0)
    try:
        assert instance.equal("x+1", "1+x")  # started
        instance.limit_s = 1.0
        boxes = " ".join(f"\\boxed{{i^{{9^{{9^{{{n}}}}}}}}}" for n in range(9, 17))
        verdict = grade_math(reply(boxes), "1", instance)
        assert (verdict.strict, verdict.problem) == (None, "not_graded")
        # The first comparison used up the limit; the next one was not begun, and the others were not needed.
        assert (instance.failures, instance._process) == (2, None)
    finally:
        instance.close()


@pytest.mark.slow
def test_a_process_that_died_is_replaced(equivalence):
    assert equivalence.equal("\\frac{2}{4}x", "0.5x")
    equivalence._process.kill()
    equivalence._process.wait()
    assert equivalence.equal("\\frac{2}{4}x", "0.5x")


@pytest.mark.slow
def test_a_process_that_is_killed_amid_a_comparison_has_a_second_try_and_no_third(equivalence, monkeypatch):
    ask = equivalence._line
    kills = []

    def kill_first(process, limit_s):
        if len(kills) < most and process.poll() is None and ready:
            kills.append(process.pid)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.read()  # an answer that came before the kill is lost with it
        return ask(process, limit_s)

    assert equivalence.equal("x+1", "1+x")
    ready, most = True, 1
    monkeypatch.setattr(equivalence, "_line", kill_first)
    running = equivalence._running
    # Starting the process waits for a line as well: that wait is left alone.
    monkeypatch.setattr(equivalence, "_running", lambda: _unkilled(equivalence, running, ask))
    assert equivalence.equal("x+2", "2+x") is True
    kills.clear()
    most = 2
    failures = equivalence.failures
    assert equivalence.equal("x+3", "3+x") is None
    assert (len(kills), equivalence.failures) == (2, failures + 1)


def _unkilled(equivalence, running, line):
    killing, equivalence._line = equivalence._line, line
    try:
        return running()
    finally:
        equivalence._line = killing


@pytest.mark.slow
def test_a_process_whose_starter_thread_ended_is_replaced():
    instance = Equivalence(limit_s=30.0)
    results = []
    try:
        for _ in range(2):  # the kernel kills the process with the thread that started it
            thread = threading.Thread(target=lambda: results.append(instance.equal("x+1", "1+x")))
            thread.start()
            thread.join()
        assert results == [True, True]
    finally:
        instance.close()


@pytest.mark.slow
def test_a_folder_of_the_same_name_in_the_working_directory_is_not_imported(tmp_path, monkeypatch):
    for name in ("nautile", "evals"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    instance = Equivalence(limit_s=30.0)
    try:
        assert instance.equal("x+1", "1+x") is True
    finally:
        instance.close()


@pytest.mark.slow
def test_a_process_that_cannot_be_started_is_no_verdict_on_any_reply(monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(Retryable, match="compares mathematical answers ended with exit code 1"):
        Equivalence().equal("x+1", "1+x")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("expected", "reads"),
    [
        ("sin(x)", True),
        ("2**3", True),
        ("no solution", True),
        ("(3, \\frac{\\pi}{2})", True),
        ("4210_5", True),
        ("x^2 + 2x = 0", True),
        ("\\frac{1}{", False),
        ("\\operatorname{foo}(x) +", False),
        ("(1, 2", False),
        ("\\begin{pmatrix} 1 \\\\ \\frac{1} \\end{pmatrix}", False),
        ("", False),
    ],
)
def test_what_can_be_expected(equivalence, expected, reads):
    assert equivalence.reads(expected) is reads
