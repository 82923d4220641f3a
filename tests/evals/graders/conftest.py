"""One process of math-verify for all graders' tests: it takes over a second to start."""

import pytest

from evals.graders.equivalence import Equivalence


@pytest.fixture(scope="session")
def equivalence():
    instance = Equivalence(limit_s=30.0)
    yield instance
    instance.close()
