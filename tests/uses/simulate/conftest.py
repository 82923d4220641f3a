"""A small survey as its file has it, for tests that change a part of it."""

import copy

import pytest

SURVEY = {
    "name": "parks",
    "title": "Parks",
    "preface": "A town asks.",
    "persona": "I am {age} and live in the {region}.",
    "bands": {"age": [30, 60]},
    "questions": [
        {"name": "more", "text": "Should there be more parks?", "options": ["no", "maybe", "yes"], "ordered": True},
        {"name": "pay", "text": "Who should pay?", "options": ["the town", "the state"]},
    ],
}


@pytest.fixture
def table():
    return copy.deepcopy(SURVEY)
