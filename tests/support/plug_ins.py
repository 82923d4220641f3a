"""A plug-in of a test: a module in a folder, known to this process and to those that it starts."""

import sys
from pathlib import Path
from typing import Any

import pytest

from nautile.configs import plugins
from nautile.configs.plugins import PLUGINS, PlugIn, Registry


def add_plug_in(
    monkeypatch: pytest.MonkeyPatch, folder: Path, registry: Registry[Any], name: str, source: str
) -> PlugIn:
    """Add an entry to a registry for the length of a test; its module is `plugged_NAME` and has `source`."""
    module = f"plugged_{name}"
    (folder / f"{module}.py").write_text(source, encoding="utf-8")
    entry = PlugIn(registry.name, name, f"{module}:{name}", PLUGINS)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv(PLUGINS, f"{entry.registry}={entry.reference}")
    monkeypatch.setattr(plugins, "plug_ins", lambda: (entry,))
    monkeypatch.setitem(registry.plug_ins, name, entry)
    plugins._digest.cache_clear()
    sys.modules.pop(module, None)
    return entry
