"""The problems of the reinforcement stages: a fixed list by config and seed, and the order in which steps take them.

A step's problems depend on a cursor alone, so a resumed run asks the same ones. Only training splits are read, and
problems that overlap a question of a benchmark are left out (`ProblemScreen`). Problems of one generator share a
template, so for them the screen compares whole questions, and a hash of the question decides the split
(`data.sources.reasoning_gym`). Screen and split go by the bare question, without options and a prompt's wording.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any, Literal

from common.errors import ConfigError
from common.shares import whole_shares
from configs.training import MOST_GUARD, PolicyConfig, ProblemsConfig, ProblemSource
from data.screening.contamination import ContaminationIndex
from data.sources import reasoning_gym
from data.sources.reasoning_gym import Problem, ProblemSplit, problem_split
from rl.problems.files import check_expressions, read_problems, refuse_unanswered
from rl.problems.sets import TRAINING_SETS, asked, training_problems

Unanswered = Literal["refuse", "keep", "skip"]
SCREENED_AT_ONCE = 256
SHOWN_HITS = 20  # overlaps listed in the manifest
READ_AT_MOST = 10  # times as many problems as are wanted: if those are not enough, the rest will overlap as well


class ProblemScreen:
    """Leaves out problems that overlap a held-out question, and remembers which."""

    def __init__(self, contamination: ContaminationIndex | None) -> None:
        self._contamination = contamination
        self._hits: list[dict[str, Any]] = []
        self._sources: list[dict[str, Any]] = []

    def clean(self, problems: Iterable[Problem]) -> Iterator[Problem]:
        """The problems that overlap nothing, in order."""
        if self._contamination is None:
            yield from problems
            return
        rest = iter(problems)
        while batch := list(itertools.islice(rest, SCREENED_AT_ONCE)):
            for problem, hits in zip(batch, self._contamination.screen([p.question for p in batch]), strict=True):
                if hits:
                    self._hits.append({**asdict(hits[0]), "begins": problem.question[:80]})
                else:
                    yield problem

    @property
    def rejected(self) -> int:
        """How many it left out so far."""
        return len(self._hits)

    def add_source(
        self, source: ProblemSource, split: ProblemSplit, problems: list[Problem], left: Counter[str]
    ) -> None:
        """Remember for `facts` what a source gave, and how many were left out for which reason."""
        name = source.path if source.source == "jsonl" else source.source
        unanswered = sum(not problem.answer for problem in problems)
        row = {"source": name, "split": split, "problems": len(problems), "without_answer": unanswered}
        self._sources.append(row | {"left_out": dict(sorted(left.items()))})

    def facts(self) -> dict[str, Any]:
        """For a manifest: each source's counts and, where anything is held out, the overlaps by benchmark."""
        facts: dict[str, Any] = {"problem_sources": self._sources} if self._sources else {}
        if self._contamination is not None:
            facts["contaminated"] = dict(sorted(Counter(hit["benchmark"] for hit in self._hits).items()))
            facts["hits"] = self._hits[:SHOWN_HITS]
        return facts


def load(
    config: ProblemsConfig,
    seed: int,
    split: ProblemSplit = "train",
    screen: ProblemScreen | None = None,
    unanswered: Unanswered = "refuse",
    fits: Callable[[str], bool] | None = None,
    *,
    or_fewer: bool = False,
) -> list[Problem]:
    """`config.count` problems of the split that pass `screen`, with the prompts that their benchmarks ask.

    Several sources give their shares, mixed evenly. `unanswered`: what to do with a problem without an answer key.
    `fits`: whether a prompt is short enough; a training set's other problems are left out and counted, while one of a
    generator or of a file is refused later, by the engine. Raises `ConfigError` if a source has fewer than its share
    (unless `or_fewer`), or for an answer that is missing or cannot be compared.
    """
    screen, seen = screen or ProblemScreen(None), set[str]()
    parts = []
    for number, (source, count) in enumerate(shares(config)):
        before, left = screen.rejected, Counter[str]()
        where = f"problems.sources[{number}]" if config.sources else "problems"
        candidates = itertools.islice(_READERS[source.source](source, seed, split), READ_AT_MOST * count)
        answered = _answered(source, candidates, unanswered, left)
        prompts = (replace(problem, question=asked(problem, source)) for problem in screen.clean(answered))
        usable = _usable(source, prompts, seen, fits, left)
        part = list(itertools.islice(usable, count))
        left["overlap a benchmark"] = screen.rejected - before
        if len(part) < count and not or_fewer:
            notes = ", ".join(f"{times} more {reason}" for reason, times in sorted(left.items()) if times)
            hint = "; lower `count` or this source's `weight`" if config.sources else ""
            what = f"{len(part)} distinct {split} problems{f' ({notes})' if notes else ''}"
            raise ConfigError(f"{where}: {source.source!r} has {what}, not {count}{hint}")
        if source.source == "jsonl":
            check_expressions(source, part)
        screen.add_source(source, split, part, left)
        parts.append(part)
    # Each source spread evenly over the whole list, so that any stretch of it has the same mixture.
    mixed = [
        ((place + 0.5) / len(part), number, problem)
        for number, part in enumerate(parts)
        for place, problem in enumerate(part)
    ]
    return [problem for _, _, problem in sorted(mixed, key=lambda entry: entry[:2])]


def shares(config: ProblemsConfig) -> list[tuple[ProblemSource, int]]:
    """Each source and how many problems it gives: `count` by weight, the remainders to the largest fractions.

    Raises `ConfigError` for a source that is left without any.
    """
    if config.sources is None:
        return [(config, config.count)]
    weights = {number: source.weight for number, source in enumerate(config.sources)}
    counts = list(whole_shares(config.count, weights).values())
    if 0 in counts:
        raise ConfigError(f"problems.sources[{counts.index(0)}]: none of {config.count} problems falls to its weight")
    return list(zip(config.sources, counts, strict=True))


def load_guard(
    config: ProblemsConfig,
    policy: PolicyConfig,
    seed: int,
    screen: ProblemScreen | None = None,
    fits: Callable[[str], bool] | None = None,
) -> list[Problem]:
    """The problems that the guard measures, all with an answer; none where `policy` has no guard. Errors as `load`."""
    if policy.guard_every is None:
        return []
    guard = config.model_copy(update={"count": policy.guard_problems or MOST_GUARD})
    fewer = policy.guard_problems is None
    problems = load(guard, seed, "guard", screen, "skip", fits, or_fewer=fewer)
    if not problems:
        raise ConfigError("policy.guard_every: `problems` has no guard problem with an answer to check")
    return problems


def _answered(
    source: ProblemSource, problems: Iterable[Problem], unanswered: Unanswered, left: Counter[str]
) -> Iterator[Problem]:
    """The problems, without those that have no answer key if they are to be skipped."""
    for problem in problems:
        if not problem.answer and unanswered == "refuse":
            refuse_unanswered(source, problem)
        if problem.answer or unanswered == "keep":
            yield problem
        else:
            left["have no answer"] += 1


def _usable(
    source: ProblemSource,
    problems: Iterable[Problem],
    seen: set[str],
    fits: Callable[[str], bool] | None,
    left: Counter[str],
) -> Iterator[Problem]:
    """The problems whose prompts are new, and short enough where they come from a training set."""
    for problem in problems:
        if problem.question in seen:
            left["are asked already"] += 1
        elif source.source in TRAINING_SETS and fits is not None and not fits(problem.question):
            left["are longer than rollout.prompt_length"] += 1
        else:
            seen.add(problem.question)
            yield problem


class ProblemOrder:
    """An endless shuffled order over `count` problems: every epoch its own permutation, addressed by position."""

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._seed = count, seed
        self._epoch, self._permutation = -1, list[int]()

    def __getitem__(self, position: int) -> int:
        epoch, offset = divmod(position, self._count)
        if epoch != self._epoch:
            self._permutation = list(range(self._count))
            random.Random(f"{self._seed}:{epoch}").shuffle(self._permutation)
            self._epoch = epoch
        return self._permutation[offset]


def _reasoning(source: ProblemSource, seed: int, split: ProblemSplit) -> Iterator[Problem]:
    """Generated problems of reasoning-gym."""
    if not source.tasks:
        raise ConfigError("problems.tasks: source 'reasoning' needs at least one task")
    return reasoning_gym.problems(source.tasks, seed, split)


def _from_file(source: ProblemSource, seed: int, split: ProblemSplit) -> Iterator[Problem]:
    """The problems of one split of a file, in its order."""
    return (problem for problem in read_problems(source) if problem_split(problem.question) == split)


_READERS: dict[str, Callable[[ProblemSource, int, ProblemSplit], Iterable[Problem]]] = {
    "reasoning": _reasoning,
    "jsonl": _from_file,
    **dict.fromkeys(TRAINING_SETS, training_problems),
}
