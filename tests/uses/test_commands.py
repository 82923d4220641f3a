"""The commands and pages of the uses: their references exist, and the line in `nautile --help` is their own."""

import inspect
import pkgutil

import pytest

from nautile.common.errors import ConfigError
from nautile.configs.base import Section
from nautile.configs.keys import PARTS_OF_USES
from nautile.flows.uses import COMMANDS, PAGES


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_its_own_line_in_the_help(name):
    function = pkgutil.resolve_name(COMMANDS[name].reference)
    assert function.__name__ == name
    assert inspect.getdoc(function) == COMMANDS[name].help


def test_the_references_of_pages_and_sections_exist():
    assert all(callable(pkgutil.resolve_name(page.reference)) for page in PAGES.values())
    assert all(issubclass(pkgutil.resolve_name(reference), Section) for reference in PARTS_OF_USES.values())


@pytest.mark.parametrize(
    ("words", "function"),
    [
        (("tune", "my.toml", "--force"), "nautile.uses.tune.command.run_tune"),
        (("distill", "--label", "my.toml", "--force"), "nautile.uses.label.command.label_texts"),
    ],
)
def test_a_forced_step_is_resumed_by_force(command_line, monkeypatch, words, function):
    """Without it, the command that is printed would reuse the artifact that was to be made again."""
    given = []

    def run(*arguments):
        given.extend(arguments)
        raise ConfigError("stopped")

    monkeypatch.setattr("nautile.configs.load.load_part", lambda *_: None)
    monkeypatch.setattr(function, run)
    assert command_line(*words)[0] == 2
    assert f"nautile {' '.join(words)}" in given
