"""Pools over the servers of a test, and the rows of the ledger that they emit."""

import pytest

from nautile.data.endpoints.pool import EndpointPool


class Events(list):
    """An `Emit` that collects the fields of ledger events; the only others warn of the budget."""

    def __call__(self, kind, **fields):
        if kind == "call":
            self.append(fields)
        else:
            assert (kind, fields["name"]) == ("metric", "budget_spent_share")


@pytest.fixture
def events():
    return Events()


@pytest.fixture
def pool_for(tmp_path, events):
    """Makes pools that share a file of replies; all are closed at the end."""
    pools = []

    def make(budget=0.0, cache="replies", **endpoints):
        pools.append(EndpointPool(endpoints, tmp_path / cache, events, budget))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
