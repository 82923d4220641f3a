"""Messages where Ray or the cluster is not as configured. No cluster is started here."""

import sys

import pytest

from nautile.common.errors import ConfigError
from nautile.common.processes import free_port
from nautile.configs.operation import LaunchConfig
from nautile.tasks.engine.fanout import ray_executor
from nautile.tasks.engine.ray_cluster import connection_problem


def enter(**launch):
    with ray_executor(LaunchConfig(engine="ray", **launch)):
        raise AssertionError("it connected")


def test_ray_that_is_not_installed_is_named_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=r'pip install "nautile\[ray\]"'):
        enter()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("head", "'head' is not an address:port"),
        ("head:many", "'head:many' is not an address:port"),
        ("local", "engine 'ray' uses one that already runs"),
        ("127.0.0.1:{port}", r"no cluster answers at 127.0.0.1:\d+ \(Connection refused\).*launch.ray_address"),
        ("ray://127.0.0.1:{port}", "no cluster answers at ray://"),
    ],
)
def test_an_invalid_or_unreachable_address_is_refused(address, message):
    with pytest.raises(ConfigError, match=message):
        enter(ray_address=address.format(port=free_port()))


def test_a_token_that_is_missing_is_named():
    deep = ConnectionError("no cluster at 10.0.0.1:6379")
    deep.__cause__ = RuntimeError("RPC error: InvalidAuthToken: Authentication token is missing")
    assert "RAY_AUTH_TOKEN_PATH" in connection_problem(deep)
    assert connection_problem(ConnectionError("nobody\nat all")) == "nobody"
