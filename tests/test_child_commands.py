"""No process of the product is started with the working directory on its path."""

import re

import pytest

from tests.test_architecture import PACKAGES, ROOT, sources

# `python -m module` puts the working directory first: a folder there that has the name of one of our packages, or of a
# library, is imported in its place. `-P` leaves it out.
_MODULE = re.compile(r"sys\.executable,\s*(?:\"-\w\",\s*)*\"-m\"")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_that_is_started_has_a_safe_path(package):
    unsafe = [
        f"{path.relative_to(ROOT)}: {match}"
        for path in sources(package)
        for match in _MODULE.findall(path.read_text(encoding="utf-8"))
        if '"-P"' not in match
    ]
    assert not unsafe
