"""Streamlit's test client without its search through every installed package, and two runs with a curve."""

from functools import cache

import pytest
from streamlit.components.v2 import manifest_scanner

from nautile.store.catalog import Catalog
from nautile.store.events import EventWriter
from tests.support.samples.recorded_runs import attempted, planned


@pytest.fixture(scope="session", autouse=True)
def components_looked_up_once():
    """Each `AppTest` would read the metadata of all 250 packages for components, 0.4 s of processor time a page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest_scanner, "scan_component_manifests", cache(manifest_scanner.scan_component_manifests))
        yield


@pytest.fixture
def two_curves(store):
    """The runs r1 and r2 with a curve of three points each."""
    for run in ("r1", "r2"):
        planned(store, ["pretrain"], run, state="done", name=run)
        attempted(store, "pretrain", "done", run, execution=f"e-{run}")
        emit = EventWriter(store.root / "events" / f"{run}.jsonl", f"e-{run}", stage="pretrain")
        for step in range(3):
            emit("metric", name="loss", step=step, value=float(step + 1))
        emit.close()
    Catalog(store).ingest()
    return store
