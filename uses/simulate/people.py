"""People (personas) with named fields: read them from a file, the Hub or a package, or draw them from margins; group
them by a field, and describe them in words.

The respondents of two public surveys are in the package statsmodels. Their tables are read as files of the installed
package, without importing it, which takes seconds. Codes become words, as the data sets are documented.
"""

import csv
import importlib.metadata
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from nautile.common.errors import ConfigError
from nautile.common.extras import how_to_install
from nautile.common.files import read_bounded_toml, sha256_of
from nautile.data.sources.hub import describe, fetch_hub_file, list_hub_files, named_in_errors
from nautile.data.sources.local_files import is_parquet, parquet_columns, read_json_values, read_parquet_values
from nautile.data.table import is_missing, read_table
from nautile.uses.simulate.config import SUM_TOLERANCE, PersonasConfig, SurveyConfig

MOST_GROUPS = 60  # of one field
LONGEST_PERSONA = 20_000  # characters

Digests = Mapping[str, str]  # path as configured -> expected sha256
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


@dataclass(frozen=True)
class Person:
    """One person. `fields`: values as in the table; None and empty text mean unknown (`is_missing`).

    weight: of the person in all means, as surveys publish them; at least 0.
    """

    id: str
    fields: Mapping[str, Any]
    weight: float = 1.0


@dataclass(frozen=True)
class PeopleGroup:
    """The people who share a value of the field `by`. `members`: their positions in the list of people."""

    by: str
    name: str
    members: np.ndarray


def read_people(
    config: PersonasConfig, scratch: Path, n: int | None = None, seed: int = 0, digests: Digests | None = None
) -> list[Person]:
    """Read the people of a table, or `n` of them: a random sample of a file, draws from margins, the first of the Hub.

    Raises `ConfigError` for a table that cannot be read, that has fewer than `n` people, or the same id twice.
    """
    sha256 = (digests or {}).get(config.path, "")
    match config.reader:
        case "margins":
            if n is None:
                raise ConfigError(f"{config.path}: people drawn from margins need a number of them: -n 1000")
            return draw_from_margins(Path(config.path), n, seed, sha256)
        case "built_in":
            people = _with_ids(BUILT_IN[config.path](), config)
        case "hub":
            if n is None:
                raise ConfigError(f"{config.label}: a dataset of the Hub may have millions; say how many: -n 1000")
            people = _with_ids(islice(_hub_rows(config, scratch), n), config)
        case _:
            table = read_table(config.path, sha256=sha256, delimiter=config.delimiter, encoding=config.encoding)
            people = _with_ids(table.rows, config)
    if n is not None and n > len(people):
        raise ConfigError(f"{config.label}: has {len(people)} people, and {n} were asked for; give a smaller -n")
    if n is None or n == len(people):
        return people
    sample = np.random.default_rng(seed).choice(len(people), n, replace=False)
    return [people[i] for i in sorted(sample.tolist())]


def draw_from_margins(path: Path, n: int, seed: int, sha256: str = "") -> list[Person]:
    """Draw `n` people from a TOML file of margins: `[margins.age]` with a share for each value, which sum to 1.

    The fields are drawn independently. Raises `ConfigError` for an invalid file, or one with another digest than
    `sha256`.
    """
    table = read_bounded_toml(path)
    if sha256 and sha256_of(path) != sha256:
        raise ConfigError(f"{path}: has changed since its digest was taken; run the command again")
    margins = table.get("margins")
    if set(table) != {"margins"} or not isinstance(margins, dict) or not margins:
        raise ConfigError(f"{path}: must have tables [margins.FIELD] with a share for each value, and nothing else")
    draw = np.random.default_rng(seed)
    drawn: dict[str, list[str]] = {}
    for field, shares in margins.items():
        if not isinstance(shares, dict) or not all(
            isinstance(share, int | float) and not isinstance(share, bool) and share >= 0 for share in shares.values()
        ):
            raise ConfigError(f"{path}: margins.{field} must be a table of shares")
        total = math.fsum(shares.values())
        if not abs(total - 1) <= SUM_TOLERANCE:
            raise ConfigError(f"{path}: the shares of margins.{field} sum to {total:.4g}, not to 1")
        # Divided by their sum: numpy is stricter about a sum of 1 than a person who writes 0.333.
        indexes = draw.choice(len(shares), size=n, p=np.array(list(shares.values()), float) / total)
        drawn[field] = [list(shares)[i] for i in indexes.tolist()]
    return [Person(str(i), {field: values[i] for field, values in drawn.items()}) for i in range(n)]


def require_fields(people: Sequence[Person], fields: Iterable[str], why: str, label: str) -> None:
    """Raise `ConfigError` naming the first person without a value in one of `fields`; `why`: why it is needed."""
    for field in fields:
        for person in people:
            if field not in person.fields:
                field_names = ", ".join(person.fields) or "none"
                raise ConfigError(f"{label}: the personas have no field {field!r}, {why}; they have {field_names}")
            if is_missing(person.fields[field]):
                raise ConfigError(f"{label}: persona {person.id} has no value in {field!r}, {why}")


def groups_of(
    people: Sequence[Person], by: Sequence[str], bands: Mapping[str, Sequence[float]], label: str
) -> list[PeopleGroup]:
    """Group people by each field in `by`: bands in order, other values sorted. Unknown values are in no group.

    Raises `ConfigError` for a banded field that is no number, and for a field with too many distinct values.
    """
    groups = []
    for field in by:
        members: dict[tuple[int, str], list[int]] = {}
        for i, person in enumerate(people):
            value = person.fields.get(field)
            if not is_missing(value):
                members.setdefault(_group(value, bands.get(field), field, person.id, label), []).append(i)
        if len(members) > MOST_GROUPS:
            raise ConfigError(
                f"{label}: {field!r} has {len(members)} values, more than {MOST_GROUPS} groups; give the survey bands "
                f"for it ([bands] {field} = [30, 45, 60]) or group by another field"
            )
        groups += [PeopleGroup(field, name, np.array(members[order, name])) for order, name in sorted(members)]
    return groups


def group_name(value: Any, edges: Sequence[float] | None) -> str:
    """The name of the group of a value: the value itself, or its band. Raises `ValueError` for a band of no number."""
    return _band(float(value), edges)[1] if edges else text_of(value)


def text_of(value: Any) -> str:
    """A field's value as text on one line; whole numbers have no decimal point."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return " ".join(str(value).split())


def persona_text(survey: SurveyConfig, person: Person) -> str:
    """The survey's persona template, filled with a person's fields. Braces in a value are not interpreted."""
    words = survey.persona.format_map({field: text_of(person.fields[field]) for field in survey.persona_fields})
    if len(words) > LONGEST_PERSONA:
        raise ConfigError(f"survey {survey.name}: the words of persona {person.id} have {len(words)} characters")
    return words.strip()


def _group(value: Any, edges: Sequence[float] | None, field: str, person: str, label: str) -> tuple[int, str]:
    """(sort key, name) of the group of a value."""
    if not edges:
        return 0, text_of(value)
    try:
        return _band(float(value), edges)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(
            f"{label}: persona {person} has {value!r} in {field!r}, which is not a number, so it has no band"
        ) from None


def _band(number: float, edges: Sequence[float]) -> tuple[int, str]:
    if math.isnan(number):  # of the text "nan", and at least as large as no edge: it would be in the lowest band
        raise ValueError("not a number")
    index = sum(number >= edge for edge in edges)
    if index == 0:
        return 0, f"under {text_of(float(edges[0]))}"
    if index == len(edges):
        return index, f"{text_of(float(edges[-1]))} and over"
    return index, f"{text_of(float(edges[index - 1]))} to under {text_of(float(edges[index]))}"


def _with_ids(rows: Iterable[Mapping[str, Any]], config: PersonasConfig) -> list[Person]:
    """Turn rows into people, with ids from `id_column` or by number. Raises `ConfigError` for a bad row or id."""
    people, ids = [], set()
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ConfigError(f"{config.label}: row {number + 1} is not a record with named fields")
        if config.id_column and is_missing(row.get(config.id_column)):
            raise ConfigError(f"{config.label}: row {number + 1} has no {config.id_column!r}, which names a person")
        person_id = text_of(row[config.id_column]) if config.id_column else str(number)
        if person_id in ids:
            raise ConfigError(f"{config.label}: two people are called {person_id!r} in column {config.id_column!r}")
        ids.add(person_id)
        people.append(Person(person_id, dict(row), _weight(row, config, number + 1)))
    if not people:
        raise ConfigError(f"{config.label}: has no people")
    if not any(person.weight for person in people):
        raise ConfigError(f"{config.label}: all weights in {config.weight_column!r} are 0")
    return people


def _weight(row: Mapping[str, Any], config: PersonasConfig, number: int) -> float:
    """The weight in a row. Raises `ConfigError` for one that is no number from 0 on: a person has to count for some."""
    if not config.weight_column:
        return 1.0
    if config.weight_column not in row:
        raise ConfigError(f"{config.label}: no column {config.weight_column!r}; there are {', '.join(row)}")
    value = row[config.weight_column]
    try:
        weight = float(value)
    except (TypeError, ValueError, OverflowError):
        weight = math.nan
    if not 0 <= weight < math.inf:
        raise ConfigError(
            f"{config.label}: row {number} has {value!r} in {config.weight_column!r}, which is not a weight from 0 on"
        )
    return weight


def _hub_rows(config: PersonasConfig, scratch: Path) -> Iterator[Mapping[str, Any]]:
    """The rows of a dataset's files in the Hub's order; each file is downloaded when its first row is needed."""
    for file in list_hub_files(config):
        path = fetch_hub_file(config, file, scratch / "hub")
        name = describe(config, file.path)
        try:
            with named_in_errors(path, name):
                columns = parquet_columns(path) if is_parquet(file.path) else None
                for row in read_json_values(path) if columns is None else read_parquet_values(path, columns):
                    if not isinstance(row, Mapping):
                        raise ConfigError(f"{name}: has a row that cannot be read ({row})")
                    yield row
        finally:
            path.unlink(missing_ok=True)


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
            f"the survey {name!r} needs the package statsmodels, which is missing: {how_to_install('statsmodels')}"
        ) from None
    path = Path(str(package.locate_file(f"statsmodels/datasets/{name}/{name}.csv")))
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file, delimiter=delimiter, quotechar=quotechar))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); install statsmodels again") from None
