"""Versions of the benchmarks' parsers, generators and graders, which are in the key of an evaluation that uses them.

Raise the one of a benchmark (`Benchmark.version`) when its questions, prompts or its own grader change, and the one of
an answer kind here when its grader gives other verdicts. A test knows the source that these versions stand for. A
plug-in's benchmark that declares no version has the digest of its source.
"""

from collections.abc import Iterable
from typing import get_args

from nautile.data.sources.reasoning_gym import ProblemKind
from nautile.evals.benchmarks.items import AnswerKind
from nautile.evals.benchmarks.registry import BENCHMARKS, parts_of

GRADERS: dict[AnswerKind, int] = {"number": 3, "math": 3, "choice": 2, "text": 2, "exact": 2, "instructions": 1}


def versions(names: Iterable[str]) -> dict[str, dict[str, int | str]]:
    """Benchmark -> the version of its `questions`, and of the grader of each of its answer kinds, if it has no own one.

    A composite has those of its parts; an unknown name has none.
    """
    known: dict[str, dict[str, int | str]] = {}
    parts = [part for name in names for part in parts_of(name) if part in BENCHMARKS]
    for name in parts:
        entry = BENCHMARKS[name]
        # A question with options is a choice, whatever the kind of the others.
        kinds: tuple[AnswerKind, ...] = (entry.kind,) if entry.kind else get_args(ProblemKind)
        graders: dict[str, int | str] = {} if entry.grade else {kind: GRADERS[kind] for kind in kinds}
        known[name] = {"questions": BENCHMARKS.version(name), **graders}
    return known
