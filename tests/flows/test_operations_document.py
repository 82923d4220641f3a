"""docs/operations.md and servers.md: their commands are run over the toy chain's store, section by section.

Settings are loaded, and what is not run says why on the page. One Prefect server is shared; every section has a store
and a folder of its own.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from nautile.configs.load import load
from nautile.flows.cli.main import app
from nautile.store.artifacts import Store
from nautile.store.manifest import now
from tests.flows.test_run_state import plan
from tests.support.samples.document import Command, Settings, ShownFile, match_output, sections
from tests.support.servers.prefect_server import running_server
from tests.support.stages.toy_cli import ROOT, environment
from tests.support.stages.toy_dag import TOY_DAG
from tests.support.stages.toy_stages import TOY

DOCS = ROOT / "docs"
TEXT = "\n".join((DOCS / name).read_text(encoding="utf-8") for name in ("operations.md", "servers.md"))
SECTIONS = sections(TEXT)
TRIED = [title for title, items in SECTIONS.items() if any(isinstance(item, Command) for item in items)]
LAUNCHERS = sections((DOCS / "launchers.md").read_text(encoding="utf-8"))["A work pool on Kubernetes"]
READERS = {"runs", "status", "logs", "sql", "store", "sweep"}  # run in this process: none of them imports Prefect
SHOWN_RUN = "9a3361d3-b032-424e-b340-660879190fda"
PAGES = [
    ROOT / "README.md",
    *(DOCS / name for name in ("operations.md", "servers.md", "store.md", "scale.md", "export.md", "uses.md")),
]


@pytest.fixture(scope="module")
def server(prefect_home, tmp_path_factory):
    """A server of this page alone: its commands create work pools."""
    with running_server(shutil.copytree(prefect_home, tmp_path_factory.mktemp("prefect") / "home")) as url:
        yield url


def in_shell(words, folder, env):
    """Exit code and output of a line, with the commands of this environment first on the path."""
    path = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    shell = ["bash", "-c", words]
    done = subprocess.run(shell, cwd=folder, env=env | {"PATH": path}, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.heavy
@pytest.mark.parametrize("title", TRIED)
def test_every_command_of_the_section_runs(title, made, command_line, request, tmp_path, monkeypatch):
    store, folder = Store(shutil.copytree(made[0].root, tmp_path / "store")), tmp_path / "work"
    change = {"field": "reason.policy.steps", "before": 30, "after": 3}
    plan(store, SHOWN_RUN, name="first try", state="done", started=now(), ended=now(), changes=[change])
    folder.mkdir()
    monkeypatch.chdir(folder)
    env = environment(store.root, TOY_KEY="sk-toy", PREFECT_HOME=str(tmp_path / "prefect"), **TOY_DAG)
    for name in ("NAUTILE_STORE", "COLUMNS", *TOY_DAG):
        monkeypatch.setenv(name, env[name])
    own = folder / "my.toml"
    own.write_text(f'extends = "{TOY}"\n', encoding="utf-8")
    for item in (*LAUNCHERS, *SECTIONS[title]):
        if isinstance(item, ShownFile):
            (folder / item.name).write_text(item.text, encoding="utf-8")
        elif isinstance(item, Settings):
            own.write_text(own.read_text(encoding="utf-8") + item.text, encoding="utf-8")
        elif isinstance(item, Command) and item.untried is None:
            words = shlex.split(item.words, comments=True)
            if words[0] == "nautile" and words[1] in READERS:
                code, *outputs = command_line(*words[1:])
                output = "".join(outputs)
            elif words[:2] == ["nautile", "reconcile"]:  # needs Prefect only for runs whose process is lost
                code, output = in_shell(item.words, folder, env)
            else:
                code, output = in_shell(
                    item.words, folder, env | {"PREFECT_API_URL": request.getfixturevalue("server")}
                )
            assert code == 0, f"{item.words}\n{output}"
            assert match_output(item.shown, output) is not None, f"{item.words}: the page shows another form\n{output}"


@pytest.mark.parametrize(
    "title", [title for title in SECTIONS if any(isinstance(i, Settings) for i in SECTIONS[title])]
)
def test_the_settings_of_the_section_are_a_configurations(title, tmp_path):
    path = tmp_path / "my.toml"
    texts = [item.text for item in SECTIONS[title] if isinstance(item, Settings)]
    path.write_text("\n".join(['extends = "local"', *texts]), encoding="utf-8")
    load(path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_within_sentences_exist_with_their_options(page):
    group = typer.main.get_command(app)
    for code in re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S)):
        words = " ".join(code.replace("\\|", "|").split()).split()
        if words[:1] != ["nautile"] or len(words) < 2 or words[1].startswith("-") or words[1].isupper():
            continue
        command = group
        while hasattr(command, "commands") and len(words) > 1 and words[1].strip("[],") in command.commands:
            command, words = command.commands[words[1].strip("[],")], words[1:]
        assert command is not group, code
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        options = {word.strip("[],…").partition("=")[0] for word in words[1:] if word.strip("[").startswith("--")}
        assert options <= known | {"--help"}, f"{code}: no option {', '.join(options - known)}"
