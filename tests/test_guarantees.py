"""docs/guarantees.md names tests that exist, each once."""

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMED = re.findall(r"`(tests/\S+\.py)::(\w+)`", (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8"))


def test_each_promise_has_a_test_of_its_own():
    assert len(NAMED) > 50
    assert [test for test, count in Counter(NAMED).items() if count > 1] == []
    for file, test in NAMED:
        assert re.search(rf"^def {test}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), (file, test)
