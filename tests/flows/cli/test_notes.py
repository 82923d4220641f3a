"""`nautile note`: the text and the tags of a run, which the table of runs shows."""

import pytest

from nautile.store.manifest import now
from nautile.tasks.engine.attempt_log import write_attempt_row


@pytest.mark.slow
def test_notes_and_tags_of_a_run_are_kept_and_changed(store, command_line, monkeypatch):
    monkeypatch.setenv("NAUTILE_STORE", str(store.root))
    row = {"id": "1", "run": "9bdd20f2-7a6c", "stage": "align", "label": "align", "key": "0" * 64, "execution": "e"}
    write_attempt_row(store, row | {"attempt": 1, "state": "done", "started": now(), "ended": now()})
    assert command_line("note", "9bdd") == (0, "run 9bdd20f2: no note\n", "")
    assert command_line("note", "9bdd", "the <b>first</b>", "--tag", "kept", "--tag", "kept")[0] == 0
    assert command_line("note", "9bdd", "--tag", "[red]low", "--untag", "none")[:2] == (
        0,
        "run 9bdd20f2 [kept, [red]low]: the <b>first</b>\n",
    )
    assert command_line("note", "9bdd", "", "--untag", "kept")[1] == "run 9bdd20f2 [[red]low]: no note\n"
    code, _, error = command_line("note", "zzz", "x")
    assert code == 2
    assert "zzz" in error
    assert command_line("note", "9bdd", "--tag", " ")[0] == 2
