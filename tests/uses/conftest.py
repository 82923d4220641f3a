"""Fixtures of other folders that the uses of a model need as well."""

from tests.flows.conftest import command_line, own_main
from tests.flows.dashboard.conftest import components_looked_up_once
from tests.model.conftest import config, params

__all__ = ["command_line", "components_looked_up_once", "config", "own_main", "params"]
