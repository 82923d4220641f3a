"""One checkpoint and one server for all tests of the HTTP API: its programs take most of a minute to compile."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes.serving import Server, save_checkpoint, serving


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("served") / "checkpoint")


@pytest.fixture(scope="session")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(checkpoint, tmp_path_factory.mktemp("serving") / "store") as server:
        yield server
