"""Respondents of two public surveys in the package statsmodels, with their answers.

The tables are read as files of the installed package, without importing statsmodels, which takes seconds. Codes become
words, following the documentation of the data sets.
"""

import csv
import importlib.metadata
from collections.abc import Callable, Mapping
from pathlib import Path

from nautile.common.errors import ConfigError

# The codes of the ANES of 1996, in order; `INCOME_FROM` has the lowest dollars of each of its 24 bands. `OCCUPATIONS`
# and `SCHOOLING` are the codes of Fair's survey.
EDUCATION = (
    "grade school", "some high school", "a high school diploma", "some college", "a college degree",
    "a master's degree", "a doctorate",
)  # fmt: skip
INCOME_FROM = (
    0, 3000, 5000, 7000, 9000, 10000, 11000, 12000, 13000, 14000, 15000, 17000, 20000, 22000, 25000, 30000, 35000,
    40000, 45000, 50000, 60000, 75000, 90000, 105000,
)  # fmt: skip
PARTIES = (
    "strong Democrat", "weak Democrat", "independent, closer to the Democrats", "independent",
    "independent, closer to the Republicans", "weak Republican", "strong Republican",
)  # fmt: skip
LEANINGS = (
    "extremely liberal", "liberal", "slightly liberal", "moderate", "slightly conservative", "conservative",
    "extremely conservative",
)  # fmt: skip
OCCUPATIONS = (
    "a student", "a farm, unskilled or semi-skilled worker", "a white-collar worker",
    "a teacher, nurse, artist or skilled worker", "a manager or administrator",
    "a professional with an advanced degree",
)  # fmt: skip
SCHOOLING = {
    "9": "grade school", "12": "high school", "14": "some college", "16": "a college degree",
    "17": "some graduate school", "20": "an advanced degree",
}  # fmt: skip

Rows = list[dict[str, object]]


def anes96() -> Rows:
    """The 944 respondents of the American National Election Study of 1996: ten variables, public domain."""
    return [
        {
            "age": int(row["age"]),
            "education": EDUCATION[int(row["educ"]) - 1],
            "college": "college degree" if int(row["educ"]) >= 5 else "no college degree",
            "income": _income(int(row["income"]) - 1),
            "income_from": INCOME_FROM[int(row["income"]) - 1],
            "place": _place(int(row["popul"])),
            "tv_news": int(row["TVnews"]),
            "vote": ("Bill Clinton", "Bob Dole")[int(row["vote"])],
            "party": PARTIES[int(row["PID"])],
            "own_leaning": LEANINGS[int(row["selfLR"]) - 1],
            "clinton_leaning": LEANINGS[int(row["ClinLR"]) - 1],
            "dole_leaning": LEANINGS[int(row["DoleLR"]) - 1],
        }
        for row in _package_table("anes96", delimiter="\t", quotechar="'")
    ]


def fair() -> Rows:
    """The 6,366 married women of Redbook's survey of 1974 (Fair 1978); age, years and children are in classes."""
    return [
        {
            "age": float(row["age"]),
            "years_married": float(row["yrs_married"]),
            "children": "more than four" if row["children"] == "5.5" else row["children"],
            "has_children": "no children" if row["children"] == "0" else "children",
            "education": SCHOOLING[row["educ"]],
            "occupation": OCCUPATIONS[int(row["occupation"]) - 1],
            "husbands_occupation": OCCUPATIONS[int(row["occupation_husb"]) - 1],
            "marriage": ("very poor", "poor", "fair", "good", "very good")[int(row["rate_marriage"]) - 1],
            "religious": ("not religious", "mildly religious", "fairly religious", "strongly religious")[
                int(row["religious"]) - 1
            ],
        }
        for row in _package_table("fair")
    ]


BUILT_IN: Mapping[str, Callable[[], Rows]] = {"anes96": anes96, "fair": fair}


def _income(band: int) -> str:
    low = INCOME_FROM[band]
    if band == len(INCOME_FROM) - 1:
        return f"${low:,} or more"
    return f"${low:,} to ${INCOME_FROM[band + 1] - 1:,}" if band else f"under ${INCOME_FROM[1]:,}"


def _place(thousands: int) -> str:
    """The size of a place in words, from thousands of inhabitants; 0 is the country or a place of under a thousand."""
    if thousands == 0:
        return "the country or a village"
    sizes = ((10, "a small town"), (50, "a town"), (500, "a city"))
    return next((name for below, name in sizes if thousands < below), "a big city")


def _package_table(name: str, delimiter: str = ",", quotechar: str = '"') -> list[dict[str, str]]:
    """The rows of a CSV file in statsmodels. Raises `ConfigError` if it is not installed or cannot be read."""
    try:
        package = importlib.metadata.distribution("statsmodels")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"the survey {name!r} is in the package statsmodels, which is not installed: pip install 'nautile[survey]'"
        ) from None
    path = Path(str(package.locate_file(f"statsmodels/datasets/{name}/{name}.csv")))
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file, delimiter=delimiter, quotechar=quotechar))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); install statsmodels again") from None
