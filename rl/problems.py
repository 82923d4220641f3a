"""The problems of the reinforcement stages: a fixed list by config and seed, and the order in which steps take them.

A step's problems depend on a cursor alone, so that a resumed run asks the same ones. Only training splits are read.
"""

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path

from configs.schema import ProblemsConfig
from configs.section import ConfigError
from data import reasoning
from data.reasoning import Problem, Split
from rl.problem_files import from_file


def load(config: ProblemsConfig, seed: int, split: Split = "train") -> list[Problem]:
    """`config.count` problems of the split. `ConfigError` where there are fewer, or one has no answer to check."""
    found = list(itertools.islice(_READERS[config.source](config, seed, split), config.count))
    if len(found) < config.count:
        raise ConfigError(f"problems: {config.source!r} has {len(found)} distinct {split} problems, not {config.count}")
    for problem in found:
        if not problem.answer.strip():
            raise ConfigError(f"problems: {problem.task} #{problem.index} has no answer to check: {problem.question!r}")
    return found


class Order:
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


def _reasoning(config: ProblemsConfig, seed: int, split: Split) -> "itertools.islice[Problem]":
    if not config.tasks:
        raise ConfigError("problems.tasks: source 'reasoning' needs at least one task")
    return itertools.islice(reasoning.problems(config.tasks, seed, split), config.count)


def _gsm8k(config: ProblemsConfig, seed: int, split: Split) -> "list[Problem]":
    """GSM8K's training split from the Hub (its test split is a benchmark); a hash sets the guard problems apart."""
    if not config.revision:
        raise ConfigError("problems.revision: source 'gsm8k' needs a pinned commit of openai/gsm8k")
    from datasets import load_dataset  # 1.5 s to import

    rows = load_dataset("openai/gsm8k", "main", split="train", revision=config.revision)
    return [
        p
        for p in map(gsm8k_problem, range(len(rows)), rows)
        if (reasoning.split_of(p.question) == "guard") == (split == "guard")
    ]


def gsm8k_problem(index: int, row: dict[str, str]) -> Problem:
    """One record of GSM8K, {question, answer: 'worked text #### 42'}, as a `Problem`."""
    rationale, mark, answer = row["answer"].rpartition("####")
    if not mark:
        raise ConfigError(f"gsm8k: record {index} has no '####' before its answer")
    return Problem("gsm8k", index, row["question"].strip(), answer.strip().replace(",", ""), rationale.strip())


def gsm8k_file(path: Path) -> list[Problem]:
    """GSM8K from a local JSON-lines file in the data set's own form."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [gsm8k_problem(i, json.loads(line)) for i, line in enumerate(lines) if line.strip()]


_READERS: dict[str, Callable] = {"reasoning": _reasoning, "gsm8k": _gsm8k, "jsonl": from_file}
