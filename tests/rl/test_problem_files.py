"""Problem files: their rows, how each kind of answer is compared, and what is refused, by file and line."""

import json
import os

import pytest

from nautile.common.errors import ConfigError
from nautile.configs.training import ProblemsConfig, ProblemSource
from nautile.data.chat_template import ParsedReply
from nautile.data.sources.reasoning_gym import Problem, problem_split
from nautile.rl.problems import check_expressions, check_files, load, load_guard, prompt_of, read_problems
from nautile.rl.rewards import verifiable
from tests.rl.conftest import policy

OPTIONS = ["a fork", "a spoon", "a knife"]


@pytest.fixture
def source(tmp_path):
    """source(row, ...) -> a file of these rows, each a dict or a raw line."""

    def write(*rows) -> ProblemSource:
        path = tmp_path / "mine.jsonl"
        lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
        path.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
        return ProblemSource(source="jsonl", path=str(path))

    return write


def reward(problem: Problem, answer: str) -> float | None:
    return verifiable(problem, ParsedReply("", answer, True, True))


def test_a_byte_order_mark_costs_no_problem_and_a_fifo_is_not_waited_for(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"question": "one?", "answer": "1"}\r\n{"question": "two?", "answer": "2"}\r\n')
    source = ProblemSource(source="jsonl", path=str(path))
    assert [problem.question for problem in read_problems(source)] == ["one?", "two?"]
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"mine\.jsonl: is a FIFO, not a regular file"):
        next(read_problems(source))


@pytest.mark.parametrize(
    ("row", "right", "wrong"),
    [
        ({"answer": "14/4"}, ["14/4", "3.5", "It is 7/2."], ["15/4"]),
        ({"answer": 7}, ["7", "7.0", "**7**"], ["8", "7 or 8"]),
        ({"answer": "$18"}, ["18", "$18", "$18.00"], ["$19"]),
        ({"answer": "18 apples", "kind": "number"}, ["18", "18 apples"], ["17 apples"]),
        ({"answer": r"2\sqrt{3}"}, [r"$2\sqrt{3}$", r"\boxed{\sqrt{12}}"], [r"$3\sqrt{2}$", "2"]),
        ({"answer": r"\frac{1}{2}"}, ["1/2", "0.5", r"$\frac{2}{4}$"], ["2"]),
        ({"answer": "x^2 + 2x", "kind": "math"}, ["$x(x+2)$"], ["$x^2$"]),
        ({"answer": "(3, 4)"}, ["(3,4)", r"$\left(3, 4\right)$", "(x, y) = (3, 4)"], ["(4, 3)", "3", "[3, 4]"]),
        ({"answer": "2x+3"}, ["3 + 2x", "$2x + 3$", r"\boxed{2(x + 1.5)}"], ["2X + 3", "2y + 3"]),
        ({"answer": "3 1/2"}, ["3 1/2", "3.5", "7/2", "3½"], ["31/2", "3"]),
        ({"answer": "1e3"}, ["1000", "1e3", "1,000", "$10^3$"], ["13", "1e4"]),
        ({"answer": "sin(x)", "kind": "math"}, [r"$\sin x$", "sin(x)"], [r"$\cos x$"]),
        ({"answer": "2**3", "kind": "math"}, ["8", "$2^3$"], ["6", "23"]),
        ({"answer": "exp(x)", "kind": "math"}, ["$e^x$"], ["$e^{2x}$"]),
        ({"answer": "no solution", "kind": "math"}, ["No solution.", r"\boxed{\text{no solution}}"], ["0"]),
        ({"answer": "3 1/2", "kind": "math"}, [r"$\frac{7}{2}$"], [r"$\frac{31}{2}$"]),
        ({"answer": "1.5e3", "kind": "math"}, ["$1500$"], ["$15$"]),
        ({"answer": r"0.\overline{3}"}, [r"$\frac{1}{3}$"], ["0.3", r"$0.\overline{6}$"]),
        (
            {"answer": "Monday"},
            [r"\boxed{\text{Monday}}", r"The answer is $\text{Monday}$.", "**monday**"],
            ["Tuesday"],
        ),
        ({"answer": "Paris"}, ["paris", "Paris."], ["Paris or Rome", "in Paris"]),
        ({"answer": "B", "options": OPTIONS}, ["B", "B. a spoon", "(b)", "a spoon"], ["A", "a fork", "A or B"]),
        ({"answer": "A Spoon.", "options": OPTIONS, "kind": "choice"}, ["B"], ["C"]),
    ],
)
def test_an_answer_counts_by_its_kind(source, row, right, wrong):
    (problem,) = read_problems(source({"question": "Which?", **row}))
    check_expressions(source({}), [problem])
    assert {answer: reward(problem, answer) for answer in right} == dict.fromkeys(right, 1.0)
    assert {answer: reward(problem, answer) for answer in wrong} == dict.fromkeys(wrong, 0.0)


def test_a_choice_is_asked_with_its_options_as_a_benchmark_asks_it(source):
    file = source({"question": "Which?", "answer": "B", "options": OPTIONS}, {"question": "How many?", "answer": "2"})
    first, second = (prompt_of(problem, file) for problem in read_problems(file))
    assert first == "Which?\n\nA. a fork\nB. a spoon\nC. a knife\n\nAnswer with the letter of the right option alone."
    assert second == "How many?"


def test_every_question_is_in_one_split_once(source):
    rows = [{"question": f"What is {n} / 4?", "answer": f"{n}/4"} for n in range(60)]
    problems = list(read_problems(source(*rows, rows[0])))
    assert [problem.question for problem in problems] == [row["question"] for row in rows]
    # No text is made from a file, so what generators keep for the text is trained on here.
    for split, hashed in {"train": {"train", "reinforce"}, "guard": {"guard"}}.items():
        count = sum(problem_split(p.question) in hashed for p in problems)
        drawn = load(ProblemsConfig(count=count, **source(*rows).model_dump()), 0, split)
        assert {problem_split(problem.question) for problem in drawn} == hashed


def test_optional_fields_and_lines_with_other_separators(source):
    row = {"question": "1 +\u20281?", "answer": 2, "task": "sums", "rationale": "so", "license": "MIT"}
    (problem,) = read_problems(source(row))
    assert problem == Problem("sums", 0, "1 +\u20281?", "2", "so")
    (unanswered,) = read_problems(source({"question": "Say hello.", "answer": None, "options": None}))
    assert (unanswered.answer, unanswered.kind, unanswered.options) == ("", None, ())
    with pytest.raises(ValueError, match="no answer to grade"):
        reward(unanswered, "hello")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "1"}, "no `question`"),
        ({"answer": ["1"], "question": "Q?"}, r"`answer` is \['1'\], and must be text"),
        ({"answer": "1", "question": 7}, "`question` is 7, and must be text"),
        ('["Q?", "1"]', "not an object"),
        ('{"question": "Q?", ', "not a line of JSON"),
        ({"answer": "3 to 5", "kind": "number"}, "`answer` '3 to 5' is not one number"),
        ({"answer": "??"}, "has no word or number"),
        ({"answer": r"\frac{1}{2"}, "has unbalanced braces"),
        ({"answer": "1", "kind": "exact"}, "`kind` is 'exact', and must be one of number, math, choice, text"),
        ({"answer": "A", "kind": "choice"}, "no `options`"),
        ({"answer": "1", "kind": "number", "options": OPTIONS}, "`options` belong to the kind choice"),
        ({"answer": "D", "options": OPTIONS}, "neither a letter from A to C nor the text of an option"),
        ({"answer": "A", "options": ["x"]}, "`options` must be two to 26 different texts"),
        ({"answer": "A", "options": ["x", "X."]}, "`options` must be two to 26 different texts"),
        ({"answer": "A", "options": ["x", 2]}, "`options` must be two to 26 different texts"),
    ],
)
def test_a_row_at_fault_is_named(source, row, message):
    if isinstance(row, dict) and row != {"answer": "1"}:
        row = {"question": "Which?", **row}
    with pytest.raises(ConfigError, match=rf"mine\.jsonl:2: .*{message}"):
        list(read_problems(source({"question": "1 + 1?", "answer": "2"}, row)))


@pytest.mark.parametrize("latex", [r"\frac{1}{2}", r"3 \times 4", r"\beta", r"\nabla f"])
def test_latex_whose_backslashes_are_not_doubled_is_refused(tmp_path, latex):
    """JSON reads them as control characters: a gold answer that no reply could equal."""
    path = tmp_path / "p.jsonl"
    path.write_text('{"question": "Which?", "answer": "1"}\n{"question": "Which, $' + latex + '$?", "answer": "2"}\n')
    with pytest.raises(
        ConfigError, match=r"p\.jsonl:2: `question` begins an escape of JSON .* write its backslashes twice"
    ):
        list(read_problems(ProblemSource(source="jsonl", path=str(path))))
    written = {"question": f"Which,\n${latex}$?\tNow.", "answer": "2"}
    path.write_text(json.dumps(written))
    (problem,) = read_problems(ProblemSource(source="jsonl", path=str(path)))
    assert problem.question == written["question"]


def test_an_expression_that_cannot_be_read_is_named(source):
    file = source({"question": "1?", "answer": "1"}, {"question": "2?", "answer": r"\operatorname{foo}(x)"})
    with pytest.raises(ConfigError, match=r"mine\.jsonl:2: .* is not an expression; give the row `\"kind\": \"text\"`"):
        check_expressions(file, list(read_problems(file)))
    text = source({"question": "2?", "answer": r"\operatorname{foo}(x)", "kind": "text"})
    check_expressions(text, list(read_problems(text)))


def test_a_file_is_read_whole_before_a_run_and_only_alignment_takes_rows_without_answer(source):
    file = source({"question": "1 + 1?", "answer": "2"}, {"question": "Say hello."})
    config = ProblemsConfig(**file.model_dump())
    check_files(config, "align")
    with pytest.raises(ConfigError, match=r"^reason\.problems\.path: .*mine\.jsonl:2: no `answer`: this stage rewards"):
        check_files(config, "reason")
    several = ProblemsConfig.model_validate({"sources": [{"source": "gsm8k"}, file.model_dump()]})
    with pytest.raises(ConfigError, match=r"^self_distill\.problems\.sources\[1\]\.path: .*mine\.jsonl:2: no `answer`"):
        check_files(several, "self_distill")


def prompt_source(folder, **changes) -> ProblemsConfig:
    """A prompt set of four rows: a conversation, one in French, a long one, and one without a prompt."""
    messages = [
        "Name a colour.",
        "Nommez une couleur que vous aimez beaucoup, s'il vous plaît.",
        "Repeat: " + 99 * "a b ",
    ]
    rows = [{"messages": [{"role": "user", "content": text}]} for text in messages]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"other": 1}]))
    prompt_set = {
        "name": "chat", "source": "jsonl", "path": str(folder / "prompts.jsonl"), "form": "messages", **changes
    }  # fmt: skip
    return ProblemsConfig.model_validate({"source": "prompts", "count": 1, "prompt_set": prompt_set})


def test_prompts_of_a_set_have_no_answers_and_are_for_alignment_alone(tmp_path):
    config = prompt_source(tmp_path, languages=["en"])
    check_files(config, "align")
    with pytest.raises(
        ConfigError, match=r"^reason\.problems\.source: its prompts have no answers: this stage rewards"
    ):
        check_files(config, "reason")
    (problem,) = load(config, 0, unanswered="keep", fits=lambda prompt: len(prompt) < 90)
    assert (problem.task, problem.question, problem.answer) == ("chat", "Name a colour.", "")
    several = config.model_copy(update={"count": 3})
    with pytest.raises(ConfigError, match=r"'prompts' has 1 distinct train problems \(1 more are longer than rollout"):
        load(several, 0, unanswered="keep", fits=lambda prompt: len(prompt) < 90)
    with pytest.raises(ConfigError, match="no guard problem with an answer"):
        load_guard(config, policy(guard_every=1), 0)


def test_a_prompt_set_of_the_hub_needs_a_commit_before_anything_runs(tmp_path):
    config = prompt_source(tmp_path, source="hub", path="owner/name", revision="main")
    with pytest.raises(ConfigError, match="`revision` 'main' is not a full commit hash of owner/name"):
        check_files(config, "align")


@pytest.mark.parametrize("fields", [{"source": "prompts"}, {"prompt_set": {"name": "a", "source": "wikipedia"}}])
def test_a_prompt_set_belongs_to_the_source_of_prompts(fields):
    with pytest.raises(ValueError, match="'prompts' and `prompt_set` belong together"):
        ProblemsConfig.model_validate({"count": 1, **fields})
