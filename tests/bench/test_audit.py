"""The bill of materials of the locks, and what is reported of advisories."""

from datetime import UTC, datetime

import pytest

from bench.operation import audit

MOMENT = datetime(2026, 11, 22, 8, 30, tzinfo=UTC)
LOCK = f"""anyio==4.9.0 \\
    --hash=sha256:{"a" * 64} \\
    --hash=sha256:{"b" * 64}
    # via httpx
llama-cpp-python==0.3.1 ; sys_platform == 'never' \\
    --hash=sha256:{"c" * 64}
uvicorn[standard]==0.40.0 ; sys_platform != 'win32' \\
    --hash=sha256:{"d" * 64}
"""


@pytest.fixture
def listed(tmp_path):
    (tmp_path / "some.lock").write_text(LOCK)
    return list(audit.packages(tmp_path / "some.lock"))


def test_every_package_that_is_installed_somewhere_is_listed_with_its_digests(listed):
    document = audit.bill_of_materials(listed, MOMENT)
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    first, second = document["components"]
    assert (first["purl"], len(first["hashes"])) == ("pkg:pypi/anyio@4.9.0", 2)
    assert first["licenses"][0]["license"]["name"] == "MIT"
    assert (second["name"], second["version"]) == ("uvicorn", "0.40.0")
    assert {"name": "marker", "value": "sys_platform != 'win32'"} in second["properties"]
    assert document["serialNumber"] == audit.bill_of_materials(listed[::-1], datetime.now(UTC))["serialNumber"]


def test_the_locks_of_the_project_are_listed_whole():
    for lock in audit.ROOT.glob("requirements/*.lock"):
        lines = [line for line in lock.read_text().splitlines() if "==" in line and "--hash" not in line]
        pinned = [line for line in lines if line[0].isalpha() and "sys_platform == 'never'" not in line]
        listed = list(audit.packages(lock))
        assert len(listed) == len(pinned) > 0
        assert all(package.digests for package in listed)


def test_what_was_not_looked_up_is_counted_and_is_no_good_news():
    skipped = {"name": "jax", "skip_reason": "not found"}
    clean = {"name": "anyio", "version": "4.9.0", "vulns": []}
    bad = {"name": "x", "version": "1", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2"]}]}
    text, code = audit.report([skipped, clean, bad], MOMENT)
    assert "2026-11-22: 1 advisories for 2 packages" in text
    assert "1 packages could not be looked up" in text
    assert "x 1: PYSEC-1, fixed in 2" in text
    assert code == 1
    assert [audit.report(answers, MOMENT)[1] for answers in ([clean, skipped], [skipped])] == [0, 2]


def test_each_version_is_asked_about_once(listed, tmp_path):
    """pip-audit refuses a name that comes twice, as the locks of several platforms have it."""
    other = audit.Package("anyio", "4.8.0", "other.lock", "", ())
    program = tmp_path / "pip-audit"
    program.write_text(
        '#!/bin/sh\nsed \'s/\\(.*\\)==\\(.*\\)/{"name": "\\1", "version": "\\2", "vulns": []},/\' "$2" |'
        " tr -d '\\n' | sed 's/^/{\"dependencies\": [/; s/,$/]}/'\n"
    )
    program.chmod(0o755)
    answers = audit.advisories([*listed, other, *listed], str(program))
    assert sorted((answer["name"], answer["version"]) for answer in answers) == [
        ("anyio", "4.8.0"), ("anyio", "4.9.0"), ("uvicorn", "0.40.0"),
    ]  # fmt: skip
    program.write_text("#!/bin/sh\necho 'no network' >&2\nexit 1\n")
    with pytest.raises(RuntimeError, match="ended with 1: no network"):
        audit.advisories(listed, str(program))
