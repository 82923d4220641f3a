import time
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nautile.evals.graders import numbers
from nautile.evals.graders.grading import grade_number

# answer, expected, strict, lenient
HARD = [
    ("$1,234.50", "1234.5", True, True),
    ("US$12", "12", True, True),
    ("12 €", "12", True, True),
    ("12 or 13", "12", False, False),
    ("12 or 13", "13", False, True),
    ("two or three", "3", False, True),
    ("1/2", "0.5", True, True),
    ("0.50", "1/2", True, True),
    ("3/4 cup", "0.75", True, True),
    ("2 1/2", "2.5", True, True),
    ("2 and 1/2 cups", "2.5", True, True),
    ("½", "0.5", True, True),
    ("2½", "2.5", True, True),
    ("-\\frac{1}{2}", "-0.5", True, True),
    ("1/0", "1", False, False),
    ("3:4", "0.75", False, False),
    ("-5", "-5", True, True),
    ("−5", "-5", True, True),
    ("-$5", "-5", True, True),
    ("$-5", "-5", True, True),
    ("negative 5", "-5", True, True),
    ("minus five", "-5", True, True),
    ("x = - 5", "-5", True, True),
    ("x = - 5", "5", False, False),
    ("±3", "3", False, False),
    ("10 - 4", "6", False, False),
    ("12-15", "15", False, True),
    ("12–15", "12", False, False),
    ("\\boxed{42}", "42", True, True),
    ("$\\boxed{\\frac{3}{4}}$", "0.75", True, True),
    ("$\\frac3{4}$", "0.75", True, True),
    ("$\\cfrac{3}4$", "0.75", True, True),
    ("\\boxed{11,\\! 111}", "11111", True, True),
    ("$x\\approx11$", "11", True, True),
    ("#### Step 1\n2 + 2 = 4\n#### Step 2\n4 + 3 = 7\n#### 7", "7", True, True),
    ("#### Step 1\n2 + 2 = 4\nThe answer is 4.", "4", True, True),
    ("#### Step 1\n2 + 2 = 4\nThe answer is 4.", "1", False, False),
    ("12. No, 13. Yes: 12", "12", False, True),
    ("The answer is 12 (or 13).", "12", False, False),
    ("The answer is 12. The answer could also be 13.", "12", False, False),
    ("The answer is 2**3", "23", False, False),
    ("The final answer is: $\\boxed{18}$. I hope it is correct.", "18", True, True),
    ("\\boxed{1}, so \\boxed{2}", "2", False, True),
    ("3 + 4 = 7\n#### 7", "7", True, True),
    ("The answer is 12.", "12", True, True),
    ("The answer is 12, not 13.", "12", True, True),
    ("It is not 13 but 12.", "12", True, True),
    ("The answer is not 12.", "12", False, False),
    ("The answer isn't 12.", "12", False, False),
    ("The answer is either 12 or 13.", "13", False, True),
    ("I don't think the answer is 12.", "12", False, False),
    ("The answer cannot be 12.", "12", False, False),
    ("A common wrong answer is 11. The correct answer is 12.", "12", True, True),
    ("Is the answer 12?", "12", False, False),
    ("How many are 5.5 and 6.5 apples? 12", "12", True, True),
    ("The answer is 12. No: the answer is 13.", "13", False, True),
    ("$\\boxed{1.5\\times10^{-3}}$", "0.0015", True, True),
    ("\\boxed{12^\\circ}", "12", True, True),
    ("\\boxed{12\\ \\text{m}^{3}}", "12", True, True),
    ("\\boxed{ - 12 }", "-12", True, True),
    ("\\boxed{- 12}", "12", False, False),
    ("- 12", "12", True, True),  # a bullet
    ("20$ - 8$", "8", False, True),
    ("\\boxed{1", "1", False, False),
    ("3 + 9 = 12\n\\boxed{\\text{done}}", "12", False, False),
    ("\\boxed{\\boxed{12}}", "12", True, True),
    ("\\boxed{\\left(12\\right)}", "12", True, True),
    ("\\sqrt{12}", "12", False, False),
    ("12π", "12", False, False),
    ("\\boxed{12i}", "12", False, False),
    ("\\boxed{3 + 4i}", "3", False, False),
    ("\\boxed{2\\sqrt{3}}", "2", False, False),
    ("\\boxed{\\frac{\\sqrt{3}}{2}}", "2", False, False),
    ("\\boxed{\\log_2 8}", "8", False, False),
    ("\\boxed{x_{12}}", "12", False, False),
    ("\\boxed{a+12}", "12", False, False),
    ("\\boxed{12!}", "12", False, False),
    ("The answer is 12!", "12", True, True),
    ("$\\sqrt{144} = 12$", "12", True, True),
    ("x > 12", "12", False, False),
    ("\\boxed{x \\ge 12}", "12", False, False),
    ("The answer is less than 12.", "12", False, False),
    ("The answer is 12 or more", "12", False, False),
    ("The answer is 3 more than 12", "3", False, False),
    ("The answer is twice 12", "12", False, False),
    ("She has 12, which is more than 9.", "12", True, True),
    ("3*4=<<3*4=12>>12", "12", True, True),
    ("<b>12</b>", "12", True, True),
    ("No one knows", "1", False, False),
    ("One of them is wrong", "1", False, False),
    ("Answer: 12 because 5 + 7 are 12", "12", True, True),
    ("**Final answer:** 18", "18", True, True),
    ("She had 3, then 4, so the answer is 7.", "7", True, True),
    ("She had 3, then 4, so 7", "7", False, True),
    ("Let me see: 12. Wait, 13.", "13", False, True),
    ("5 + 7 = 12", "12", True, True),
    ("5 + 7", "12", False, False),
    ("x = 3 or x = -3", "3", False, False),
    ("3 + 4 = 7\n7 * 2 = 14", "14", False, True),
    ("12.0 = 12", "12", True, True),
    ("12 apples", "12", True, True),
    ("12km", "12", True, True),
    ("60 km/h", "60", True, True),
    ("5 m²", "5", True, True),
    ("50%", "50", True, True),
    ("50\\%", "50", True, True),
    ("50 percent", "50", True, True),
    ("50%", "0.5", False, True),
    ("0.5", "50%", False, True),
    ("1.5e3", "1500", True, True),
    ("1.5E-3", "0.0015", True, True),
    ("$1.5 \\times 10^{3}$", "1500", True, True),
    ("1.5×10⁻³", "0.0015", True, True),
    ("10^6", "1000000", True, True),
    ("2^3", "8", False, False),
    ("5²", "5", False, False),
    ("3 million", "3000000", True, True),
    ("20k", "20000", True, True),
    ("300 K", "300", True, True),
    ("2 dozen", "24", True, True),
    ("Twenty-one shells", "21", True, True),
    ("one hundred and five", "105", True, True),
    ("two thousand three hundred", "2300", True, True),
    ("12 (twelve)", "12", True, True),
    ("1,234", "1234", True, True),
    ("1 234", "1234", False, True),
    ("1\u202f234", "1234", True, True),
    ("1'234", "1234", True, True),
    ("1{,}234", "1234", True, True),
    ("1.234,50", "1234.5", True, True),
    ("12,34,567", "1234567", True, True),
    ("3,14", "3.14", False, True),
    ("٣٤", "34", True, True),
    ("١٬٢٣٤٫٥", "1234.5", True, True),
    ("१२", "12", True, True),
    ("１２", "12", True, True),
    ("๑๒", "12", True, True),
    ("[1, 2, 3]", "6", False, False),
    ("1, 2, 3", "3", False, True),
    ("12:30", "12", False, False),
    ("On 3/4/2020 she had 5", "5", False, True),
    ("012", "12", True, True),
    (".5", "0.5", True, True),
    ("5.", "5", True, True),
    ("(12)", "12", True, True),
    ("`12`", "12", True, True),
    ("H2O", "2", False, False),
    ("70 000", "70000", False, True),
    ("The answer is 1 000.", "1000", False, True),
    ("100 200 300 4", "100200300", False, False),
    ("0,75", "0.75", True, True),
    ("The answer is 45 miles (60 - 15).", "45", True, True),
    ("Answer: 2 hours (120 minutes)", "2", True, True),
    ("The answer is 366 downloads over 3 months.", "366", True, True),
    ("The answer is 5 out of 8", "5", True, True),
    ("The answer is 5 out of 8", "8", False, False),
    ("The answer is $20 for 4 people", "20", True, True),
    ("The answer is: in 3 days she walks 12 km", "12", False, True),
    ("The answer is (12)", "12", True, True),
    ("The answer is 18x.", "18", False, False),
    ("The answer is 18 + y", "18", False, False),
    ("5x", "5", False, False),
    ("$15/h", "15", True, True),
    ("the 5th", "5", False, False),
    ("between 15 and 18", "18", False, False),
    ("half a dozen", "6", True, True),
    ("half a dozen", "12", False, False),
    ("The answer is two thirds.", "2/3", True, True),
    ("The answer is two thirds.", "2", False, False),
    ("three-quarters", "0.75", True, True),
    ("3 quarters", "3", True, True),  # coins
    ("one half", "1", False, False),
    ("one and a half", "1.5", True, True),
    ("one and a half", "1", False, False),
    ("2 and a half", "2.5", True, True),
    ("3^2", "9", False, False),
    ("I do not know", "12", False, False),
    ("", "12", False, False),
    (" \n\t", "12", False, False),
    ("1e999", "1", False, False),
    # an index makes a number of another base
    ("\\boxed{5_2}", "5", False, False),
    ("\\boxed{5_2}", "52", False, False),
    ("101_{2}", "101", False, False),
    ("\\boxed{18_{10}}", "18", True, True),
    ("The answer is _18_.", "18", True, True),
    # a time, and an amount in several units, of which none is the whole
    ("1h30", "1", False, False),
    ("1h30", "30", False, False),
    ("The answer is 1 hour and 30 minutes.", "30", False, False),
    ("The answer is 2 1/2 hours and 30 minutes", "2.5", False, False),
    ("one hour and thirty minutes", "30", False, False),
    ("5:30 PM", "30", False, False),
    ("At 5:30 she had 12", "12", True, True),
    ("5'6\"", "5", False, False),
    ("5ft6in", "5", False, False),
    ("3,000 dollars and 50 cents", "3000", False, False),
    ("3x2", "3", False, False),
    ("12m2", "12", True, True),
    ("2 hours 30 minutes = 150 minutes", "150", True, True),
    # a bound
    ("The answer is over 18.", "18", False, False),
    ("The answer is under 18.", "18", False, False),
    ("\\boxed{\\text{over }18}", "18", False, False),
    ("below eighteen", "18", False, False),
    ("The answer is not less than 18", "18", False, False),
    ("exceeds 18", "18", False, False),
    ("half of thirty-six", "36", False, False),
    ("The total is 18 over 3 days", "18", True, True),
    ("The answer is 18 over 4", "18", False, False),
    # a decimal comma, where it is neither a group of thousands nor a list
    ("12,5", "12.5", False, True),
    ("\\boxed{12,5}", "12.5", False, True),
    ("(12,5)", "12.5", False, False),
    ("12, 5", "12.5", False, False),
    ("1,2,3", "2.3", False, False),
    ("12,5", "125", False, False),
    ("1,234 km", "1.234", False, False),
    ("12,50 €", "12.5", True, True),
    ("€12,50", "12.5", True, True),
    ("12,5 %", "12.5", True, True),
    ("12,5\\%", "12.5", True, True),
    ("La réponse est 12,5 km.", "12.5", True, True),
    ("12,05", "12.05", True, True),
    ("\\boxed{12{,}5}", "12.5", True, True),
    ("\\boxed{2,3\\text{ cm}}", "2.3", False, True),
    # what it is measured against
    ("18 out of 100", "18", True, True),
    ("18 out of 100", "100", False, False),
    ("\\boxed{18 \\text{ out of } 100}", "18", True, True),
    ("eighteen out of one hundred", "18", True, True),
    ("18 of the 100", "18", True, True),
    ("20% of 50", "20", False, False),
    ("1/2 of 36", "0.5", False, False),
    # the problem repeated
    ("She is 7 years older than he and twice his age. How old is he?", "7", False, False),
    ("He has 25 of each. What is the percentage of each?", "25", False, False),
    ("She invited 4 friends. How much does each have", "4", False, False),
    ("Apples cost $4. Calculate her change.", "4", False, False),
    ("She has 4. How many are left? 12", "12", True, True),
    ("Calculate the total: 12", "12", True, True),
    ("3 + 9 = 12\nWhat is the total?", "12", True, True),
    ("12. Do you need anything else?", "12", True, True),
    ("12. What's next?", "12", True, True),
    ("1" * 5000, "1", False, False),
]


@pytest.mark.parametrize(("answer", "expected", "strict", "lenient"), HARD)
def test_hard_numbers(reply, answer, expected, strict, lenient):
    verdict = grade_number(reply(answer), expected)
    assert (verdict.strict, verdict.lenient) == (strict, lenient), verdict


@given(st.fractions(min_value=-(10**9), max_value=10**9, max_denominator=1000))
def test_what_is_shown_is_read_back(value):
    assert numbers.candidates(str(numbers.Number(value))) == [numbers.Number(value)]


@given(st.integers(-(10**12), 10**12))
def test_grouped_and_plain_digits_are_one_number(value):
    assert numbers.parse_number(f"{value:,}") == numbers.parse_number(f"\\boxed{{{value}}}") == numbers.Number(value)


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**12), max_value=10**12, places=4))
def test_decimals_are_exact(value):
    assert numbers.parse_number(f"{value:f}").value == Fraction(value)


@given(st.text())
@example("\\boxed{" * 50)
@example("²³½⅓٣" * 20)
@example("1,2/3 " * 200)
@example("answer is " * 100)
@example("thousand " * 5000)
def test_no_text_breaks_the_parser(text):
    assert all(isinstance(candidate, numbers.Number) for candidate in numbers.candidates(text))


def test_several_numbers_are_no_number():
    assert numbers.parse_number("3 and 4") is None
    assert numbers.parse_number("none") is None


@pytest.mark.parametrize(
    "text",
    [
        "5 5" + " " * 100_000 + "of", "5" + "\n" * 100_000, "how many " * 8000, "what is " * 8000, "find " * 8000,
        "5 hours " * 5000, "5 of " * 8000, "over 5 " * 5000, "5_" * 20_000, "thousand " * 5000, "1,5 km" * 5000,
    ],
)  # fmt: skip
def test_a_long_reply_is_read_in_linear_time(text):
    began = time.process_time()
    numbers.candidates(text)
    assert time.process_time() - began < 10
