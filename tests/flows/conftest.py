"""The toy configuration over stand-in stages, and the command line in this process and in others."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from nautile.configs.load import load
from nautile.configs.schema import RunConfig
from nautile.flows.cli.main import main
from nautile.store.artifacts import Store
from tests.support.servers.prefect_server import running_server
from tests.support.stages.toy_cli import nautile, start
from tests.support.stages.toy_dag import TOY_DAG
from tests.support.stages.toy_stages import TOY
from tests.support.stages.two_runs import add_second_run


@pytest.fixture(autouse=True)
def own_main():
    """Streamlit's AppTest leaves its script behind as `__main__`, and a process spawned later would import that."""
    before = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = before


@pytest.fixture
def command_line(monkeypatch, capsys):
    """Run `nautile` in this process; returns exit code, standard output, standard error."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["nautile", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        out, err = capsys.readouterr()
        return exit_.value.code or 0, out, err

    return call


@pytest.fixture(scope="session")
def toy() -> RunConfig:
    return load(TOY)


@pytest.fixture
def toy_stages(monkeypatch):
    """The DAG has the stand-ins in place of the project's stages."""
    for name, value in TOY_DAG.items():
        monkeypatch.setenv(name, value)


@dataclass(frozen=True)
class Bench:
    """A folder with a store where the toy chain has run, and a Prefect server with a login for runs there."""

    folder: Path
    url: str
    key: str = "sk-planted-2718281828459045"  # of the endpoint that the configuration names
    login: str = "nautile:planted-1414213562373095"  # of the server of later runs

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

    def server(self) -> dict[str, str]:
        """The settings of the server's clients."""
        return {"PREFECT_API_URL": self.url, "PREFECT_API_AUTH_STRING": self.login}

    def _prefect(self) -> dict[str, str]:
        return {"PREFECT_HOME": self.home, "TOY_KEY": self.key, **self.server()}


@pytest.fixture(scope="module")
def bench(made, prefect_home, tmp_path_factory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("bench")
    shutil.copytree(made[0].root, folder / "store")
    shutil.copytree(prefect_home, folder / "store" / "prefect")
    with running_server(folder / "store" / "prefect", Bench.login) as url:
        yield Bench(folder, url)


@pytest.fixture(autouse=True)
def _own_settings(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("NAUTILE_", "PREFECT_"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def two_runs(made, tmp_path) -> Store:
    """A store with the run `toy` of the toy chain, and one with its pretraining (`tests.support.stages.two_runs`).

    One for each test, because tests add runs and sweeps to it.
    """
    store = Store(shutil.copytree(made[0].root, tmp_path / "two" / "store"))
    add_second_run(store, made[1])
    return store
