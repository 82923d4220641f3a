"""Streamlit's test client without its search through every installed package."""

from functools import cache

import pytest
from streamlit.components.v2 import manifest_scanner


@pytest.fixture(scope="session", autouse=True)
def components_looked_up_once():
    """Each `AppTest` would read the metadata of all 250 packages for components, 0.4 s of processor time a page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest_scanner, "scan_component_manifests", cache(manifest_scanner.scan_component_manifests))
        yield
