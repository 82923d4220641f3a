"""The page about a failed stage: its wording, and that text from outside stays text."""

import copy
import json
import re
from pathlib import Path

import pytest

from nautile.common.errors import ConfigError, Retryable
from nautile.tasks.engine.child_process import ChildFiles, Exit, raise_for_exit
from nautile.tasks.engine.errors import RESUME_HEADING, StageCrash, advice, failure_page, reason, slug
from tests.support.stages.toy_stages import HOSTILE


def page_of(error, tail="", page=""):
    ids = {"run": "r1", "execution": "e" * 32}
    fields = {"log": Path("/x/log.txt"), "log_tail": tail, "resume": "nautile run a", "page": page, "ids": ids}
    return failure_page("evaluate:align", 2, error, **fields)


def test_a_failure_page_has_the_reason_the_advice_and_the_command():
    crash = StageCrash("its process ended with exit code 1", log=Path("/x"), log_tail="x")
    text = page_of(crash, tail="KeyError: 1", page="http://127.0.0.1:8501/?run=r1")
    assert text.startswith("## evaluate:align failed (attempt 2)\n\n```\nits process ended with exit code 1\n```\n")
    assert f"**{RESUME_HEADING}**\n\n```\nnautile run a\n```" in text
    assert "```\nKeyError: 1\n```" in text
    assert "(http://127.0.0.1:8501/?run=r1)" in text
    assert f"run `r1`  \nexecution `{'e' * 32}`" in text


def test_nothing_in_a_log_is_markup():
    text = page_of(ConfigError(HOSTILE), tail="````\n# heading\n" + HOSTILE)
    assert "\x1b" not in text
    outside = re.sub(r"^(`{3,})\n.*?^\1\n", "", text, flags=re.DOTALL | re.MULTILINE)
    assert "script" not in outside
    assert "# heading" not in outside


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (ConfigError("x"), "Fix the setting"),
        (Retryable("x"), "outage_hours"),
        (StageCrash("its process was ended by signal 9", signal_number=9), "memory"),
        (StageCrash("ended with exit code 1"), "log"),
        (None, "log"),
    ],
)
def test_advice_goes_by_the_kind_of_error(error, word):
    assert word in advice(error)


def test_a_reason_is_without_the_log_and_a_crash_is_rebuilt_whole_as_pickle_does():
    crash = StageCrash("by zero", log=Path("/x"), log_tail="y", signal_number=9).prefixed("cut: ")
    for error in (crash, copy.copy(crash)):
        assert str(error) == "cut: by zero. The log is /x; its last lines:\ny"
        assert reason(error) == "cut: by zero"
        assert error.was_killed
    assert reason(ValueError()) == "ValueError"
    assert slug("evaluate:Align b") == "evaluate-align-b"


@pytest.mark.parametrize("error", [{}, [], {"type": "ConfigError"}, {"type": 1, "message": "x"}], ids=str)
@pytest.mark.parametrize("code", [1, 2, 75, -9])
def test_an_error_of_another_form_is_a_crash_with_its_exit_code(tmp_path, code, error):
    (tmp_path / "error.json").write_text(json.dumps(error), encoding="utf-8")
    with pytest.raises(StageCrash, match=f"exit code {code}" if code > 0 else "signal 9"):
        raise_for_exit(Exit(code, 0), ChildFiles(tmp_path))
