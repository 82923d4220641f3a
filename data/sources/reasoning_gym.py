"""Verifiable problems from reasoning-gym's seeded generators, of six of them with worked rationales; its own scorers.

They stand in for SYNTH offline and are the problems of the reinforcement-learning stages. Each rationale is computed
here from the generator's metadata, so it is always right; a source of text may plant mistakes in it afterwards
(`data.sources.slips`). The stages that need no rationale take the other generators too, and `own_score` is the score
that the package itself gives an answer, with partial credit where it has some.

Problems of texts ("train"), of the reinforcement stages ("reinforce"), of their guard and of the evaluation are
disjoint by construction: a hash of the question's text decides its split, independent of seed, task mix and order.

`_factory` imports `reasoning_gym` late, and only the generators that are used: many modules need only the types.
"""

import hashlib
import importlib.util
import json
import random
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from nautile.common.errors import ConfigError
from nautile.common.extras import WITHOUT_DEPENDENCIES
from nautile.common.text import did_you_mean
from nautile.configs.base import TaskConfig
from nautile.configs.ingest import ARITHMETIC_TASKS

Operator = Literal["+", "-", "*"]
_COMPUTE: dict[Operator, Callable[[int, int], int]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
}


@dataclass(frozen=True)
class Result:
    """Refers to the result of an operation by its position in the solution, from 0."""

    position: int


@dataclass(frozen=True)
class Operation:
    """One step of a solution: `left operator right`."""

    left: int | Result
    operator: Operator
    right: int | Result


@dataclass(frozen=True)
class Statement:
    """A step as it is written: `left operator right = result`. The result may be wrong (`is_right`)."""

    left: int
    operator: Operator
    right: int
    result: int

    @property
    def truth(self) -> int:
        return _COMPUTE[self.operator](self.left, self.right)

    @property
    def is_right(self) -> bool:
        return self.result == self.truth

    def __str__(self) -> str:
        return f"{self.left} {self.operator} {self.right} = {self.result}."


def work_out(operations: Sequence[Operation], result_of: Callable[[Statement], int] | None = None) -> list[Statement]:
    """Evaluate the operations in order; each result is used by those that refer to it.

    `result_of`: the result to state in place of the right one, given the right statement; None: the right one.
    """
    statements: list[Statement] = []
    for operation in operations:
        left, right = (
            statements[operand.position].result if isinstance(operand, Result) else operand
            for operand in (operation.left, operation.right)
        )
        statement = Statement(left, operation.operator, right, _COMPUTE[operation.operator](left, right))
        if result_of is not None:
            statement = Statement(left, operation.operator, right, result_of(statement))
        statements.append(statement)
    return statements


def text_of(statements: Iterable[Statement]) -> str:
    """The statements as a rationale: '3 * 4 = 12. 2 * 6 = 12. 12 + 12 = 24.'"""
    return " ".join(map(str, statements))


def sum_of(operands: Sequence[int | Result], at: int) -> list[Operation]:
    """The additions that sum the operands from left to right, if the first of them has position `at`."""
    operations: list[Operation] = []
    for operand in operands[1:]:
        left = Result(at + len(operations) - 1) if operations else operands[0]
        operations.append(Operation(left, "+", operand))
    return operations


ProblemSplit = Literal["train", "reinforce", "guard", "held_out"]
ProblemKind = Literal["number", "math", "choice", "text"]
_POSITIONS = 1 << 20  # problems per task and seed; most generators are lazy, gsm_symbolic draws a list of this length
_REPEATS_TO_EXHAUSTION = 2000  # positions in a row without a new problem of the split, after which a task is exhausted
_OTHER_POSITIONS = 1 << 14  # of a task without a rationale here: some make a list of all, or refuse a longer one
_IMPORTING = threading.Lock()
# Imported by `gsm_symbolic` when it is used, by name.
_BESIDE = {"gsm_symbolic": ("arithmetic.gsm_symbolic.generators_00_49", "arithmetic.gsm_symbolic.generators_50_99")}
_REGISTERED = re.compile(r'^DATASET_NAME = "(\w+)"|\bregister_dataset\(\s*"(\w+)"', re.MULTILINE)
# Tasks that are not used, and why. What a model writes must not run here; and a scorer in another process draws a
# problem again.
EVALUATED, UNREPEATABLE = "its scorer evaluates an answer as Python code", "it draws other problems in every process"
REFUSED = {
    **dict.fromkeys(
        (
            "binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication",
            "puzzle24", "simple_integration", "spiral_matrix", "string_insertion",
        ),
        EVALUATED,
    ),
    **dict.fromkeys(
        # The first two mostly draw alike, but not on a busy machine.
        ("codeio", "list_functions", "isomorphic_strings", "knight_swap", "ransom_note", "word_ladder"),
        UNREPEATABLE,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """One problem. `rationale` ends before the answer is stated; `answer` is what reasoning-gym checks against.

    `answer` is empty if there is no answer key. `kind`: how answers are compared; None: by the form of the answer
    (`evals.benchmarks.items.answer_kind`). `options`: of a multiple-choice problem, whose answer is a letter.
    `operations`: the rationale as data, of the tasks in `ARITHMETIC_TASKS`; the last result is the answer. `origin`: of
    a generated problem, what its generator draws it from again, as JSON.
    """

    task: str
    index: int
    question: str
    answer: str
    rationale: str
    kind: ProblemKind | None = None
    options: tuple[str, ...] = ()
    operations: tuple[Operation, ...] = field(default=(), repr=False)
    origin: str = ""


def derived_seed(seed: int, name: str) -> int:
    """A seed below 2**62 for one use of `seed`, unrelated to those of other names and seeds."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 2


def problems(tasks: Sequence[TaskConfig], seed: int, split: ProblemSplit, *, worked: bool = True) -> Iterator[Problem]:
    """Generate distinct problems of one split in a deterministic order, until every task is exhausted.

    `worked`: only tasks with a worked rationale; else all but those of `REFUSED`. Raises
    `ConfigError` for an unknown task, one whose package is not installed, or a parameter that its generator refuses.
    """
    # Problem i of a generator's seed s + 1 is problem i + 1 of its seed s, so seeds in a row must be spread.
    seed, generators = derived_seed(seed, "generators"), []
    for task in tasks:
        if task.name not in (known := (*ARITHMETIC_TASKS, *_RATIONALES)):
            if worked:
                raise ConfigError(f"tasks: no task {task.name!r} with a worked rationale; there are {', '.join(known)}")
            if task.name in REFUSED:
                raise ConfigError(f"tasks: reasoning-gym's {task.name!r} is not used here: {REFUSED[task.name]}")
            if task.name not in _modules():
                raise ConfigError(
                    f"tasks: reasoning-gym has no task {task.name!r}{did_you_mean(task.name, _modules())}"
                )
        generators.append(_dataset(task.name, seed, tuple(sorted(task.parameters.items()))))
    # Keyed by position, not by name: a task may be listed twice, with easy and with hard parameters.
    weights = {number: task.weight for number, task in enumerate(tasks)}
    positions = [0] * len(tasks)
    rng = random.Random(seed)
    digests: set[bytes] = set()  # of the questions so far
    while weights:
        # Choose a task by weight and take its next new problem of the split; a task without one is removed.
        number = rng.choices(list(weights), list(weights.values()))[0]
        last = min(positions[number] + _REPEATS_TO_EXHAUSTION, _positions(tasks[number].name))
        for index in range(positions[number], last):
            positions[number] = index + 1
            origin = json.dumps([seed, tasks[number].parameters])
            with _packages_named(tasks[number].name):
                entry = generators[number][index]
            problem = replace(_problem(tasks[number].name, index, entry), origin=origin)
            digest = hashlib.sha256(problem.question.encode()).digest()
            if problem_split(problem.question) == split and digest not in digests:
                digests.add(digest)
                yield problem
                break
        else:
            del weights[number]


def problem_split(question: str) -> ProblemSplit:
    """The split of a question, by its hash: 5 % held out, 5 % guard, 20 % reinforce, 70 % train."""
    bucket = int.from_bytes(hashlib.sha256(b"split:" + question.encode()).digest()[:4], "big") % 20
    return "held_out" if bucket == 0 else "guard" if bucket == 1 else "reinforce" if bucket < 6 else "train"


def is_correct(problem: Problem, answer: str) -> bool:
    """Whether reasoning-gym gives the answer full credit; partial credit (an answer amid other text) does not count."""
    entry = {"question": problem.question, "answer": problem.answer, "metadata": {"source_dataset": problem.task}}
    return float(_factory(problem.task).get_score_answer_fn(problem.task)(answer.strip(), entry)) == 1.0


def own_score(problem: Problem, answer: str | None) -> float | None:
    """The score from 0 to 1 that reasoning-gym gives an answer, None: none was given; None of another source's problem.

    Its scorer may raise, and take long for a hostile answer.
    """
    if not problem.origin:
        return None
    seed, parameters = json.loads(problem.origin)
    dataset = _dataset(problem.task, seed, tuple(sorted(parameters.items())))
    return float(dataset.score_answer(answer, dataset[problem.index]))


def _positions(name: str) -> int:
    """Number of problems of a task for one seed."""
    return _POSITIONS if name in ARITHMETIC_TASKS or name in _RATIONALES else _OTHER_POSITIONS


@cache
def _dataset(name: str, seed: int, parameters: tuple[tuple[str, int | float | str], ...]) -> Any:
    size = _positions(name)
    if size == _OTHER_POSITIONS:
        seed >>= 31  # to 31 bits: NumPy's older generator takes no more
    factory = _factory(name)
    try:
        return factory.create_dataset(name, size=size, seed=seed, **dict(parameters))
    except (TypeError, AssertionError, ValueError) as error:
        raise ConfigError(f"tasks: reasoning-gym refuses the parameters of {name!r}: {error}") from None


@cache
def _modules() -> dict[str, str]:
    """Task -> the module below `reasoning_gym` that registers it, by its source: an import would take all packages."""
    root = _root()
    modules = {}
    for path in sorted(root.rglob("*.py")):
        for names in _REGISTERED.findall(path.read_text(encoding="utf-8")):
            modules[names[0] or names[1]] = ".".join(path.relative_to(root).with_suffix("").parts)
    return {name: module for name, module in modules.items() if "." in module}  # not the mixture of other tasks


def _root() -> Path:
    spec = importlib.util.find_spec("reasoning_gym")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("the package 'reasoning_gym' is not installed", name="reasoning_gym")
    return Path(spec.submodule_search_locations[0])


@cache
def _factory(task: str) -> ModuleType:
    """`reasoning_gym.factory`, with the generator of the task registered. Raises `ConfigError` for a missing package.

    The package's `__init__` imports 106 generators, SymPy and matplotlib, which takes 1.6 s, and packages that most
    generators do not need; the six with rationales take 0.1 s. To skip it, empty modules take the place of the packages
    during the import. They are removed afterwards, so that a later `import reasoning_gym` gets the whole package, with
    the same generators.
    """
    with _IMPORTING:
        root = _root()
        names = ["reasoning_gym", *sorted({f"reasoning_gym.{module.split('.')[0]}" for module in _modules().values()})]
        packages = [name for name in names if name not in sys.modules]
        try:
            for name in packages:
                sys.modules[name] = ModuleType(name)
                sys.modules[name].__path__ = [str(root.joinpath(*name.split(".")[1:]))]
            with _packages_named(task):
                # `coaching` first, or it imports itself in a circle.
                for module in ("coaching", _modules()[task], *_BESIDE.get(task, ())):
                    importlib.import_module(f"reasoning_gym.{module}")
            return sys.modules["reasoning_gym.factory"]
        finally:
            for name in packages:
                sys.modules.pop(name, None)


@contextmanager
def _packages_named(task: str) -> Iterator[None]:
    """Raise `ConfigError` for a package that the task needs and that is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"tasks: reasoning-gym's {task!r} needs the package {error.name!r}: install it with all that it asks for, "
            f"pip install reasoning-gym=={WITHOUT_DEPENDENCIES['reasoning-gym']}"
        ) from error


def _problem(task: str, index: int, entry: dict[str, Any]) -> Problem:
    question = entry["question"].strip()
    if task == "leg_counting":
        question = question.rpartition("\n\n")[2]  # the instruction before it is the same in every problem
    answer = "" if entry["answer"] is None else str(entry["answer"])
    if task in ARITHMETIC_TASKS:
        operations = tuple(_OPERATIONS[task](entry))
        return Problem(task, index, question, answer, text_of(work_out(operations)), operations=operations)
    return Problem(task, index, question, answer, _RATIONALES[task](entry) if task in _RATIONALES else "")


def _chain(entry: dict[str, Any]) -> list[Operation]:
    """Operations of a sum: terms added from left to right: '4 + 9 = 13. 13 - 7 = 6.'"""
    terms = re.findall(r"([+-]?)\s*(\d+)", entry["metadata"]["expression"])
    operations: list[Operation] = []
    for sign, digits in terms[1:]:
        left = Result(len(operations) - 1) if operations else int(terms[0][0] + terms[0][1])
        operations.append(Operation(left, sign, int(digits)))
    return operations


def _product(entry: dict[str, Any]) -> list[Operation]:
    """Operations of a product by place value, for 7 * 36: '7 * 30 = 210. 7 * 6 = 42. 210 + 42 = 252.'"""
    left, right = (int(x) for x in entry["metadata"]["expression"].split("*"))
    parts = [int(d) * 10**p for p, d in reversed(list(enumerate(reversed(str(right))))) if d != "0"]
    if len(parts) < 2:
        return [Operation(left, "*", right)]
    products = [Operation(left, "*", part) for part in parts]
    return [*products, *sum_of([Result(i) for i in range(len(parts))], len(parts))]


def _legs(entry: dict[str, Any]) -> list[Operation]:
    # Not by an import, which would run the whole package's `__init__` (see `_factory`); the module itself stays loaded.
    animals, legs = entry["metadata"]["animals"], sys.modules["reasoning_gym.arithmetic.leg_counting"].ANIMALS
    counts = [Operation(n, "*", legs[animal]) for animal, n in animals.items()]
    return [*counts, *sum_of([Result(i) for i in range(len(counts))], len(counts))]


def _spell(entry: dict[str, Any]) -> str:
    word = entry["metadata"]["word"]
    return f"{' '.join(word)}. Backward: {' '.join(reversed(word))}."


def _gcd(entry: dict[str, Any]) -> str:
    a, b = entry["metadata"]["numbers"][:2]
    steps = []
    while b:
        steps.append(f"{a} = {a // b} * {b} + {a % b}.")
        a, b = b, a % b
    return " ".join(steps)


def _symbolic(entry: dict[str, Any]) -> str:
    return entry["metadata"]["answer_cot"].partition("####")[0].strip()


# Of each of `ARITHMETIC_TASKS`, the operations of its rationale.
_OPERATIONS: dict[str, Callable[[dict[str, Any]], list[Operation]]] = {
    "chain_sum": _chain,
    "products": _product,
    "leg_counting": _legs,
}
_RATIONALES: dict[str, Callable[[dict[str, Any]], str]] = {
    "spell_backward": _spell,
    "gcd": _gcd,
    "gsm_symbolic": _symbolic,
}
