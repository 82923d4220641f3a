"""Commands that are printed: whatever their words are, a shell reads them as words."""

import os
import shlex
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nautile.common.commands import program, shell_command

HOSTILE = (
    "$(touch made)",
    "`touch made`",
    "a; touch made",
    "a && touch made",
    "'",
    '"',
    "a'b\"c",
    "~",
    "*",
    "# no",
    "",
)


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")), min_size=1))
def test_a_command_is_read_as_the_words_that_it_has(words):
    assert shlex.split(shell_command(*words)) == words


@pytest.mark.parametrize("word", HOSTILE)
def test_no_word_is_run_by_a_shell(tmp_path, word):
    line = shell_command("printf", "%s", word)
    done = subprocess.run(["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (done.stdout, list(tmp_path.iterdir())) == (word, [])


def test_a_program_that_is_not_on_the_path_is_named_by_its_own(tmp_path, monkeypatch):
    script = tmp_path / "my env" / "nautile"
    script.parent.mkdir()
    script.touch(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(script)])
    assert (program(), shell_command(program(), "run")) == ("my env/nautile", "'my env/nautile' run")
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
    assert program() == "nautile"
    monkeypatch.setattr("sys.argv", ["/usr/bin/python"])
    assert program() == "nautile"
