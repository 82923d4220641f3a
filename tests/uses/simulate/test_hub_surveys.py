"""Personas and published shares from a Hub on loopback, as its own client reads them, in the schemas of the Hub."""

import json
import os
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest

from tests.support.servers.fake_hub import FakeHub
from tests.support.servers.http_server import FakeServer

COMMIT = "5b4cd35ab46490c1da1bd2b5a2324d6f871be180"
# The client reads HF_ENDPOINT when it is imported, so it runs in a process of its own.
READER = """
import json, sys
from pathlib import Path
from nautile.common.errors import ConfigError
from nautile.uses.simulate.people import read_people
from nautile.uses.simulate.reading import load_survey, personas_config
results = {}
for name, n in json.loads(sys.argv[1]).items():
    try:
        if n:
            people = read_people(personas_config(name), Path(sys.argv[2]), n)
            results[name] = [[person.id, person.fields] for person in people]
        else:
            results[name] = load_survey(name).model_dump(mode="json")
    except ConfigError as error:
        results[name] = str(error)
json.dump(results, sys.stdout)
"""


def nemotron(n):
    """A record with the columns of nvidia/Nemotron-Personas-USA."""
    texts = ("professional_persona", "sports_persona", "arts_persona", "travel_persona", "culinary_persona", "persona",
             "cultural_background", "skills_and_expertise", "skills_and_expertise_list", "hobbies_and_interests",
             "hobbies_and_interests_list", "career_goals_and_ambitions")  # fmt: skip
    return {"uuid": f"{n:032x}", **{name: f"{name} of {n}" for name in texts}, "sex": ("Female", "Male")[n % 2],
            "age": 20 + n, "marital_status": "married_present", "education_level": "bachelors",
            "bachelors_field": "stem", "occupation": "registered_nurse", "city": "Reno", "state": "NV",
            "zipcode": "89501", "country": "USA"}  # fmt: skip


class Hubs(FakeServer):
    """Several datasets behind one address."""

    def __init__(self, *hubs):
        self._hubs = hubs

    def respond(self, request):
        hub = next((hub for hub in self._hubs if f"/datasets/{hub.repo}" in request.path), self._hubs[0])
        return hub.respond(request)


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """What the client reads of each dataset: people, a survey, or the message of a refusal."""
    root = tmp_path_factory.mktemp("hub")
    people = root / "people" / "data"
    people.mkdir(parents=True)
    for part in range(2):
        table = pyarrow.Table.from_pylist([nemotron(4 * part + i) for i in range(4)])
        pyarrow.parquet.write_table(table, people / f"train-{part:05d}-of-00002.parquet")
    hub = root / "personahub"
    hub.mkdir()
    (hub / "persona.jsonl").write_text('{"persona": "A chemist."}\n{"persona": "A nurse."}\n', encoding="utf-8")
    (hub / "README.md").write_text(
        "---\nconfigs:\n- config_name: math\n  data_files: math.jsonl\n- config_name: persona\n"
        "  data_files: persona.jsonl\n---\n", encoding="utf-8")  # fmt: skip
    (hub / "math.jsonl").write_text('{"input persona": "x"}\n', encoding="utf-8")
    pop = root / "subpop"
    pop.mkdir()
    record = {"qkey": "happy", "attribute": "SEX", "group": "Female", "responses": [0.7, 0.3], "refusal_rate": 0.1,
              "ordinal": [1.0, 2.0], "question": "Happy?", "options": ["Yes", "No", "Refused"]}  # fmt: skip
    (pop / "subpop_train.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
    (pop / "subpop_eval.jsonl").write_text(json.dumps(record | {"qkey": "GSS"}) + "\n", encoding="utf-8")
    hubs = Hubs(
        FakeHub(root / "people", "nvidia/Nemotron-Personas-USA", COMMIT),
        FakeHub(hub, "proj-persona/PersonaHub", COMMIT),
        FakeHub(pop, "jjssuh/subpop", COMMIT),
    )
    asked = {
        "nvidia/Nemotron-Personas-USA": 6,
        f"proj-persona/PersonaHub@{COMMIT}": 2, f"proj-persona/PersonaHub@{'0' * 40}": 2,
        f"jjssuh/subpop@{COMMIT}": 0, f"jjssuh/subpop:test@{COMMIT}": 0,
    }  # fmt: skip
    with hubs:
        environment = {**os.environ, "HF_ENDPOINT": hubs.url, "HF_HOME": str(root / "home"),
                       "HF_HUB_DISABLE_TELEMETRY": "1",
                       "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # fmt: skip
        command = [sys.executable, "-c", READER, json.dumps(asked), str(root / "scratch")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.mark.slow
def test_the_first_personas_of_nemotron_are_read_with_their_fields(read):
    people = read["nvidia/Nemotron-Personas-USA"]
    assert [name for name, _ in people] == [f"{n:032x}" for n in range(6)]
    assert people[5][1] == nemotron(5)


@pytest.mark.slow
def test_personahub_has_one_text_a_person(read):
    people = read[f"proj-persona/PersonaHub@{COMMIT}"]
    assert [fields for _, fields in people] == [{"persona": "A chemist."}, {"persona": "A nurse."}]
    assert "at 000000000000" in read[f"proj-persona/PersonaHub@{'0' * 40}"]


@pytest.mark.slow
def test_subpop_is_a_survey_of_either_split(read):
    train, test = read[f"jjssuh/subpop@{COMMIT}"], read[f"jjssuh/subpop:test@{COMMIT}"]
    assert (train["name"], test["name"]) == ("subpop_train", "subpop_test")
    assert train["questions"][0]["groups"] == {"SEX": {"Female": [0.7, 0.3]}}
    assert test["questions"][0]["name"] == "GSS"
