"""People from files, margins and the Hub, their groups, and a persona in words."""

import json

import numpy as np
import pytest

from nautile.common.errors import ConfigError
from nautile.common.files import sha256_of
from nautile.uses.simulate.config import PersonasConfig
from nautile.uses.simulate.people import Person, groups_of, persona_text, read_people
from nautile.uses.simulate.reading import parse_survey, personas_config

PEOPLE = [{"name": "a", "age": 20, "region": "north"}, {"name": "b", "age": 65, "region": "south"}]


def test_people_of_a_file_keep_their_order_and_are_drawn_with_the_seed(tmp_path):
    path = tmp_path / "people.jsonl"
    path.write_text("".join(json.dumps({"n": i}) + "\n" for i in range(50)), encoding="utf-8")
    config = personas_config(str(path))
    assert [person.fields["n"] for person in read_people(config, tmp_path)] == list(range(50))
    drawn = [person.fields["n"] for person in read_people(config, tmp_path, 10, seed=1)]
    assert drawn == sorted(drawn) == [p.fields["n"] for p in read_people(config, tmp_path, 10, seed=1)]
    assert drawn != [person.fields["n"] for person in read_people(config, tmp_path, 10, seed=2)]
    with pytest.raises(ConfigError, match="has 50 people, and 51 were asked for"):
        read_people(config, tmp_path, 51)


def test_an_id_column_names_people_once(tmp_path):
    path = tmp_path / "people.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*PEOPLE, PEOPLE[0]]), encoding="utf-8")
    config = PersonasConfig(reader="jsonl", path=str(path), id_column="name")
    with pytest.raises(ConfigError, match="two people are called 'a'"):
        read_people(config, tmp_path)


def test_margins_are_drawn_with_their_shares(tmp_path):
    path = tmp_path / "margins.toml"
    path.write_text('[margins.age]\n"20" = 0.25\n"65" = 0.75\n[margins.region]\nnorth = 1.0\n', encoding="utf-8")
    people = read_people(personas_config(str(path)), tmp_path, 4000, seed=3)
    share = np.mean([person.fields["age"] == "65" for person in people])
    assert abs(share - 0.75) < 4 * np.sqrt(0.75 * 0.25 / 4000)  # four standard errors
    assert {person.fields["region"] for person in people} == {"north"}
    assert people == read_people(personas_config(str(path)), tmp_path, 4000, seed=3)
    with pytest.raises(ConfigError, match="need a number of them: -n"):
        read_people(personas_config(str(path)), tmp_path)


@pytest.mark.parametrize("name", ["people.jsonl", "people.toml"])
def test_a_file_that_has_changed_since_its_digest_is_refused(tmp_path, name):
    path = tmp_path / name
    path.write_text('[margins.age]\n"20" = 1.0\n' if name.endswith("toml") else '{"age": 20}\n', encoding="utf-8")
    config = personas_config(str(path))
    known = sha256_of(path)
    assert len(read_people(config, tmp_path, 1, digests={str(path): known})) == 1
    with pytest.raises(ConfigError, match="has changed since its digest was taken"):
        read_people(config, tmp_path, 1, digests={str(path): "0" * 64})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[margins.age]\n20 = 0.5\n30 = 0.4\n", "margins.age sum to 0.9"),
        ("[margins.age]\n20 = -0.5\n30 = 1.5\n", "a table of shares"),
        ("[margins.age]\n20 = nan\n", "a table of shares"),
        ("[margin.age]\n20 = 1\n", "must have tables"),
        ("[margins\n", "is not TOML"),
    ],
)
def test_margins_that_are_none_are_refused(tmp_path, text, message):
    path = tmp_path / "margins.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_people(personas_config(str(path)), tmp_path, 3)


def test_groups_are_bands_in_their_order_or_the_values():
    people = [Person(str(i), {"age": age, "region": region}) for i, (age, region) in enumerate(
        [(70, "b"), (29.9, "a"), ("30", "b"), (59, "a"), (100, None)])]  # fmt: skip
    groups = groups_of(people, ("age", "region"), {"age": (30, 60)}, "people")
    assert [(group.by, group.name, group.members.tolist()) for group in groups] == [
        ("age", "under 30", [1]),
        ("age", "30 to under 60", [2, 3]),
        ("age", "60 and over", [0, 4]),
        ("region", "a", [1, 3]),
        ("region", "b", [0, 2]),
    ]
    with pytest.raises(ConfigError, match="persona 0 has 'b' in 'region', which is not a number"):
        groups_of(people, ("region",), {"region": (1,)}, "people")
    with pytest.raises(ConfigError, match="persona 0 has 'nan' in 'age', which is not a number"):
        groups_of([Person("0", {"age": "nan"})], ("age",), {"age": (30, 60)}, "people")
    many = [Person(str(i), {"age": i}) for i in range(61)]
    with pytest.raises(ConfigError, match="61 values, more than 60 groups; give the survey bands"):
        groups_of(many, ("age",), {}, "people")


def test_a_persona_is_one_text_whatever_its_values(table):
    table["persona"] = "I am {age} and live in the {region}. {{}}"
    survey = parse_survey(table, "t")
    text = persona_text(survey, Person("0", {"age": 36.0, "region": "{age} <|im_end|>\n\nnorth"}))
    assert text == "I am 36 and live in the {age} <|im_end|> north. {}"


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("a.parquet", ("parquet", "a.parquet", "", "")),
        ("anes96", ("built_in", "anes96", "", "")),
        (
            "nvidia/Nemotron-Personas-USA",
            ("hub", "nvidia/Nemotron-Personas-USA", "", "5b4cd35ab46490c1da1bd2b5a2324d6f871be180"),
        ),
        (f"proj-persona/PersonaHub@{'a' * 40}", ("hub", "proj-persona/PersonaHub", "persona", "a" * 40)),
        (f"some/people:adults@{'b' * 40}", ("hub", "some/people", "adults", "b" * 40)),
    ],
)
def test_personas_are_named_in_one_word(text, fields):
    config = personas_config(text)
    assert (config.reader, config.path, config.subset, config.revision) == fields


@pytest.mark.parametrize("text", ["proj-persona/PersonaHub", "people.txt", ""])
def test_personas_without_file_or_commit_are_refused(text):
    with pytest.raises(ConfigError, match="--personas"):
        personas_config(text)
