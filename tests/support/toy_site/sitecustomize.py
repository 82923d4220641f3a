"""On PYTHONPATH, this makes the plan of every process find the stand-in stages (tests/support/toy_stages.py).

Prefect's runner starts each flow run as a plain interpreter of its own, which nothing else of a test reaches.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

PLAN = "flows.dag"


class _Toy(Loader):
    def __init__(self, real: Any) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._real.exec_module(module)

        def stage_named(name: str) -> Any:
            from tests.support.toy_stages import toy_stage

            return toy_stage(name)

        module.stage_named = stage_named


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == PLAN else None
        if spec is not None:
            spec.loader = _Toy(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
