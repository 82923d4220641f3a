"""An empty store that can be written."""

import pytest

from store.artifacts import Store


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "store")
    store.prepare()
    return store
