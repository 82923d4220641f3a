"""The toy configuration with its stand-in stages, in a store of each test's own."""

import os

import pytest

from configs.load import load
from configs.schema import RunConfig
from tests.support.toy_stages import TOY, toy_stage


@pytest.fixture(scope="session")
def toy() -> RunConfig:
    return load(TOY)


@pytest.fixture
def toy_stages(monkeypatch):
    """The plan finds the stand-ins in place of the project's stages."""
    monkeypatch.setattr("flows.plan.stage_named", toy_stage)


@pytest.fixture(scope="session")
def toy_run(tmp_path_factory):
    """A store in which the toy chain has run once, by the command line; and what that printed."""
    from tests.support.toy_cli import nautile

    root = tmp_path_factory.mktemp("toy")
    done = nautile("run", str(TOY), store=root / "store", cwd=root)
    assert done.returncode == 0, done.stderr + done.stdout
    return root / "store", done


@pytest.fixture(autouse=True)
def _no_faults(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("NAUTILE_", "PREFECT_"))]:
        monkeypatch.delenv(name)
