"""The parts from outside in `examples/`, installed beside the wheel in a fresh environment as a stranger would."""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.servers.fake_openai import FakeOpenAI
from tests.support.wheel import ROOT, built, checkout, fresh_environment

EXAMPLES = ROOT / "examples"
LINES = 40
LETTERS = [f"Dear reader,\n\nthis is letter {number}, of the {number}th of May, about ships." for number in range(60)]


@pytest.mark.parametrize("path", sorted((EXAMPLES / "nautile_examples").glob("[a-z]*.py")), ids=lambda path: path.stem)
def test_an_example_is_one_short_file(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LINES


@dataclass
class Installed:
    """The command `nautile` of the fresh environment, in a folder and with a store of its own."""

    python: Path
    folder: Path

    def nautile(self, *arguments, **more):
        kept = {name: text for name, text in os.environ.items() if not name.startswith(("NAUTILE_", "PREFECT_"))}
        kept.pop("PYTHONPATH", None)
        own = {"NAUTILE_STORE": str(self.folder / "store"), "COLUMNS": "200"}
        command = [str(self.python.with_name("nautile")), *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=kept | own | more, capture_output=True, text=True, timeout=240
        )

    def artifact(self, kind, name):
        (folder,) = (self.folder / "store" / "artifacts" / kind).iterdir()
        return json.loads((folder / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    shutil.copytree(EXAMPLES, folder / "examples", ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    (folder / "wheels").mkdir()
    (folder / "work").mkdir()
    wheels = [built(checkout(folder / "checkout"), folder / "wheels" / "nautile")]
    wheels.append(built(folder / "examples", folder / "wheels" / "examples"))
    shutil.copy(EXAMPLES / "run.toml", folder / "work")
    yield Installed(python=fresh_environment(folder / "environment", *wheels), folder=folder / "work")
    shutil.rmtree(folder)


@pytest.mark.slow
def test_the_reader_and_the_stage_run_in_the_pipeline(installed):
    messages = [f"From a@b.example\nMessage-ID: <{n}>\n\n{text}\n" for n, text in enumerate(LETTERS)]
    (installed.folder / "letters.mbox").write_text("\n".join(messages), encoding="utf-8")
    dag = {"NAUTILE_DAG": "nautile_examples.stage:steps"}
    ran = installed.nautile("run", "run.toml", "--until", "lengths", **dag)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    facts = installed.artifact("tokens", "manifest.json")["facts"]
    assert (facts["records"], facts["source"]) == (len(LETTERS), "letters")
    (length,) = installed.artifact("lengths", "lengths.json").values()
    assert length == round(facts["tokens"] / facts["documents"], 1)


@pytest.mark.slow
def test_the_vendor_is_asked(installed):
    with FakeOpenAI(key="sk-acme-0123456789") as server:
        asked = installed.nautile(
            "run", "run.toml", "--only", "evaluate:acme", "--set", f"endpoints.acme.url={server.url}",
            ACME_API_KEY="sk-acme-0123456789",
        )  # fmt: skip
        assert asked.returncode == 0, asked.stdout + asked.stderr
        assert all("random_seed" in body for body in server.bodies)
        assert server.bodies
