"""The problems of the reinforcement stages: a fixed list by config and seed, and the order in which steps take them.

A step's problems depend on a cursor alone, so a resumed run asks the same ones. Only training splits are read, and
problems that overlap a question of a benchmark are left out (`ProblemScreen`). Problems of one generator share a
template, so for them the screen compares whole questions, and a hash of the question decides the split
(`data.sources.reasoning_gym`).
"""

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from configs.training import MOST_GUARD, PolicyConfig, ProblemsConfig
from data.screening.contamination import ContaminationIndex
from data.sources import reasoning_gym
from data.sources.reasoning_gym import Problem, ProblemSplit, problem_split
from evals.benchmarks.catalogue import BENCHMARKS
from evals.benchmarks.loading import COMMIT, read_hub

SCREENED_AT_ONCE = 256
SHOWN_HITS = 20  # overlaps listed in the manifest
READ_AT_MOST = 10  # times as many problems as are wanted: if those are not enough, the rest will overlap as well


class ProblemScreen:
    """Leaves out problems that overlap a held-out question, and remembers which."""

    def __init__(self, contamination: ContaminationIndex | None) -> None:
        self._contamination = contamination
        self._hits: list[dict[str, Any]] = []

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

    def facts(self) -> dict[str, Any]:
        """For a manifest: how many were left out, by benchmark, and the first of them; {} where nothing is held out."""
        if self._contamination is None:
            return {}
        by_benchmark = dict(sorted(Counter(hit["benchmark"] for hit in self._hits).items()))
        return {"contaminated": by_benchmark, "hits": self._hits[:SHOWN_HITS]}


def load(
    config: ProblemsConfig,
    seed: int,
    split: ProblemSplit = "train",
    screen: ProblemScreen | None = None,
    *,
    or_fewer: bool = False,
) -> list[Problem]:
    """`config.count` problems of the split that pass `screen`, GSM8K's with the benchmark's own prompt.

    Raises `ConfigError` if there are fewer (unless `or_fewer`), or if one of them has no answer to check.
    """
    screen = screen or ProblemScreen(None)
    candidates = itertools.islice(_READERS[config.source](config, seed, split), READ_AT_MOST * config.count)
    problems = list(itertools.islice(screen.clean(candidates), config.count))
    if len(problems) < config.count and not or_fewer:
        rejected = sum(screen.facts().get("contaminated", {}).values())
        note = f" ({rejected} more overlap a benchmark)" if rejected else ""
        raise ConfigError(
            f"problems: {config.source!r} has {len(problems)} distinct {split} problems{note}, not {config.count}"
        )
    for problem in problems:
        if not problem.answer.strip():
            raise ConfigError(f"problems: {problem.task} #{problem.index} has no answer to check: {problem.question!r}")
    if config.source == "gsm8k":  # asked as the benchmark asks; the screen and the splits go by the bare question
        ask = BENCHMARKS["gsm8k"].ask
        return [replace(problem, question=ask.format(question=problem.question)) for problem in problems]
    return problems


def load_guard(
    config: ProblemsConfig, policy: PolicyConfig, seed: int, screen: ProblemScreen | None = None
) -> list[Problem]:
    """The problems that the guard measures; none where `policy` has no guard. Errors as `load`."""
    if policy.guard_every is None:
        return []
    count = policy.guard_problems or MOST_GUARD
    guard = config.model_copy(update={"count": count})
    return load(guard, seed, "guard", screen, or_fewer=policy.guard_problems is None)


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


def _reasoning(config: ProblemsConfig, seed: int, split: ProblemSplit) -> Iterator[Problem]:
    """Generated problems of reasoning-gym."""
    if not config.tasks:
        raise ConfigError("problems.tasks: source 'reasoning' needs at least one task")
    return reasoning_gym.problems(config.tasks, seed, split)


def _gsm8k(config: ProblemsConfig, seed: int, split: ProblemSplit) -> list[Problem]:
    """GSM8K's training split from the Hub (its test split is a benchmark); a hash sets the guard problems apart."""
    benchmark = replace(BENCHMARKS["gsm8k"], split="train")
    if config.revision and not COMMIT.fullmatch(config.revision):
        raise ConfigError(
            f"problems.revision: {config.revision!r} is not a full commit hash of {benchmark.hub}; "
            f"leave it out to read {benchmark.pinned}"
        )
    rows = read_hub(benchmark, config.revision or benchmark.pinned)
    problems = [gsm8k_problem(index, row) for index, row in enumerate(rows)]
    return [p for p in problems if (problem_split(p.question) == "guard") == (split == "guard")]


def gsm8k_problem(index: int, row: dict[str, str]) -> Problem:
    """One record of GSM8K, {question, answer: 'worked text #### 42'}, as a `Problem`."""
    rationale, separator, answer = row["answer"].rpartition("####")
    if not separator:
        raise ConfigError(f"gsm8k: record {index} has no '####' before its answer")
    return Problem("gsm8k", index, row["question"].strip(), answer.strip().replace(",", ""), rationale.strip())


def from_file(config: ProblemsConfig, seed: int, split: ProblemSplit) -> Iterator[Problem]:
    """The distinct problems of one split of a JSON-lines file, in its order. `ConfigError` names the line at fault."""
    if not config.path:
        raise ConfigError("problems.path: source 'jsonl' needs the file to read")
    path, seen = Path(config.path), set[str]()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"problems.path: {path} cannot be read ({error})") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        problem = _problem(path, number, line)
        if problem.question not in seen and problem_split(problem.question) == split:
            seen.add(problem.question)
            yield problem


def _problem(path: Path, number: int, line: str) -> Problem:
    """The problem on one line, its fields checked by hand so that a message can name line and field."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}:{number}: not a line of JSON ({error})") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{path}:{number}: not an object with `question` and `answer`")
    defaults = {"question": "", "answer": "", "task": "file", "rationale": ""}
    texts = {name: row.get(name, default) for name, default in defaults.items()}
    for name, text in texts.items():
        # An answer may be a number in the file; true and false are not numbers here.
        if isinstance(text, int | float) and not isinstance(text, bool) and name == "answer":
            text = texts[name] = str(text)
        if not isinstance(text, str):
            raise ConfigError(f"{path}:{number}: `{name}` is {text!r}, and must be text")
    for name in ("question", "answer"):
        if not texts[name].strip():
            raise ConfigError(f"{path}:{number}: no `{name}`: a problem needs a question and an answer to check")
    return Problem(texts["task"], number - 1, texts["question"].strip(), texts["answer"].strip(), texts["rationale"])


_READERS: dict[str, Callable[[ProblemsConfig, int, ProblemSplit], Iterable[Problem]]] = {
    "reasoning": _reasoning,
    "gsm8k": _gsm8k,
    "jsonl": from_file,
}
