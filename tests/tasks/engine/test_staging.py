"""The files of a staging folder, which another machine or version may have written."""

import pytest

from nautile.common.files import read_json, write_json
from nautile.tasks.engine.attempt_log import open_staging
from tests.support.samples.stage_store import key_of

EXECUTION = "0123456789abcdef" * 2
RECORD = {"execution": EXECUTION, "attempt": 3, "forced": False, "inputs": {}, "began": 1.0, "fence": 2, "run": None}


def opened(store, record):
    folder = store.staging(key_of("align"))
    write_json(folder / "execution.json", record)
    (folder / "half").touch()
    return open_staging(store, key_of("align"), {}, force=False), folder


def test_an_execution_is_continued(store):
    staging, folder = opened(store, RECORD)
    assert (staging.execution, staging.attempt, staging.fence) == (EXECUTION, 4, 2)
    assert (folder / "half").exists()


@pytest.mark.parametrize(
    "record",
    [
        {},
        [RECORD],
        *({name: value for name, value in RECORD.items() if name != missing} for missing in RECORD),
        *(RECORD | {"execution": value} for value in (5, "", "../../x", f"{EXECUTION}/../x")),
        *(RECORD | other for other in ({"attempt": "x"}, {"inputs": [1]}, {"began": "x"}, {"run": [1]})),
    ],
    ids=str,
)
def test_the_record_of_another_form_is_left_out_and_the_work_begins_anew(store, caplog, record):
    staging, folder = opened(store, record)
    assert (staging.attempt, (folder / "half").exists()) == (1, False)
    assert staging.execution != EXECUTION
    assert "not of this version's form" in caplog.text


@pytest.mark.parametrize("content", [{}, [], {"outputs": 3, "execution": "../x", "fence": 1}, 3], ids=str)
def test_a_record_of_the_end_of_another_form_is_none(store, content):
    staging, folder = opened(store, RECORD)
    for name in ("done.json", "publication.json"):
        write_json(folder / name, content)
    assert staging.done() is None
    assert staging.facts("checkpoint") == {}
    assert staging.publication(2).execution == EXECUTION
    assert read_json(folder / "publication.json") == {"execution": EXECUTION, "fence": 2}
