"""Surveys that cannot be asked are refused by name, and the built-in ones have the people of their data sets."""

import sys
import tomllib
from collections import Counter

import numpy as np
import pytest

from nautile.common.errors import ConfigError
from nautile.uses.simulate import reading
from nautile.uses.simulate.config import SimulateConfig
from nautile.uses.simulate.people import read_people
from nautile.uses.simulate.reading import (
    MISSING,
    choose_people,
    load_survey,
    parse_survey,
    personas_config,
    read_respondents,
    shares,
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["questions"][0].update(options=[]), "has 0 options"),
        (lambda t: t["questions"][0].update(options=["yes"]), "has 1 options"),
        (lambda t: t["questions"][0].update(options=["no", "Yes", " yes"]), "two of the options are 'yes'"),
        (lambda t: t["questions"][0].update(options=["no", " "]), "option 2 is empty"),
        (lambda t: t["questions"][0].update(humans=[0.5, 0.2, 0.1]), "`humans` sum to 0.8"),
        (lambda t: t["questions"][0].update(humans=[1.5, -0.5, 0.0]), "`humans` sum to 1"),
        (lambda t: t["questions"][0].update(humans=[0.5, 0.5]), "2 shares for 3 options"),
        (lambda t: t["questions"][0].update(groups={"age": {"old": [1.0, 1.0, 0.0]}}), "groups.age.old` sum to 2"),
        (lambda t: t["questions"][0].update(values=[1, 1, 1]), "not all equal"),
        (lambda t: t["questions"][1].update(values=[1, 2]), "`ordered` must be true"),
        (lambda t: t["questions"][1].update(name="more"), "two questions are called 'more'"),
        (lambda t: t.update(questions=[]), "has no questions"),
        (lambda t: t.update(persona="I am {age"), "is not a valid template"),
        (lambda t: t.update(persona="I am {age.real}"), "only plain field names are allowed"),
        (lambda t: t.update(persona="I am {0}"), "only plain field names are allowed"),
        (lambda t: t.update(bands={"age": [60, 30]}), "bands.age must be increasing numbers"),
        (lambda t: t.update(colour="red"), "`colour`"),
        (lambda t: t.update(respondents="anes96", persona="I vote {more}."), "the answer to question 'more'"),
    ],
)
def test_a_survey_that_cannot_be_asked_is_refused(table, change, message):
    change(table)
    with pytest.raises(ConfigError) as refusal:
        parse_survey(table, "SURVEY.toml")
    assert message in str(refusal.value)
    assert str(refusal.value).startswith("SURVEY.toml")


def test_places_on_a_scale_lie_between_0_and_1(table):
    table["questions"][0]["values"] = [1.0, 2.0, 1.5]
    assert parse_survey(table, "t").questions[0].scale == (0.0, 1.0, 0.5)
    assert load_survey("anes96").questions[1].scale[1] == 1 / 6


def test_a_file_is_read_and_a_missing_one_refused(table, tmp_path):
    with pytest.raises(ConfigError, match=r"no survey 'polls.toml'.*anes96, fair"):
        load_survey("polls.toml")
    path = tmp_path / "bad.toml"
    path.write_text("name = ", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_survey(path)


def test_the_people_of_1996_are_those_of_the_package(tmp_path, monkeypatch):
    survey = load_survey("anes96")
    respondents = read_respondents(survey, tmp_path)
    assert len(respondents.people) == 944
    # Counted by hand in the package's own file: 551 for Clinton, 393 for Dole; party 0 to 6.
    assert np.bincount(respondents.answers_NQ[:, 0]).tolist() == [551, 393]
    assert np.bincount(respondents.answers_NQ[:, 1]).tolist() == [200, 180, 108, 37, 94, 150, 175]
    assert respondents.people[0].fields["income"] == "under $3,000"
    assert "statsmodels" not in sys.modules
    assert sorted([*respondents.train, *respondents.held_out]) == list(range(944))
    monkeypatch.setattr(reading, "SPLIT_SEED", 1)
    other = read_respondents(survey, tmp_path)
    assert set(other.held_out) != set(respondents.held_out)


def test_the_women_of_1974_are_those_of_the_package(tmp_path):
    respondents = read_respondents(load_survey("fair"), tmp_path)
    assert np.bincount(respondents.answers_NQ[:, 0]).tolist() == [99, 348, 993, 2242, 2684]
    assert Counter(person.fields["education"] for person in respondents.people)["grade school"] == 48


def respondents_file(tmp_path, rows):
    path = tmp_path / "people.csv"
    path.write_text("\n".join(["age,region,more,pay", *rows, ""]), encoding="utf-8")
    return str(path)


def test_answers_are_read_by_text_or_code_and_missing_ones_stay_missing(table, tmp_path):
    table["respondents"] = respondents_file(tmp_path, ["20,north,yes,1", "70,south,,2", "40,north,no,2"])
    table["questions"][1]["codes"] = ["1", "2"]
    respondents = read_respondents(parse_survey(table, "t"), tmp_path)
    assert respondents.answers_NQ.tolist() == [[2, 0], [MISSING, 1], [0, 1]]
    assert shares(respondents.answers_NQ[:, 0], 3).tolist() == [0.5, 0.0, 0.5]
    assert shares(np.array([MISSING]), 3) is None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["20,north,perhaps,the town"], "respondent 0 has 'perhaps' in 'more', which is none of no, maybe, yes"),
        (["20,north,,the town", "30,south,,the town"], "no respondent has answered 'more'"),
        (["20,,yes,the town"], "persona 0 has no value in 'region'"),
        (["20,north,yes,the town"], "1 respondents cannot be split"),
    ],
)
def test_respondents_that_cannot_be_used_are_refused(table, tmp_path, rows, message):
    table["respondents"] = respondents_file(tmp_path, rows)
    with pytest.raises(ConfigError, match=message):
        read_respondents(parse_survey(table, "t"), tmp_path)


def test_codes_for_no_answer_are_missing_answers(table, tmp_path):
    """Of one question, of all questions, as numbers or texts; an option of that code stays an option."""
    rows = ["20,north,yes,1", "40,south,99,2", "70,south,Refused,99", "30,north,no,8", "50,north,maybe,-1"]
    table["respondents"] = respondents_file(tmp_path, rows)
    table["missing"] = ["99", "-1"]
    table["questions"][0]["missing"] = ["Refused"]
    table["questions"][1]["codes"] = ["1", "2"]
    table["questions"][1]["missing"] = ["8"]
    respondents = read_respondents(parse_survey(table, "t"), tmp_path)
    assert respondents.answers_NQ.tolist() == [[2, 0], [MISSING, 1], [MISSING, MISSING], [0, MISSING], [1, MISSING]]
    table["questions"][0]["missing"] = ["Refused", "yes"]
    with pytest.raises(ConfigError, match="'yes' is an option, and in `missing` it is no answer"):
        parse_survey(table, "t")
    del table["questions"][0]["missing"]
    with pytest.raises(ConfigError, match=r"'Refused' in 'more', which is none of .*; if it is no answer, name it in"):
        read_respondents(parse_survey(table, "t"), tmp_path)


def test_weights_of_people_are_read_and_what_is_none_is_refused(table, tmp_path):
    path = tmp_path / "people.csv"
    path.write_text("age;region;w\n20;north;0.5\n40;south;2\n70;north;0\n")
    config = personas_config(str(path), ";", "w")
    assert [person.weight for person in read_people(config, tmp_path)] == [0.5, 2.0, 0.0]
    assert shares(np.array([0, 1, 2]), 3, np.array([0.5, 1.5, 0.0])).tolist() == [0.25, 0.75, 0.0]
    for value in ("", "-1", "nan", "inf", "heavy"):
        path.write_text(f"age;region;w\n20;north;1\n40;south;{value}\n")
        with pytest.raises(ConfigError, match=f"row 2 has {value!r} in 'w', which is not a weight from 0 on"):
            read_people(config, tmp_path)
    path.write_text("age;region;w\n20;north;0\n")
    with pytest.raises(ConfigError, match="all weights in 'w' are 0"):
        read_people(config, tmp_path)
    with pytest.raises(ConfigError, match="no column 'wt'; there are age, region, w"):
        read_people(personas_config(str(path), ";", "wt"), tmp_path)


def test_personas_without_a_field_are_refused(table, tmp_path):
    survey = parse_survey(table, "t")
    path = tmp_path / "people.csv"
    path.write_text("age,region\n20,north\n", encoding="utf-8")
    config = SimulateConfig(personas=personas_config(str(path)), by=("town",))
    with pytest.raises(ConfigError, match="no field 'town', which --by names; they have age, region"):
        choose_people(survey, config, None, tmp_path)
    path.write_text("age\n20\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="no field 'region', which the template of survey parks names"):
        choose_people(survey, config, None, tmp_path)
    with pytest.raises(ConfigError, match="name whom to ask: --personas FILE"):
        choose_people(survey, SimulateConfig(), None, tmp_path)


def test_held_out_respondents_are_asked_by_default(tmp_path):
    survey = load_survey("anes96")
    respondents = read_respondents(survey, tmp_path)
    people, asked = choose_people(survey, SimulateConfig(n=20), respondents, tmp_path)
    assert len(people) == 20
    assert set(asked) <= set(respondents.held_out)
    assert [person.id for person in people] == [str(i) for i in asked]
    named, also = choose_people(survey, SimulateConfig(personas="anes96", n=20), respondents, tmp_path)
    assert (named, also.tolist()) == (people, asked.tolist())
    with pytest.raises(ConfigError, match="472 respondents are held out, and 473"):
        choose_people(survey, SimulateConfig(n=473), respondents, tmp_path)


def test_the_shipped_files_are_plain_toml_of_their_name():
    for name in ("anes96", "fair"):
        survey = load_survey(name)
        assert survey.name == name
        assert survey.licence
        assert tomllib.loads(f"persona = {survey.persona!r}")
