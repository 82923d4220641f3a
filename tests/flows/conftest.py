"""The toy configuration over stand-in stages: its chain made once, with and without the command line."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from common.processes import free_port
from configs.load import load
from configs.schema import RunConfig
from flows.operate.prefect_server import healthy
from store.artifacts import Store
from tests.support.sockets import watched
from tests.support.toy_chain import make_all
from tests.support.toy_cli import ROOT, environment, nautile, start
from tests.support.toy_stages import TOY, TOY_DAG


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


@pytest.fixture(scope="session")
def made(tmp_path_factory, toy):
    """A store in which the toy chain was made, and label -> kind -> artifact id."""
    store = Store(tmp_path_factory.mktemp("made") / "store")
    return store, make_all(store.root, toy)


@dataclass(frozen=True)
class Bench:
    """A folder with a store where the toy chain has run by the command line, and the Prefect server of later runs."""

    folder: Path
    first: subprocess.CompletedProcess[str]
    sockets: Path  # with whom the first run spoke
    url: str = ""

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
        return {"PREFECT_HOME": self.home, "PREFECT_API_URL": self.url}


@pytest.fixture(scope="session")
def bench(tmp_path_factory) -> Iterator[Bench]:
    """The first run brings its own server. The later ones share one, for each would take seconds to start."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "home").mkdir()
    sockets = tmp_path_factory.mktemp("sockets") / "log"
    more = {"HOME": str(folder / "home"), **watched(sockets)}
    first = Bench(folder, nautile("run", str(TOY), store=folder / "store", cwd=folder, **more), sockets)
    with serving(first.store / "prefect") as url:
        yield replace(first, url=url)


@pytest.fixture(scope="session")
def prefect_url(tmp_path_factory) -> Iterator[str]:
    """A Prefect server of this test session."""
    with serving(tmp_path_factory.mktemp("prefect")) as url:
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
