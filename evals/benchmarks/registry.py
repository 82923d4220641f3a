"""The registry of benchmarks: the paper's, the offline stand-ins, and those of plug-ins; and what is shown of a name.

An entry is imported when it is asked for: parsers and graders take a quarter of a second, and commands that list runs
need the titles alone. A name may be of none of them here, as in the scores of another installation: it is then shown as
it is.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from nautile.configs.plugins import Registry
from nautile.evals.benchmarks.titles import PARTS, TITLES

if TYPE_CHECKING:
    from nautile.evals.benchmarks.catalogue import Benchmark


class _Benchmarks(Registry["Benchmark"]):
    def __getitem__(self, name: str) -> "Benchmark":
        """The entry, with the name of the registry: a plug-in states its name once, where it is found."""
        entry = super().__getitem__(name)
        return entry if entry.name == name else replace(entry, name=name)


BENCHMARKS = _Benchmarks(
    "benchmarks",
    "nautile.evals.benchmarks.catalogue:Benchmark",
    {name: f"nautile.evals.benchmarks.stand_ins:SHIPPED.{name}" for name in TITLES},
)


def parts_of(name: str) -> tuple[str, ...]:
    """The benchmarks that a name stands for: the parts of a composite, else itself."""
    if name in TITLES:
        return PARTS.get(name, (name,))
    entry = BENCHMARKS.get(name)
    return entry.parts if entry and entry.parts else (name,)


def composites() -> dict[str, tuple[str, ...]]:
    """Each composite with its parts."""
    return {name: parts for name in BENCHMARKS if (parts := parts_of(name)) != (name,)}


def is_generated(name: str) -> bool:
    """Whether its questions are made for the run, so many as are asked for, and by a seed."""
    return any(entry.build for part in parts_of(name) if (entry := BENCHMARKS.get(part)))


def title_of(name: str) -> str:
    """Title of a benchmark or a mean in tables."""
    if name in TITLES:
        return TITLES[name]
    entry = BENCHMARKS.get(name)
    return (entry and entry.title) or ("Average" if name == "average" else name)


def stand_in_note(name: str) -> str | None:
    """What a stand-in is made of, and for what it stands in; None for any other benchmark."""
    entry = BENCHMARKS.get(name)
    if not entry or not entry.stand_in:
        return None
    return f"stands in for {title_of(entry.like)}: {entry.stand_in}" if entry.like else entry.stand_in
