"""The notes of waiting runs, which any host of a store may have written."""

import errno
import json
from pathlib import Path

import pytest

from nautile.common.files import write_json
from nautile.flows.operate.questions import waiting
from nautile.store.manifest import host
from nautile.tasks.engine.attempt_log import failure_in_sweep
from nautile.tasks.engine.progress import read_retry_note
from tests.support.samples.stage_store import key_of

NOTE = {
    "run": "r1",
    "label": "align",
    "message": "May it?\nIt costs.",
    "since": "2026-11-22T12:00:00+00:00",
    "host": "other",
    "pid": 1,
    "api": None,
}


def write(store, name, note):
    folder = store.questions
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(note))


@pytest.mark.parametrize(
    "note",
    [
        [NOTE],
        "r1",
        *({name: value for name, value in NOTE.items() if name != missing} for missing in ("run", "label", "since")),
        *(NOTE | {"run": value} for value in ("../../x", 5, "", None)),
        *(NOTE | {"since": value} for value in (5, "yesterday", "9999-12-31T23:59:59+00:00")),
        NOTE | {"pid": "many"},
        NOTE | {"message": ["a"]},
        *(NOTE | {"api": api} for api in (4200, "http://[::1", "http://127.0.0.1:abc/api")),
    ],
    ids=str,
)
def test_a_note_of_another_form_hides_no_other(store, note):
    write(store, "bad", note)
    write(store, "good", NOTE)
    assert [waits["run"] for waits in waiting(store)] == ["r1"]
    assert (store.questions / "bad.json").exists(), "what is not understood is not removed"


def test_what_a_later_version_adds_is_kept_and_a_label_is_one_line(store):
    write(store, "r1", NOTE | {"label": "align\nreason: done", "more": [1]})
    (note,) = waiting(store)
    assert (note["more"], note["label"]) == ([1], "align\ufffdreason: done")


def test_a_note_of_the_past_in_a_store_that_is_only_read_is_no_error(store, monkeypatch):
    write(store, "r1", NOTE | {"host": host(), "pid": 1})
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: raise_(OSError(errno.EROFS, "Read-only file system")))
    assert waiting(store) == []


def raise_(error):
    raise error


@pytest.mark.parametrize("note", [{}, [1], {"note": 3, "at": 1e12}, {"note": "x", "at": "soon"}], ids=str)
def test_a_note_of_a_pause_of_another_form_is_none(store, note):
    staging = store.staging(key_of("align"))
    write_json(staging / "retry.json", note)
    assert read_retry_note(staging) is None
    write_json(staging / "failure.json", note)
    assert failure_in_sweep(store, key_of("align"), "s1") is None
