"""Messages where Ray or the cluster is not as configured. No cluster is started here."""

import sys
from types import SimpleNamespace

import pytest

from nautile.common.errors import ConfigError
from nautile.common.processes import free_port
from nautile.configs.operation import LaunchConfig
from nautile.tasks.engine.fanout.ray_executor import check_prefect_url, ray_executor
from nautile.tasks.engine.ray_cluster import connection_problem


def enter(**launch):
    with ray_executor(LaunchConfig(engine="ray", **launch)):
        raise AssertionError("it connected")


def test_ray_that_is_not_installed_is_named_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'nautile\[ray\]'"):
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


@pytest.mark.parametrize(
    ("url", "others", "refused"),
    [
        ("http://127.0.0.1:4200/api", ["10.0.0.2"], True),
        ("http://localhost:4200/api", ["10.0.0.2"], True),
        ("", ["10.0.0.2"], True),
        ("http://10.0.0.1:4200/api", ["10.0.0.2"], False),
        ("http://127.0.0.1:4200/api", [], False),
    ],
)
def test_other_hosts_must_be_able_to_reach_prefect(url, others, refused):
    nodes = [{"NodeManagerAddress": address, "Alive": True} for address in ["10.0.0.1", *others]]
    ray = SimpleNamespace(nodes=lambda: nodes, util=SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1"))
    if refused:
        with pytest.raises(ConfigError, match=r"the cluster has 1 other hosts, which cannot reach Prefect at"):
            check_prefect_url(ray, url)
    else:
        check_prefect_url(ray, url)
