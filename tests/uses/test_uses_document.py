"""docs/uses.md: every command of the page is run, section by section, over a small checkpoint of random weights.

A section is tried in a folder and a store of its own. The teacher on this machine is replaced by a fake server.
"""

import json
import shlex
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path

import jax
import pytest

from nautile.configs.model import TokenizerConfig
from nautile.model.nautile import initialise
from nautile.model.weights.files import save_weights
from nautile.store.add import add_files
from nautile.store.artifacts import Store
from tests.model.conftest import tiny_config
from tests.support.processes.serving import serving
from tests.support.samples.document import Command, Script, ShownFile, match_output, sections, with_ids
from tests.support.servers.fake_openai import FakeOpenAI
from tests.support.stages.toy_cli import environment

PAGE = Path(__file__).parents[2] / "docs" / "uses.md"
SECTIONS = sections(PAGE.read_text(encoding="utf-8"))
CHECKPOINT = "checkpoint/0123456789ab"  # as the page calls it
SERVED = "127.0.0.1:8000"  # where the page's server listens
SEEDS = "seeds = 3\n"  # of the file that tunes: with one there is less to fit, and the output has the same form
OWN_TEACHER = 'kind = "embedded"\nmodel = "SmolLM2-135M-Instruct"\nstructured = "grammar"'

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def checkpoint_store(build_once):
    """A store with one checkpoint."""

    def build(folder):
        tokenizer = TokenizerConfig(ranks=512)
        model = tiny_config(vocabulary=tokenizer.vocabulary, context=512, blocks=1)
        save_weights(folder / "made", jax.jit(initialise, static_argnums=0)(model, 0), model, tokenizer)
        store = Store(folder / "store")
        store.prepare()
        add_files(store, "checkpoint", folder / "made", [path.name for path in (folder / "made").iterdir()], {})

    return build_once("uses", build) / "store"


@pytest.fixture(scope="module")
def teacher():
    """A server that replies with the first label that a request allows."""

    def reply(body):
        return json.dumps({"label": body["response_format"]["json_schema"]["schema"]["properties"]["label"]["enum"][0]})

    with FakeOpenAI(reply, models=("SmolLM2-135M-Instruct",)) as server:
        yield server


class Section:
    """What trying a section has made so far: a folder, a store, ids of artifacts by those of the page, a server."""

    def __init__(self, folder, store, teacher, stack, run):
        self.folder, self.store, self.teacher, self.stack, self.run = folder, store, teacher, stack, run
        self.ids = {CHECKPOINT: Store(store).list("checkpoint")[0].id}
        self.served = SERVED

    def write(self, file):
        openai = f'kind = "openai"\nmodel = "SmolLM2-135M-Instruct"\nurl = "{self.teacher.url}"'
        text = self.with_own_names(file.text.replace(OWN_TEACHER, openai).replace(SEEDS, "seeds = 1\n"))
        path = self.folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def with_own_names(self, text):
        return with_ids(text, self.ids).replace(SERVED, self.served)

    def call(self, command):
        words = shlex.split(self.with_own_names(command.words))
        if words[0] == "nautile" and words[-1] == "&":
            server = self.stack.enter_context(serving(Path(words[2]), self.store, *words[3:-1]))
            self.served = server.root.removeprefix("http://")
            return
        if words[0] == "nautile":
            code, out, err = self.run(*words[1:])
        else:
            code, out, err = shell(self.folder, self.store, *words)
        assert code == 0, f"{command.words}\n{err}"
        ids = match_output(command.shown, out)
        assert ids is not None, f"{command.words}: the page shows another form than\n{out}"
        self.ids |= ids


def shell(folder, store, *words):
    done = subprocess.run(words, cwd=folder, env=environment(store), capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("title", SECTIONS)
def test_every_command_of_the_section_runs(title, checkpoint_store, teacher, command_line, tmp_path, monkeypatch):
    store = shutil.copytree(checkpoint_store, tmp_path / "store")
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("NAUTILE_STORE", str(store))
    monkeypatch.setenv("COLUMNS", "200")
    assert any(isinstance(item, Command) for item in SECTIONS[title])
    with ExitStack() as stack:
        section = Section(folder, store, teacher, stack, command_line)
        for item in SECTIONS[title]:
            if isinstance(item, ShownFile):
                section.write(item)
            elif isinstance(item, Script):
                exec(compile(section.with_own_names(item.text), PAGE.name, "exec"), {})
            else:
                section.call(item)
