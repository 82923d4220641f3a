"""The toy configuration over stand-in stages: its chain run once a test run, with and without the command line."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from common.processes import free_port
from configs.load import load
from configs.schema import RunConfig
from flows.operate.prefect_server import healthy
from store.artifacts import Store
from tests.support.sockets import watch_sockets
from tests.support.toy_chain import make_all
from tests.support.toy_cli import ROOT, environment, nautile, start
from tests.support.toy_dag import TOY_DAG
from tests.support.toy_stages import TOY


@pytest.fixture(autouse=True)
def own_main():
    """Streamlit's AppTest leaves its script behind as `__main__`, and a process spawned later would import that."""
    before = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = before


@pytest.fixture(scope="session")
def toy() -> RunConfig:
    return load(TOY)


@pytest.fixture
def toy_stages(monkeypatch):
    """The DAG has the stand-ins in place of the project's stages."""
    for name, value in TOY_DAG.items():
        monkeypatch.setenv(name, value)


BuildOnce = Callable[[str, Callable[[Path], None]], Path]


@pytest.fixture(scope="session")
def build_once(tmp_path_factory) -> BuildOnce:
    """`build_once(name, build)`: a copy of the folder that `build(folder)` fills once for all workers of a run."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def once(name: str, build: Callable[[Path], None]) -> Path:
        original, complete = shared / f"{name}-original", shared / f"{name}-complete"
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not complete.exists():
                shutil.rmtree(original, ignore_errors=True)
                original.mkdir()
                build(original)
                complete.touch()
        return shutil.copytree(original, tmp_path_factory.mktemp(name) / "copy", symlinks=True)

    return once


@pytest.fixture(scope="session")
def made(build_once, toy):
    """A store in which the toy chain has run, and label -> kind -> artifact id."""

    def build(folder: Path) -> None:
        outputs = make_all(folder / "store", toy)
        (folder / "outputs.json").write_text(json.dumps(outputs), encoding="utf-8")

    folder = build_once("made", build)
    return Store(folder / "store"), json.loads((folder / "outputs.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Bench:
    """A folder with a store where the toy chain has run by the command line, and the Prefect server of later runs."""

    folder: Path
    first: subprocess.CompletedProcess[str]
    sockets: Path  # the log of the first run's connections
    url: str = ""
    key: str = "sk-planted-2718281828459045"  # of the endpoint that the configuration names

    @property
    def store(self) -> Path:
        return self.folder / "store"

    @property
    def home(self) -> str:
        return str(self.store / "prefect")

    def run(self, *arguments: str, store: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
        return nautile(*arguments, store=store or self.store, cwd=self.folder, **self._prefect() | more)

    def start(self, *arguments: str, store: Path | None = None, **more: str) -> subprocess.Popen[str]:
        return start(*arguments, store=store or self.store, cwd=self.folder, **self._prefect() | more)

    def _prefect(self) -> dict[str, str]:
        return {"PREFECT_HOME": self.home, "PREFECT_API_URL": self.url, "TOY_KEY": self.key}


@pytest.fixture(scope="session")
def bench(build_once) -> Iterator[Bench]:
    """The first run brings its own server. The later ones share one, for each would take seconds to start."""

    def build(folder: Path) -> None:
        (folder / "cwd" / "home").mkdir(parents=True)
        more = {"HOME": str(folder / "cwd" / "home"), "TOY_KEY": Bench.key, **watch_sockets(folder / "sockets.log")}
        done = nautile("run", str(TOY), store=folder / "cwd" / "store", cwd=folder / "cwd", **more)
        result = {"args": done.args, "returncode": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
        (folder / "first.json").write_text(json.dumps(result), encoding="utf-8")

    copy = build_once("bench", build)
    first = subprocess.CompletedProcess(**json.loads((copy / "first.json").read_text(encoding="utf-8")))
    bench = Bench(copy / "cwd", first, copy / "sockets.log")
    with serving(bench.store / "prefect") as url:
        yield replace(bench, url=url)


@pytest.fixture(scope="session")
def prefect_home(build_once) -> Path:
    """A home of Prefect whose database has all its tables: creating them takes most of a server's first start."""

    def build(folder: Path) -> None:
        with serving(folder):
            pass

    return build_once("prefect", build)


@pytest.fixture(scope="session")
def prefect_url(prefect_home, tmp_path_factory) -> Iterator[str]:
    """A Prefect server of this test session."""
    # A copy: others copy the database too, which they must not do while a server writes to it.
    with serving(shutil.copytree(prefect_home, tmp_path_factory.mktemp("prefect") / "home")) as url:
        yield url


@contextmanager
def serving(home: Path) -> Iterator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}/api"
    server = subprocess.Popen(
        [sys.executable, "-m", "flows.operate.prefect_server", str(port), str(os.getpid())],
        env=environment(home, PREFECT_HOME=str(home), PREFECT_SERVER_ANALYTICS_ENABLED="false", DO_NOT_TRACK="1"),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not healthy(url, 5.0):
            assert server.poll() is None
            time.sleep(0.1)
        yield url
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture(autouse=True)
def _own_settings(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("NAUTILE_", "PREFECT_"))]:
        monkeypatch.delenv(name)
