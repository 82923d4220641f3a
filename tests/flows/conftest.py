"""The toy configuration over stand-in stages: its chain made once, with and without the command line."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from configs.load import load
from configs.schema import RunConfig
from store.artifacts import Store
from tests.support.toy_chain import make_all
from tests.support.toy_cli import nautile, start
from tests.support.toy_stages import TOY, toy_stage


@pytest.fixture(scope="session")
def toy() -> RunConfig:
    return load(TOY)


@pytest.fixture
def toy_stages(monkeypatch):
    """The plan finds the stand-ins in place of the project's stages."""
    monkeypatch.setattr("flows.plan.stage_named", toy_stage)


@pytest.fixture(scope="session")
def made(tmp_path_factory, toy):
    """A store in which the toy chain was made, and label -> kind -> artifact id."""
    store = Store(tmp_path_factory.mktemp("made") / "store")
    return store, make_all(store.root, toy)


@dataclass(frozen=True)
class Bench:
    """A folder with a store where the toy chain has run by the command line; its Prefect home serves later runs too."""

    folder: Path
    first: object

    @property
    def store(self) -> Path:
        return self.folder / "store"

    @property
    def home(self) -> str:
        return str(self.store / "prefect")

    def run(self, *arguments: str, store: Path | None = None, **more: str):
        return nautile(*arguments, store=store or self.store, cwd=self.folder, **{"PREFECT_HOME": self.home} | more)

    def start(self, *arguments: str, store: Path | None = None, **more: str):
        return start(*arguments, store=store or self.store, cwd=self.folder, **{"PREFECT_HOME": self.home} | more)


@pytest.fixture(scope="session")
def bench(tmp_path_factory) -> Bench:
    folder = tmp_path_factory.mktemp("bench")
    (folder / "home").mkdir()
    return Bench(folder, nautile("run", str(TOY), store=folder / "store", cwd=folder, HOME=str(folder / "home")))


@pytest.fixture(autouse=True)
def _own_settings(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("NAUTILE_", "PREFECT_"))]:
        monkeypatch.delenv(name)
