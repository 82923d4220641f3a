"""SubPOP's records and a wave of OpinionQA, in their own schemas; and what a model learns from human shares."""

import csv
import dataclasses
import json

import numpy as np
import pytest

from nautile.common.errors import ConfigError
from nautile.data.sources.hub import SourceFile
from nautile.uses.labelled.config import LabelledDataConfig
from nautile.uses.labelled.rows import read_rows
from nautile.uses.simulate import people, reading
from nautile.uses.simulate.config import SimulateConfig
from nautile.uses.simulate.prompts import training_rows
from nautile.uses.simulate.reading import choose_people, load_survey, parse_survey, personas_config, read_respondents

RECORD = {
    "qkey": "FUTR_ABR_W92",
    "attribute": "POLPARTY",
    "group": "Democrat",
    "responses": [0.5, 0.3, 0.2],
    "refusal_rate": 0.01,
    "ordinal": [1.0, 2.0, 3.0],
    "question": "How will it be?",
    "options": ["Better", "The same", "Worse", "Refused"],
}
RECORDS = [
    RECORD,
    RECORD | {"group": "Republican", "responses": [0.2, 0.3, 0.5]},
    RECORD | {"attribute": "SEX", "group": "Female", "responses": [0.4, 0.3, 0.3]},
    RECORD
    | {
        "qkey": "PARTY LIKE-2",
        "options": ["Red", "Blue", "Refused"],
        "responses": [0.6, 0.4],
        "ordinal": [1, 1],
        "question": "Which colour?",
    },
]


def subpop(tmp_path, records=RECORDS):
    path = tmp_path / "subpop_train.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_subpop_becomes_questions_with_groups(tmp_path):
    survey = load_survey(subpop(tmp_path))
    first, second = survey.questions
    assert first.options == ("Better", "The same", "Worse")
    assert (first.ordered, first.values, second.ordered) == (True, (1.0, 2.0, 3.0), False)
    assert first.groups == {
        "POLPARTY": {"Democrat": (0.5, 0.3, 0.2), "Republican": (0.2, 0.3, 0.5)},
        "SEX": {"Female": (0.4, 0.3, 0.3)},
    }
    assert second.name == "PARTY_LIKE_2"
    people, asked = choose_people(survey, SimulateConfig(by=("POLPARTY",)), None, tmp_path)
    assert asked is None
    assert [(person.fields["attribute"], person.fields["group"]) for person in people] == [
        ("Party", "Democrat"),
        ("Party", "Republican"),
        ("Sex", "Female"),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"responses": [0.5, 0.5]}, "2 responses for 4 options with a refusal"),
        ({"responses": [0.5, 0.3, 0.1], "group": "Other"}, "sum to 0.9"),
        ({"ordinal": [1, 2]}, "2 places on the scale for 3 options"),
        ({}, "has the group 'Democrat' twice"),
        ({"group": "Other", "question": "Else?"}, "another text, options or scale than before"),
        ({"options": "Better"}, "must be lists"),
        ({"ordinal": [[1], [2], [3]]}, r"row \d+: \[\[1\], \[2\], \[3\]\] are not numbers"),
        ({"group": None}, r"row \d+: has no value in column 'group'"),
        ({"question": " "}, r"row \d+: has no value in column 'question'"),
    ],
)
def test_records_that_are_none_are_refused_by_row(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        load_survey(subpop(tmp_path, [*RECORDS, RECORD | change]))


@pytest.mark.parametrize(
    ("module", "read"),
    [
        (reading, lambda name, _folder: load_survey(name)),
        (people, lambda name, folder: people.read_people(personas_config(name), folder, 3)),
    ],
)
def test_a_damaged_file_of_the_hub_is_named_by_its_data_set(tmp_path, monkeypatch, module, read):
    def fetch(config, file, folder):
        path = folder / file.path
        path.parent.mkdir(parents=True)
        path.write_bytes(b"\x00")
        return path

    monkeypatch.setattr(module, "list_hub_files", lambda config: [SourceFile(0, "data/train.jsonl")])
    monkeypatch.setattr(module, "fetch_hub_file", fetch)
    with pytest.raises(ConfigError, match=r"somebody/people at aaaaaaaaaaaa, data/train\.jsonl: is binary") as caught:
        read(f"somebody/people@{'a' * 40}", tmp_path)
    assert str(tmp_path) not in str(caught.value)


def wave(tmp_path):
    folder = tmp_path / "American_Trends_Panel_W26"
    folder.mkdir()
    yes = "{1.0: 'Yes', 2.0: 'No', 99.0: 'Refused'}"
    with (folder / "info.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(
            [
                ["", "Unnamed: 0.1", "Unnamed: 0", "key", "option_mapping", "question", "references", "option_ordinal"],
                [
                    0,
                    0,
                    0,
                    "SAFECRIME_W26",
                    yes,
                    "How safe, if at all, is it?",
                    "['Safe', 'Not safe', 'Refused']",
                    "[1.0, 2.0]",
                ],
                [1, 1, 1, "REASON_W26", yes, "Why?", "['Sport', 'Work', 'Refused']", "[1, 1]"],
                [2, 2, 2, "NOBODY_W26", yes, "Who?", "['Yes', 'No', 'Refused']", "[1.0, 2.0]"],
            ]
        )
    entry = {"MC_options": ["Safe", "Not safe", "Refused"], "question_text": "How safe, if at all, is it?"}
    counts = {
        "SAFECRIME_W26": entry | {"Female": {"Not safe": 30.0, "Refused": 5.0, "Safe": 10.0}, "Male": {"Safe": 60.0}},
        "REASON_W26": entry | {"Female": {"Sport": 1.0, "Work": 3.0}, "Male": {"Refused": 2.0}},
    }
    (folder / "SEX_data.json").write_text(json.dumps(counts), encoding="utf-8")
    (folder / "RACE_SEX_data.json").write_text(json.dumps({"SAFECRIME_W26": entry}), encoding="utf-8")
    return folder


def test_a_wave_of_opinion_qa_becomes_questions_with_counts(tmp_path):
    survey = load_survey(wave(tmp_path))
    safe, reason = survey.questions
    assert (safe.options, safe.ordered, reason.ordered) == (("Safe", "Not safe"), True, False)
    assert safe.groups == {"SEX": {"Female": (0.25, 0.75), "Male": (1.0, 0.0)}}
    assert (safe.humans, safe.respondents) == ((0.7, 0.3), 100)  # 70 of 100 who did not refuse
    assert reason.groups == {"SEX": {"Female": (0.25, 0.75)}}  # all the men refused


def test_the_file_without_a_name_has_the_counts_by_party_and_there_is_none_of_everybody(tmp_path):
    """As in the authors' waves 26, 27 and 29: a count by party of the same people as in every other file."""
    folder = wave(tmp_path)
    parties = {
        "MC_options": ["Safe", "Not safe", "Refused"], "question_text": "How safe, if at all, is it?",
        "Democrat": {"Not safe": 20.0, "Refused": 3.0, "Safe": 30.0}, "Refused": {"Safe": 10.0},
        "Republican": {"Not safe": 10.0, "Refused": 2.0, "Safe": 30.0},
    }  # fmt: skip
    (folder / "NONE_data.json").write_text(json.dumps({"SAFECRIME_W26": parties}), encoding="utf-8")
    safe = load_survey(folder).questions[0]
    assert safe.groups["POLPARTY"] == {"Democrat": (0.6, 0.4), "Republican": (0.75, 0.25)}
    # Those who named no party are among everybody.
    assert (safe.humans, safe.respondents) == ((0.7, 0.3), 100)
    (folder / "POLPARTY_data.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="has counts by POLPARTY, and so has another file"):
        load_survey(folder)


def test_counts_of_none_of_the_options_are_refused(tmp_path):
    folder = wave(tmp_path)
    counts = {"REASON_W26": {"Female": {"1.0": 4.0}, "Male": {"2.0": 5.0}}}
    (folder / "SEX_data.json").write_text(json.dumps(counts), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"info\.csv: row 2: nobody chose one of the options 'Sport', 'Work'"):
        load_survey(folder)


@pytest.mark.parametrize("count", ["many", None, 10**400])
def test_counts_that_are_no_numbers_are_refused(tmp_path, count):
    folder = wave(tmp_path)
    (folder / "SEX_data.json").write_text(json.dumps({"REASON_W26": {"Female": {"Sport": count}}}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"info\.csv: row 2, SEX: .* are not numbers"):
        load_survey(folder)


def test_a_folder_without_counts_is_refused(tmp_path):
    folder = wave(tmp_path)
    (folder / "SEX_data.json").unlink()
    with pytest.raises(ConfigError, match="has no counts of answers by group"):
        load_survey(folder)
    (folder / "SEX_data.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigError, match="must be an object"):
        load_survey(folder)


def test_published_shares_become_rows_to_learn_from(tmp_path):
    survey = load_survey(subpop(tmp_path))
    rows, left_out = training_rows(survey, SimulateConfig(seed=1), None)
    assert left_out == 0
    assert [row["source"] for row in rows] == ["POLPARTY=Democrat"] * 2 + ["POLPARTY=Republican", "SEX=Female"]
    for row in rows:
        lines = row["prompt"].splitlines()
        listed = {line.partition(". ")[0]: line.partition(". ")[2] for line in lines if line[1:3] == ". "}
        assert list(listed) == row["options"]
        assert "Answer as this person would." in lines
    democrat = rows[0]
    order = [line.partition(". ")[2] for line in democrat["prompt"].splitlines() if line[1:3] == ". "]
    assert dict(zip(order, democrat["shares"], strict=True)) == {"Better": 0.5, "The same": 0.3, "Worse": 0.2}


def test_rows_of_respondents_are_the_shares_of_their_group_and_read_by_tune(tmp_path):
    survey = load_survey("anes96")
    respondents = read_respondents(survey, tmp_path)
    config = SimulateConfig(by=("college",), answer="text")
    rows, left_out = training_rows(survey, config, respondents)
    assert left_out == 0
    assert len(rows) == 5 * 472
    assert not {row["source"] for row in rows} & {respondents.people[i].id for i in respondents.held_out}
    train = [respondents.people[i] for i in respondents.train]
    votes = respondents.answers_NQ[respondents.train, 0]
    group = [i for i, person in enumerate(train) if person.fields["college"] == train[0].fields["college"]]
    expected = (votes[group] == 0).mean()
    first = dict(zip(rows[0]["options"], rows[0]["shares"], strict=True))
    assert first["Bill Clinton"] == pytest.approx(expected)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = LabelledDataConfig(reader="jsonl", path=str(path), source_column="source")
    assert read_rows(data, "opinions", tmp_path)[0].shares == pytest.approx(rows[0]["shares"])
    with pytest.raises(ConfigError, match="--by town"):
        training_rows(survey, SimulateConfig(by=("town",)), respondents)


@pytest.mark.parametrize(
    ("age", "message"),
    [
        ("", "--by age: respondent 3 of survey s has no such field"),
        ("old", "--by age: respondent 3 of survey s has 'old', which has no band"),
    ],
)
def test_a_respondent_without_a_group_is_named(tmp_path, age, message):
    rows = "".join(f"{age if i == 3 else 20 + i},{i},yes\n" for i in range(40))
    (tmp_path / "people.csv").write_text(f"age,number,q\n{rows}", encoding="utf-8")
    question = {"name": "q", "text": "Yes?", "options": ["yes", "no"]}
    table = {
        "name": "s",
        "title": "s",
        "source": "s",
        "persona": "{number}",
        "questions": [question],
        "bands": {"age": [30, 45]},
    }
    survey = parse_survey({**table, "respondents": str(tmp_path / "people.csv")}, "s")
    respondents = dataclasses.replace(read_respondents(survey, tmp_path), train=np.arange(40))
    with pytest.raises(ConfigError, match=message):
        training_rows(survey, SimulateConfig(by=("age",)), respondents)


def test_a_group_of_too_few_is_left_out_and_counted(tmp_path):
    survey = load_survey("anes96")
    rows, left_out = training_rows(survey, SimulateConfig(by=("income", "place")), read_respondents(survey, tmp_path))
    assert 0 < left_out < 472
    assert len(rows) == 5 * (472 - left_out)
