"""Which mathematical answers a reply states."""

import time

import pytest

from nautile.evals.graders.math_answers import candidates


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        ("Answer: The value of $x$ is $\\boxed{5}$.", ["5"]),
        ("Answer: the value of $x$ is $5$.", ["5"]),
        ("The answer is $5$ for $x = 2$.", ["5"]),
        ("The final answer is:\n\\[\n\\frac{1}{2}\n\\]", ["\\frac{1}{2}"]),
        ("**Final Answer**\n\n12", ["12"]),
        ("The answer is $\\frac12$ or $2$.", ["\\frac12", "2"]),
        ("The answer is 12 or 13.", ["12", "13"]),
        ("\\boxed{5} or 6", ["5", "6"]),
        ("\\boxed{5} (or $6$)", ["5", "$6$"]),
        ("The answer is \\boxed{5} or $6$.", ["5", "$6$"]),
        ("\\boxed{x = \\boxed{5}}", ["5"]),
        ("\\boxed{1}, no, \\boxed{2}", ["1", "2"]),
        ("The answer is $5$ million.", ["5 million"]),
        ("The answer is 12 $\\pi$.", ["12 $\\pi$"]),
        ("#### Step 1\n$2 + 2 = 4$\n#### 4", ["4"]),
        ("so $x = 3$ and $y = 4$", ["x = 3", "y = 4"]),
        ("1/2 or 2", ["1/2", "2"]),
        ("\\boxed{12", []),
        ("", []),
    ],
)
def test_what_a_reply_states(text, stated):
    assert candidates(text) == stated


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        ("\\boxed{1} and \\boxed{-2}", ["1 , -2"]),
        ("\\(\\boxed{1}\\) or \\(\\boxed{-2}\\).", ["1 , -2"]),
        ("The answer is $1$, $2$ and $3$.", ["1 , 2 , 3"]),
        ("\\boxed{1}\\boxed{2}", ["1 , 2"]),
        ("\\boxed{1, 2}. So \\boxed{1, 2}", ["1, 2", "1, 2"]),
        ("\\boxed{1}\n\n\\boxed{2}", ["1", "2"]),
        ("\\boxed{1} no no no no no \\boxed{2}", ["1", "2"]),
    ],
)
def test_an_answer_of_several_parts_may_stand_in_several_formulas(text, stated):
    assert candidates(text, several=True) == stated


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{1} " * 4000, "\\boxed{" * 4500, "$" * 30_000, "\\(" * 15_000, "the answer is $" * 2500,
        "the answer is \\boxed{1}. " * 1500, "\n" * 30_000, "\n " * 15_000, "<answer>" * 4000, "#### a b\n" * 3500,
        "answer\n" * 4500, "{" * 30_000, "or " * 11_000, "the answer is \\(" * 1000, "\\boxed{1}" + " " * 30_000,
        "$1$" + " " * 30_000 + "or", "how many " * 3500, "the answer is $1$ is " * 1500,
        "\\boxed{" * 3000 + "}" * 3000, "$1$" + "}" * 30_000,
    ],
)  # fmt: skip
def test_a_long_reply_is_read_in_linear_time(text):
    began = time.process_time()
    candidates(text)
    candidates(text, several=True)
    assert time.process_time() - began < 2
