"""The console of the commands: no text changes the terminal, whoever wrote it and however it is printed."""

import json
import re
from io import StringIO

import pytest
from rich.markdown import Markdown
from rich.pretty import Pretty
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from nautile.flows.cli.terminal import json_text, keep_programs, print_markdown
from nautile.flows.render import CleanConsole
from nautile.store.manifest import now
from nautile.tasks.engine.attempt_log import write_attempt_row, write_row
from tests.support.samples.stage_store import key_of, published

ESCAPES = (
    "\x1b]52;c;cm0gLXJm\x07",  # writes to the clipboard
    "\x1b]8;;https://elsewhere.invalid\x1b\\here\x1b]8;;\x1b\\",  # a link
    "\x1b]0;title\x07\x1b[2J\x1b[31m",
    "\x9b31m\x9d0;t\x9c",  # the same as single characters
    "\u202egnp.exe\u2066",
    "\udcff\ud800",  # of a name of a file that is not UTF-8, and of JSON
)
HOSTILE = "".join(ESCAPES)
COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # of Rich itself
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


CACHE_SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


def table():
    grid = Table("a")
    grid.add_row(HOSTILE)
    return grid


@pytest.mark.parametrize(
    "thing",
    [
        HOSTILE,
        Text(HOSTILE),
        Text(HOSTILE, style="red"),
        table(),
        Tree(Text(HOSTILE)),
        Pretty({HOSTILE: HOSTILE}),
        Markdown(HOSTILE),
        f":cat: {HOSTILE}",
    ],
    ids=lambda thing: type(thing).__name__,
)
@pytest.mark.parametrize("is_terminal", [True, False])
def test_nothing_that_is_printed_has_an_escape(thing, is_terminal):
    out = StringIO()
    CleanConsole(file=out, force_terminal=is_terminal, markup=False, emoji=False, width=200).print(thing)
    shown = COLOURS.sub("", out.getvalue()) if is_terminal else out.getvalue()
    assert not CONTROLS.search(shown)
    assert "cm0gLXJm" in shown, "the text itself stays"


def test_line_feeds_tabs_and_letters_of_any_script_stay():
    out = StringIO()
    CleanConsole(file=out, markup=False).print(Text("a\n\tb é 漢 \N{ZERO WIDTH JOINER} 🙂"), soft_wrap=True)
    assert out.getvalue() == "a\n        b é 漢 \N{ZERO WIDTH JOINER} 🙂\n"


def test_a_link_in_markdown_shows_where_it_leads(monkeypatch, capsys):
    monkeypatch.setattr("nautile.flows.cli.terminal.console_for", lambda: CleanConsole(force_terminal=True, width=200))
    print_markdown("[here](https://elsewhere.invalid)")
    out = capsys.readouterr().out
    assert "\x1b]8" not in out
    assert "https://elsewhere.invalid" in out


@pytest.mark.parametrize("ensure_ascii", [True, False])
def test_json_is_the_same_data_without_a_control_character(ensure_ascii):
    value = {HOSTILE: [HOSTILE, "é\n\t"]}
    text = json_text(value, ensure_ascii=ensure_ascii)
    assert json.loads(text) == value
    assert not CONTROLS.search(text)
    assert ("é" in text) is not ensure_ascii


COMMANDS = (
    "runs",
    "status bad",
    "status",
    "logs bad",
    "note bad",
    "artifacts",
    "show {id}",
    "lineage {id}",
    "sql {sql}",
)


def test_names_of_events_and_facts_of_manifests_forge_no_line_and_no_escape(store, command_line, monkeypatch):
    monkeypatch.setenv("NAUTILE_STORE", str(store.root))
    forged = "align  done  [0m"
    name = f"n{HOSTILE}\n{forged}\u2028{forged}\r{forged}"
    artifact = published(store, "checkpoint", "one", facts={name: name})
    step = {"label": name, "stage": "align", "key": key_of("align"), "after": [name]}
    plan = {"id": "p", "run": "bad00000-1111", "config": name, "name": name, "state": "failed", "steps": [step]}
    plan |= {"started": now(), "resume": f"nautile run {name}", "changes": [{"field": name, "before": name}]}
    write_row(store, "plan", plan | {"settings": {}, "host": name, "error": f"a{HOSTILE}\nb"})
    row = {
        "id": "a",
        "run": "bad00000-1111",
        "stage": "align",
        "label": name,
        "key": key_of("align"),
        "state": "failed",
    }
    write_attempt_row(store, row | {"started": now(), "ended": now(), "seconds": 1.0, "error": f"a{HOSTILE}\nb"})
    write_row(store, "note", {"id": "bad00000-1111", "text": name, "tags": [name]})
    for command in COMMANDS:
        words = [word.format(id=artifact.id, sql="SELECT * FROM attempts") for word in command.split()]
        words = [*words[:1], "SELECT * FROM attempts"] if words[0] == "sql" else words
        code, out, err = command_line(*words)
        assert code == 0, (command, err)
        assert not CONTROLS.search(out + err), command
        if words[0] != "note":  # a note may have several lines
            assert not [line for line in (out + err).splitlines() if line.startswith("align")], command


def test_what_a_command_compiles_is_kept_in_the_store(store, monkeypatch, tmp_path):
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    before = {name: getattr(jax.config, name) for name in CACHE_SETTINGS}
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    try:
        monkeypatch.setenv("NAUTILE_STORE", str(tmp_path / "none"))
        keep_programs()
        assert jax.config.jax_compilation_cache_dir == before["jax_compilation_cache_dir"]
        monkeypatch.setenv("NAUTILE_STORE", str(store.root))
        keep_programs()
        assert jax.config.jax_compilation_cache_dir.startswith(str(store.compiled))
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
