"""Versions of the benchmarks' parsers, generators and graders, which are in the key of an evaluation that uses them.

Raise the one of a benchmark (`Benchmark.version`, `StandIn.version`) when its questions or prompts change, and the one
of an answer kind here when its grader gives other verdicts. A test knows the source that these versions stand for.
"""

from collections.abc import Iterable
from typing import get_args

from nautile.data.sources.reasoning_gym import ProblemKind
from nautile.evals.benchmarks.catalogue import BENCHMARKS, COMPOSITES
from nautile.evals.benchmarks.items import AnswerKind
from nautile.evals.benchmarks.stand_ins import HELD_OUT, STAND_INS

GRADERS: dict[AnswerKind, int] = {"number": 2, "math": 2, "choice": 1, "text": 1, "exact": 1, "instructions": 1}
PROBLEMS = 1  # held-out problems, and how an answer's kind is chosen


def versions(names: Iterable[str]) -> dict[str, dict[str, int]]:
    """Benchmark -> the version of its `questions`, and of the grader of each of its answer kinds.

    A composite has those of its parts; an unknown name has none.
    """
    known: dict[str, dict[str, int]] = {}
    parts = [part for name in names for part in COMPOSITES.get(name, (name,))]
    for name in parts:
        kinds: tuple[AnswerKind, ...] = get_args(ProblemKind)
        if name == HELD_OUT:
            version = PROBLEMS
        elif name in BENCHMARKS:
            version, kinds = BENCHMARKS[name].version, (BENCHMARKS[name].kind,)
        elif name in STAND_INS:
            version, kinds = STAND_INS[name].version, STAND_INS[name].kinds or kinds
        else:
            continue
        known[name] = {"questions": version, **{kind: GRADERS[kind] for kind in kinds}}
    return known
