"""Planted mistakes in worked arithmetic, by fact: text with gaps in knowledge, in place of a corpus that has them.

The paper's model reasons soundly from facts that it does not know well (§4.1). A small model that is trained on right
solutions has no such gaps, and mistakes at random are averaged away by greedy decoding. So a *fact*, such as `7 * 6` or
`12 + 9` (an operator and the magnitudes of its operands), has its own share of wrong statements: some facts are
misconceived, with one fixed wrong result in most of their statements, and the others slip at random now and then. What
follows is worked out from the wrong result, so that a text is sound but for its facts. A model that learns the text
perfectly states the likeliest result of each fact: `FactTable.greedy_accuracy` is what it would then solve.
"""

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import Any

from nautile.configs.ingest import SlipsConfig, TextTaskConfig
from nautile.data.sources.reasoning_gym import Operator, Problem, Statement, problems, text_of, work_out

OFFSETS = (-2, -1, 1, 2)  # a wrong result differs from the right one by one of these
SAMPLE = 8192  # problems from which the frequencies of the facts are estimated

Fact = tuple[Operator, int, int]  # operator, magnitude of the left operand, of the right one


def fact_of(statement: Statement) -> Fact:
    return statement.operator, abs(statement.left), abs(statement.right)


def shifted(statement: Statement, offset: int) -> int:
    """The right result plus `offset`, or minus it where a result that is not negative would become negative."""
    return statement.truth - offset if statement.truth + offset < 0 <= statement.truth else statement.truth + offset


@dataclass(frozen=True)
class Misconception:
    """A fact's fixed wrong result, as an offset to the right one, and the share of its statements that have it."""

    offset: int
    share: float


class FactTable:
    """Which facts of the tasks are misconceived, and how often each fact is stated wrongly; the same in every process.

    Facts are drawn by `config.seed` until they make up `config.misconceived` of all statements, by their frequencies
    in a sample of the tasks' problems. A fact that is not in the sample is not misconceived.
    """

    def __init__(self, tasks: Sequence[TextTaskConfig], config: SlipsConfig) -> None:
        self.config = config
        self._sample = list(islice(problems(tasks, config.seed, "train"), SAMPLE))
        self.frequencies = Counter(
            fact_of(statement) for problem in self._sample for statement in work_out(problem.operations)
        )
        self.misconceptions: dict[Fact, Misconception] = {}
        rng = random.Random(f"slips:{config.seed}")
        facts = sorted(self.frequencies)
        rng.shuffle(facts)
        low, high = config.wrong_share
        wanted, taken = config.misconceived * self.frequencies.total(), 0.0
        for fact in facts:
            # By half of its weight, so that the shares taken are as often below the wanted one as above it.
            if taken + self.frequencies[fact] / 2 > wanted:
                continue
            taken += self.frequencies[fact]
            self.misconceptions[fact] = Misconception(rng.choice(OFFSETS), rng.uniform(low, high))

    def slip(self, problem: Problem) -> Problem:
        """The problem with a solution worked out with slips, which its question decides, and the answer it leads to."""
        rng = random.Random(f"slips:{self.config.seed}:{problem.question}")

        def stated(statement: Statement) -> int:
            misconception = self.misconceptions.get(fact_of(statement))
            if misconception is None:
                misconception = Misconception(rng.choice(OFFSETS), self._rate(fact_of(statement)))
            is_wrong = rng.random() < misconception.share
            return shifted(statement, misconception.offset) if is_wrong else statement.truth

        statements = work_out(problem.operations, stated)
        return replace(problem, rationale=text_of(statements), answer=str(statements[-1].result))

    def likeliest(self, statement: Statement) -> int:
        """The result that most statements of this fact have in the text."""
        misconception = self.misconceptions.get(fact_of(statement))
        if misconception is None or misconception.share <= 0.5:
            return statement.truth
        return shifted(statement, misconception.offset)

    def greedy_accuracy(self, drawn: Iterable[Problem] | None = None) -> float:
        """Share of the problems that a perfect learner of the text solves greedily; by default of the sample."""
        drawn = self._sample if drawn is None else list(drawn)
        solved = [str(work_out(p.operations, self.likeliest)[-1].result) == p.answer for p in drawn]
        return sum(solved) / len(solved)

    def facts(self) -> dict[str, Any]:
        weight = sum(self.frequencies[fact] for fact in self.misconceptions) / self.frequencies.total()
        slipped = [self.slip(problem) for problem in self._sample]
        wrong = sum(a.answer != b.answer for a, b in zip(slipped, self._sample, strict=True))
        return {
            "facts": len(self.frequencies),
            "misconceived_facts": len(self.misconceptions),
            "misconceived_share": round(weight, 4),
            "wrong_answers_share": round(wrong / len(slipped), 4),
            "greedy_accuracy": round(self.greedy_accuracy(), 4),
        }

    def _rate(self, fact: Fact) -> float:
        """The share of random slips in the statements of a fact that is not misconceived."""
        return random.Random(f"slips:{self.config.seed}:{fact}").uniform(0.0, self.config.other_share)


class Slips:
    """The tables of a source: tasks with equal settings share one, so that a fact is the same in all of them."""

    def __init__(self, tasks: Sequence[TextTaskConfig]) -> None:
        by_settings: dict[str, list[TextTaskConfig]] = {}
        for task in tasks:
            if task.slips is not None:
                by_settings.setdefault(task.slips.model_dump_json(), []).append(task)
        self.tables: dict[str, FactTable] = {}
        for same in by_settings.values():
            assert same[0].slips is not None
            table = _table(tuple(task.model_dump_json() for task in same))
            self.tables |= {task.name: table for task in same}

    def apply(self, problem: Problem) -> Problem:
        """The problem as the text has it: with slips if its task has them."""
        table = self.tables.get(problem.task)
        return problem if table is None else table.slip(problem)

    def facts(self) -> Mapping[str, Any] | None:
        """`FactTable.facts` of each table by the names of its tasks; None without any."""
        names: dict[int, list[str]] = {}
        for name, table in self.tables.items():
            names.setdefault(id(table), []).append(name)
        return {", ".join(tasks): self.tables[tasks[0]].facts() for tasks in names.values()} or None


@cache
def _table(tasks: tuple[str, ...]) -> FactTable:
    """The table of the tasks, as JSON; kept, because a source is read file by file."""
    parsed = [TextTaskConfig.model_validate_json(task) for task in tasks]
    assert parsed[0].slips is not None
    return FactTable(parsed, parsed[0].slips)
