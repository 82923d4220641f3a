"""Load the problems of the reinforcement stages: a fixed list by config and seed, and the order of the steps.

The problems of a step depend on a cursor alone, so a resumed run uses the same ones. Only training splits are read, and
problems that overlap a benchmark question are left out (`ProblemScreen`). Generated problems share a template, so for
them the screen compares whole questions, and a hash of the question decides the split (`data.sources.reasoning_gym`).
Screen and split use the bare question, without options and without the wording of a prompt. Generated training problems
are of the split "reinforce", so that no generated text has them.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any, Literal

from nautile.common.errors import ConfigError
from nautile.common.shares import whole_shares
from nautile.configs.training import MOST_GUARD, PolicyConfig, ProblemsConfig, ProblemSource
from nautile.data.screening.contamination import ContaminationIndex
from nautile.data.sources import reasoning_gym
from nautile.data.sources.reasoning_gym import Problem, ProblemSplit, problem_split
from nautile.rl.problems.files import check_expressions, read_problems, refuse_unanswered
from nautile.rl.problems.sets import TRAINING_SETS, prompt_of, prompts_without_answers, training_problems

Unanswered = Literal["refuse", "keep", "skip"]
SCREEN_BATCH = 256  # problems screened at a time
HITS_IN_FACTS = 20  # overlaps listed in the manifest
FIXED_SEED = 0  # of the problems that choose and measure, which another seed of the run leaves as they are
MOST_CANDIDATES = 10  # per problem needed: if so many are not enough, further ones will be rejected as well


class ProblemScreen:
    """Filter out problems that overlap a held-out benchmark question, and record which."""

    def __init__(self, contamination: ContaminationIndex | None) -> None:
        self._contamination = contamination
        self._hits: list[dict[str, Any]] = []
        self._sources: list[dict[str, Any]] = []

    def clean(self, problems: Iterable[Problem]) -> Iterator[Problem]:
        """The problems that overlap no benchmark question, in order."""
        if self._contamination is None:
            yield from problems
            return
        iterator = iter(problems)
        while batch := list(itertools.islice(iterator, SCREEN_BATCH)):
            for problem, hits in zip(batch, self._contamination.screen([p.question for p in batch]), strict=True):
                if hits:
                    self._hits.append({**asdict(hits[0]), "begins": problem.question[:80]})
                else:
                    yield problem

    @property
    def rejected(self) -> int:
        """Number of problems filtered out so far."""
        return len(self._hits)

    def add_source(
        self, source: ProblemSource, split: ProblemSplit, problems: list[Problem], left_out: Counter[str]
    ) -> None:
        """Record for `facts` the problems of a source, and how many were left out by reason."""
        name = source.path if source.source == "jsonl" else source.source
        if source.prompt_set is not None:
            name = f"prompts of {source.prompt_set.path or source.prompt_set.source}"
        unanswered = sum(not problem.answer for problem in problems)
        row = {"source": name, "split": split, "problems": len(problems), "without_answer": unanswered}
        self._sources.append(row | {"left_out": dict(sorted(left_out.items()))})

    def facts(self) -> dict[str, Any]:
        """The counts of each source and, with a screen, the overlaps by benchmark; for the manifest."""
        facts: dict[str, Any] = {"problem_sources": self._sources} if self._sources else {}
        if self._contamination is not None:
            facts["contaminated"] = dict(sorted(Counter(hit["benchmark"] for hit in self._hits).items()))
            facts["hits"] = self._hits[:HITS_IN_FACTS]
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
    """Load `config.count` problems of the split that pass `screen`; `question` of each becomes its whole prompt.

    Several sources contribute their shares, evenly mixed. `unanswered`: what to do with a problem without an answer.
    `fits`: whether a prompt is short enough. Too long ones of a training set or a prompt set are left out and
    counted; those of a generator or a file are kept, and the rollout engine raises an error for them.

    Raises `ConfigError` if a source has fewer problems than its share (unless `or_fewer`), or for an answer that is
    missing or cannot be compared.
    """
    screen, known_questions = screen or ProblemScreen(None), set[str]()
    parts = []
    for number, (source, count) in enumerate(shares(config)):
        rejected_before, left_out = screen.rejected, Counter[str]()
        field = f"problems.sources[{number}]" if config.sources else "problems"
        # A chain of generators: read, filter by answer, screen, word the prompt, filter duplicates and lengths.
        # Generators may be endless, so the candidates are limited as well as the result.
        candidates = itertools.islice(_READERS[source.source](source, seed, split), MOST_CANDIDATES * count)
        answered = _filter_answered(source, candidates, unanswered, left_out)
        prompts = (replace(problem, question=prompt_of(problem, source)) for problem in screen.clean(answered))
        usable = _filter_prompts(source, prompts, known_questions, fits, left_out)
        part = list(itertools.islice(usable, count))
        left_out["overlap a benchmark"] = screen.rejected - rejected_before
        if len(part) < count and not or_fewer:
            notes = ", ".join(f"{times} more {reason}" for reason, times in sorted(left_out.items()) if times)
            hint = "; lower `count` or this source's `weight`" if config.sources else ""
            available = f"{len(part)} distinct {split} problems{f' ({notes})' if notes else ''}"
            raise ConfigError(f"{field}: {source.source!r} has {available}, not {count}{hint}")
        if source.source == "jsonl":
            check_expressions(source, part)
        screen.add_source(source, split, part, left_out)
        parts.append(part)
    # Spread each source evenly over the whole list, so that any stretch of it has the same mixture.
    mixed = [
        ((index + 0.5) / len(part), number, problem)
        # The i-th of n has its place at (i + 1/2) / n of the list, whatever the other sources have.
        for number, part in enumerate(parts)
        for index, problem in enumerate(part)
    ]
    return [problem for _, _, problem in sorted(mixed, key=lambda entry: entry[:2])]


def shares(config: ProblemsConfig) -> list[tuple[ProblemSource, int]]:
    """Each source with its number of problems: `count` divided by weight, remainders to the largest fractions.

    Raises `ConfigError` for a source whose share is zero.
    """
    if config.sources is None:
        return [(config, config.count)]
    weights = {number: source.weight for number, source in enumerate(config.sources)}
    counts = list(whole_shares(config.count, weights).values())
    if 0 in counts:
        raise ConfigError(
            f"problems.sources[{counts.index(0)}]: its weight is too small for a single one of {config.count} problems"
        )
    return list(zip(config.sources, counts, strict=True))


def load_guard(
    config: ProblemsConfig,
    policy: PolicyConfig,
    screen: ProblemScreen | None = None,
    fits: Callable[[str], bool] | None = None,
) -> list[Problem]:
    """Load the guard's problems, all of which have an answer; none if `policy` has no guard. Errors as `load`.

    They are the same with every seed of the run, because runs are compared and settings chosen by them.
    """
    if policy.guard_every is None:
        return []
    guard = config.model_copy(update={"count": policy.guard_problems or MOST_GUARD})
    fewer = policy.guard_problems is None
    problems = load(guard, FIXED_SEED, "guard", screen, "skip", fits, or_fewer=fewer)
    if not problems:
        raise ConfigError("policy.guard_every: `problems` has no guard problem with an answer to check")
    return problems


def load_references(config: ProblemsConfig, count: int) -> list[Problem]:
    """Load at most `count` training problems with an answer, to calibrate judges on. Errors as `load`.

    They are the same with every seed of the run, so that another seed asks no judge about them again.
    """
    # All, because so few would not divide among the sources; any stretch of the list has their mixture.
    return load(config, FIXED_SEED, unanswered="skip", or_fewer=True)[:count]


def _filter_answered(
    source: ProblemSource, problems: Iterable[Problem], unanswered: Unanswered, left_out: Counter[str]
) -> Iterator[Problem]:
    """Skip, keep or refuse problems without an answer, by `unanswered`."""
    for problem in problems:
        if not problem.answer and unanswered == "refuse":
            refuse_unanswered(source, problem)
        if problem.answer or unanswered == "keep":
            yield problem
        else:
            left_out["have no answer"] += 1


def _filter_prompts(
    source: ProblemSource,
    problems: Iterable[Problem],
    known_questions: set[str],
    fits: Callable[[str], bool] | None,
    left_out: Counter[str],
) -> Iterator[Problem]:
    """Skip repeated prompts, and prompts of a training set or prompt set that are too long."""
    from_a_set = source.source in TRAINING_SETS or source.prompt_set is not None
    for problem in problems:
        if problem.question in known_questions:
            left_out["are asked already"] += 1
        elif from_a_set and fits is not None and not fits(problem.question):
            left_out["are longer than rollout.prompt_length"] += 1
        else:
            known_questions.add(problem.question)
            yield problem


class ProblemOrder:
    """An endless shuffled sequence of `count` problem indices, with another permutation in every epoch.

    `order[position]` is the index of a problem; it is computed from the seed, so any position can be resumed at.
    """

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._seed = count, seed
        self._epoch, self._permutation = -1, list[int]()

    def __getitem__(self, position: int) -> int:
        epoch, offset = divmod(position, self._count)
        if epoch != self._epoch:
            self._permutation = list(range(self._count))
            # Computed from the epoch alone, not from the permutation before it.
            random.Random(f"{self._seed}:{epoch}").shuffle(self._permutation)
            self._epoch = epoch
        return self._permutation[offset]


def _generated(source: ProblemSource, seed: int, split: ProblemSplit) -> Iterator[Problem]:
    """Problems generated by reasoning-gym."""
    if not source.tasks:
        raise ConfigError("problems.tasks: source 'reasoning' needs at least one task")
    return reasoning_gym.problems(source.tasks, seed, "reinforce" if split == "train" else split)


def _from_file(source: ProblemSource, seed: int, split: ProblemSplit) -> Iterator[Problem]:
    """The problems of one split of a file, in the file's order."""
    # No text is made from a file, so all its training problems may be reinforced.
    splits = ("train", "reinforce") if split == "train" else (split,)
    return (problem for problem in read_problems(source) if problem_split(problem.question) in splits)


_READERS: dict[str, Callable[[ProblemSource, int, ProblemSplit], Iterable[Problem]]] = {
    "reasoning": _generated,
    "jsonl": _from_file,
    "prompts": prompts_without_answers,
    **dict.fromkeys(TRAINING_SETS, training_problems),
}
