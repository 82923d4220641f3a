"""docs/one-gpu.md and its notebook: their commands, and the whole run of their configuration at a small size."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from nautile.configs.load import load
from nautile.flows.cli.main import app
from nautile.flows.dag import build_dag
from tests.support.samples.document import Command, match_output, sections
from tests.support.stages.toy_cli import ROOT, environment

PAGE = (ROOT / "docs" / "one-gpu.md").read_text(encoding="utf-8")
COMMANDS = [item for items in sections(PAGE).values() for item in items if isinstance(item, Command)]
NOTEBOOK = json.loads((ROOT / "examples" / "tpu_v5e_8.ipynb").read_text(encoding="utf-8"))
CELLS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
IN_NOTEBOOK = [line[1:] for cell in CELLS for line in cell.splitlines() if line.startswith("!")]
SMALL = Path(__file__).parents[1] / "support" / "stages" / "one_gpu.toml"


def run(words: str, store: Path, folder: Path) -> tuple[int, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", words],
        cwd=folder,
        env=environment(store, PATH=path, PREFECT_HOME=str(store.parent / "prefect")),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("words", [*(item.words for item in COMMANDS), *IN_NOTEBOOK])
def test_a_command_exists_with_its_options_and_its_configuration_loads(words):
    program, *rest = shlex.split(words, comments=True)
    group = typer.main.get_command(app)
    if Path(program).name != "nautile":
        return
    command = group.commands[rest[0]]
    with command.make_context(rest[0], rest[1:], resilient_parsing=False) as context:
        if str(context.params.get("config", "")).startswith("nautile_"):
            build_dag(load(context.params["config"], context.params.get("settings")))


def test_the_notebook_is_one_and_its_cells_are_python():
    assert (NOTEBOOK["nbformat"], NOTEBOOK["cells"][0]["cell_type"]) == (4, "markdown")
    for cell in CELLS:
        compile("\n".join("" if line[:1] in "!%" else line for line in cell.splitlines()), "cell", "exec")


def test_the_small_run_has_every_stage_of_the_configuration():
    assert {step.label for step in build_dag(load(str(SMALL)))} == {
        step.label for step in build_dag(load("nautile_100m"))
    }


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.timeout(1200)  # the programs of all stages are compiled: two minutes of an idle core
def test_the_configuration_runs_from_text_to_export_at_a_two_core_size(tmp_path):
    store = tmp_path / "store"
    code, output = run(f"nautile run {shlex.quote(str(SMALL))}", store, tmp_path)
    assert code == 0, output
    for item in COMMANDS:
        if item.untried is None:
            code, output = run(item.words, store, tmp_path)
            assert code == 0, f"{item.words}\n{output}"
            assert match_output(item.shown, output) is not None, f"{item.words}: the page shows another form\n{output}"
    assert (tmp_path / "for-transformers" / "model.safetensors").is_file()
