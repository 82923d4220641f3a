"""Load the problems of the reinforcement stages: a fixed list by config and seed, and the order of the steps.

The problems of a step depend on a cursor alone, so a resumed run uses the same ones. Only training splits are read, and
problems that overlap a benchmark question are left out (`ProblemScreen`). Generated problems share a template, so for
them the screen compares whole questions, and a hash of the question decides the split (`data.sources.reasoning_gym`).
Screen and split use the bare question, without options and prompt. Generated training problems are of the split
"reinforce", which no generated text has.

Problem files are described in docs/problems.md; their rows are checked by hand, so that a message can name the file,
line and field. A training set of the Hub is prompted and graded like the benchmark of the same name.
"""

import itertools
import json
import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn, cast, get_args

from nautile.common.errors import ConfigError
from nautile.common.files import read_bounded_text
from nautile.common.shares import whole_shares
from nautile.configs.training import MOST_GUARD, PolicyConfig, ProblemsConfig, ProblemSource
from nautile.data.distill.prompts import Prompt, check_prompt_set, read_prompt_set
from nautile.data.reply_objects import reply_objects
from nautile.data.screening.contamination import ContaminationIndex
from nautile.data.screening.language import detect_language
from nautile.data.sources import reasoning_gym
from nautile.data.sources.reasoning_gym import Problem, ProblemKind, ProblemSplit, problem_split
from nautile.evals.benchmarks.catalogue import MATH_PROMPT, PAPER, Benchmark, items_of
from nautile.evals.benchmarks.items import LETTERS, answer_kind, multiple_choice
from nautile.evals.benchmarks.loading import COMMIT, read_hub
from nautile.evals.benchmarks.schemas import BenchmarkRecord, Question
from nautile.evals.graders.answer_spans import boxed
from nautile.evals.graders.choices import plain
from nautile.evals.graders.equivalence import shared
from nautile.evals.graders.numbers import parse_number

Unanswered = Literal["refuse", "keep", "skip"]
SCREEN_BATCH = 256  # problems screened at a time
HITS_IN_FACTS = 20  # overlaps listed in the manifest
FIXED_SEED = 0  # of the problems that choose and measure, which another seed of the run leaves as they are
MOST_CANDIDATES = 10  # per problem needed: if so many are not enough, further ones will be rejected as well
KINDS = get_args(ProblemKind)
LARGEST = 2 * 2**30  # bytes of a file
SOLVED_SOURCES = ("reasoning", "gsm8k", "math", "jsonl")  # whose problems have, or may have, a worked solution
ONLY_ALIGN = "this stage rewards right answers (only [align] takes such problems: its judge reads the question alone)"


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
    `fits`: whether a prompt is short enough; too long ones of a training set or a prompt set are left out and counted,
    those of a generator or a file are kept, and refused by the rollout engine. Raises `ConfigError` if a source has
    fewer problems than its share (unless `or_fewer`), or for an answer that is missing or cannot be compared.
    """
    screen, known_questions = screen or ProblemScreen(None), set[str]()
    parts = []
    for number, (source, count) in enumerate(shares(config)):
        rejected_before, left_out = screen.rejected, Counter[str]()
        field = f"problems.sources[{number}]" if config.sources else "problems"
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
    """Each source with its share of `count` by weight. Raises `ConfigError` for a source whose share is zero."""
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
    """The guard's problems, all with an answer, the same with every seed; none if `policy` has no guard. Errors as
    `load`.
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
    """At most `count` training problems with an answer, to calibrate judges on, the same with every seed. Errors as
    `load`.
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
    """An endless sequence of `count` problem indices, shuffled anew in every epoch; `order[position]` is one."""

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


def _generated(source: ProblemSource, seed: int, split: ProblemSplit) -> Iterator[Problem]:
    """Problems generated by reasoning-gym, with a worked rationale or without."""
    if not source.tasks:
        raise ConfigError("problems.tasks: source 'reasoning' needs at least one task")
    return reasoning_gym.problems(source.tasks, seed, "reinforce" if split == "train" else split, worked=False)


def _from_file(source: ProblemSource, seed: int, split: ProblemSplit) -> Iterator[Problem]:
    """The problems of one split of a file, in the file's order."""
    # No text is made from a file, so all its training problems may be reinforced.
    splits = ("train", "reinforce") if split == "train" else (split,)
    return (problem for problem in read_problems(source) if problem_split(problem.question) in splits)


def read_problems(source: ProblemSource) -> Iterator[Problem]:
    """Read the problems of a file in order, without repeated questions; `answer` is empty where a row has none.

    Raises `ConfigError` with the line at fault. "math" answers are not parsed, which takes 20 ms each:
    `check_expressions`.
    """
    if not source.path:
        raise ConfigError("problems.path: source 'jsonl' needs the file to read")
    path, known_questions = Path(source.path), set[str]()
    try:
        lines = read_bounded_text(path, LARGEST).split("\n")  # not `splitlines`: a question may hold U+2028
    except ConfigError as error:
        raise ConfigError(f"problems.path: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        problem = _Row(path, number, line).problem()
        # With the options, because many multiple-choice sets ask the same question with others.
        question = f"{problem.question}\n{problem.options}"
        if question not in known_questions:
            known_questions.add(question)
            yield problem


def refuse_unanswered(source: ProblemSource, problem: Problem) -> NoReturn:
    """Raise the `ConfigError` for a problem without an answer, in a stage that has to check answers."""
    where = f"{source.path}:{problem.index + 1}" if source.source == "jsonl" else source.source
    raise ConfigError(f"problems.path: {where}: no `answer`: {ONLY_ALIGN}")


def check_files(config: ProblemsConfig, stage: str, field: str = "problems") -> None:
    """Validate the problem files of `stage.field` before a run; raises `ConfigError` for the first bad row.

    A prompt set is checked as far as that needs no request, and refused in a stage that rewards right answers.
    """
    for number, source in enumerate(config.sources or (config,)):
        place = f"{stage}.{field}{f'.sources[{number}]' if config.sources else ''}"
        if source.prompt_set is not None:
            if stage != "align":
                raise ConfigError(f"{place}.source: its prompts have no answers: {ONLY_ALIGN}")
            check_prompt_set(source.prompt_set)
        if source.source != "jsonl":
            continue
        try:
            for problem in read_problems(source):
                if not problem.answer and stage != "align":
                    refuse_unanswered(source, problem)
        except ConfigError as error:
            reason = str(error).removeprefix("problems.path: ")
            raise ConfigError(f"{place}.path: {reason}") from None


def check_expressions(source: ProblemSource, problems: Sequence[Problem]) -> None:
    """Raise `ConfigError` for the first "math" answer that cannot be read: no reply could equal it by value."""
    for problem in problems:
        kind = problem.kind or answer_kind(problem.answer)
        if problem.answer and kind == "math" and not shared().reads(problem.answer):
            raise ConfigError(
                f"{source.path}:{problem.index + 1}: `answer` {problem.answer!r} is not an expression; give the row "
                f'`"kind": "text"` to compare its answer as text'
            )


class _Row:
    """One line of a problem file. Its methods raise `ConfigError` with the file and line."""

    def __init__(self, path: Path, number: int, line: str) -> None:
        self._where, self._number = f"{path}:{number}", number
        try:
            self._fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            self._refuse(f"not a line of JSON ({error})")
        if not isinstance(self._fields, dict):
            self._refuse("not an object with `question` and `answer`")
        # The same line read as its writer may have meant it: "\\frac" in JSON is a form feed and "rac".
        # Only a line with a backslash has an escape, and reading a line so takes several times as long.
        objects = reply_objects(line) if "\\" in line else []
        meant = objects[0].value if objects else {}
        for name, value in self._fields.items():
            if isinstance(value, str) and meant.get(name, value) != value:
                self._refuse(f"`{name}` begins an escape of JSON where LaTeX is meant: write its backslashes twice")

    def problem(self) -> Problem:
        """Check the fields and make the problem."""
        question, answer = self._text("question").strip(), self._text("answer").strip()
        if not question:
            self._refuse("no `question`")
        options, kind = self._options(), self._fields.get("kind")
        if kind is not None and kind not in KINDS:
            self._refuse(f"`kind` is {kind!r}, and must be one of {', '.join(KINDS)}")
        if options and kind not in (None, "choice"):
            self._refuse(f"`options` belong to the kind choice, and `kind` is {kind!r}")
        if kind == "choice" and not options:
            self._refuse("no `options`, which a choice is between")
        if options:
            kind, answer = "choice", self._letter(answer, options)
        if answer:
            self._check(kind or answer_kind(answer), answer)
        task, rationale = self._text("task") or "file", self._text("rationale")
        return Problem(task, self._number - 1, question, answer, rationale, kind, options)

    def _text(self, name: str) -> str:
        value = self._fields.get(name)
        # An answer may be a number in the file; true and false are not numbers here.
        if name == "answer" and isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
        if value is not None and not isinstance(value, str):
            self._refuse(f"`{name}` is {value!r}, and must be text")
        return value or ""

    def _options(self) -> tuple[str, ...]:
        options: Any = self._fields.get("options")
        if options is None:
            return ()
        texts = [option for option in options if isinstance(option, str)] if isinstance(options, list) else []
        if not 2 <= len(texts) <= len(LETTERS) or len({plain(text) for text in texts}) != len(options):
            self._refuse(f"`options` must be two to {len(LETTERS)} different texts")
        return tuple(text.strip() for text in texts)

    def _letter(self, answer: str, options: tuple[str, ...]) -> str:
        """The letter of the right option, which a file gives as the letter or as the text; "" without an answer."""
        letters = dict(zip(map(str.casefold, LETTERS), LETTERS[: len(options)], strict=False))
        texts = {plain(option): letter for option, letter in zip(options, LETTERS, strict=False)}
        stated = plain(answer)
        if answer and stated not in letters and stated not in texts:
            last = LETTERS[len(options) - 1]
            self._refuse(f"`answer` {answer!r} is neither a letter from A to {last} nor the text of an option")
        return letters.get(stated) or texts.get(stated, "") if answer else ""

    def _check(self, kind: ProblemKind, answer: str) -> None:
        """Refuse an answer that does not parse as its kind, because no reply could equal it."""
        if kind == "number" and parse_number(answer) is None:
            self._refuse(f"`answer` {answer!r} is not one number")
        if kind == "text" and not plain(answer):
            self._refuse(f"`answer` {answer!r} has no word or number to compare")
        # A cheap check of each row; `check_expressions` parses those that are used.
        braces = re.sub(r"\\[{}]|[^{}]", "", answer)  # without escaped ones, which LaTeX prints
        if kind == "math" and braces.count("{") != braces.count("}"):
            self._refuse(f"`answer` {answer!r} has unbalanced braces")

    def _refuse(self, reason: str) -> NoReturn:
        raise ConfigError(f"{self._where}: {reason}")


@dataclass(frozen=True)
class TrainingSet:
    """The training split of a Hub repository, as one or several subsets, and the commit that it is pinned to."""

    parts: tuple[Benchmark, ...]
    pinned: str

    @property
    def ask(self) -> str:
        """The prompt template of a question without options."""
        return self.parts[0].ask


def _solved(record: BenchmarkRecord) -> Question:
    r"""Parse a record of MATH: the expected answer is the content of the last `\boxed{}` in `solution`."""
    answers = boxed(record.text("solution"))
    if not answers or not answers[-1]:
        record.refuse("field `solution` has no `\\boxed{}` with an answer")
    return Question(
        record.text("problem"),
        expected=answers[-1],
        category=record.optional_text("type"),
        rationale=record.text("solution"),
    )


_SUBJECTS = (
    "algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra",
    "precalculus",
)  # fmt: skip
_MATH = Benchmark(
    "math", "MATH", "EleutherAI/hendrycks_math", "", "train", 7500, "math", 0.0, _solved, MATH_PROMPT,
    commit="21a5633873b6a120296cce3e2df9d5550074f4a3",
)  # fmt: skip
# Rows of the training splits: gsm8k 7,473, math 7,500, arc_easy 2,251, arc_challenge 1,119, commonsense_qa 9,741,
# openbookqa 4,957. MATH's commit is the one that several public projects pin; it was recorded without access to the
# Hub.
TRAINING_SETS: dict[str, TrainingSet] = {
    **{entry.name: TrainingSet((replace(entry, split=entry.train),), entry.commit) for entry in PAPER if entry.train},
    _MATH.name: TrainingSet(tuple(replace(_MATH, subset=subject) for subject in _SUBJECTS), _MATH.commit),
}
BAD_ROWS = 0.01  # share of a set's records that may lack an answer: MATH has a few boxes without braces


def training_problems(source: ProblemSource, seed: int, split: ProblemSplit) -> list[Problem]:
    """Read the problems of a training set, with the bare question. Raises `ConfigError` for a revision that is no
    commit.
    """
    training_set = TRAINING_SETS[source.source]
    hub = training_set.parts[0].hub
    if source.revision and not COMMIT.fullmatch(source.revision):
        raise ConfigError(
            f"problems.revision: {source.revision!r} is not a full commit hash of {hub}; "
            f"leave it out to read {training_set.pinned}"
        )
    problems, first_index = list[Problem](), 0
    for part in training_set.parts:
        rows = list(read_hub(part, source.revision or training_set.pinned))
        for item in items_of(part, rows, seed, BAD_ROWS):
            kind = cast(ProblemKind, item.kind)  # these sets have no items of other kinds
            index = first_index + item.index
            problems.append(Problem(part.name, index, item.question, item.expected, item.rationale, kind, item.options))
        first_index += len(rows)
    if len(training_set.parts) > 1:  # mix the subsets, or the first problems would all be of one subject
        random.Random(f"{source.source}/{seed}").shuffle(problems)
    # By a hash of the question: guard problems stay the same ones however many are asked for.
    return [p for p in problems if (problem_split(p.question) == "guard") == (split == "guard")]


def prompts_without_answers(source: ProblemSource, seed: int, split: ProblemSplit) -> Iterator[Problem]:
    """The prompts of `source.prompt_set` as problems without an answer, in the order of the set; only for training."""
    prompt_set = source.prompt_set
    if prompt_set is None or split != "train":
        return
    with tempfile.TemporaryDirectory(prefix="nautile-prompts-") as folder:
        for number, row in enumerate(read_prompt_set(prompt_set, seed, Path(folder))):
            if not isinstance(row, Prompt):
                continue  # the reason why a row has no prompt
            languages = prompt_set.languages
            if not languages or (detect_language(row.query) or languages[0]) in languages:
                yield Problem(prompt_set.name, number, row.query, "", "")


def prompt_of(problem: Problem, source: ProblemSource) -> str:
    """The prompt of a problem: its question as the benchmark of its source words it, with its options if it has any."""
    if problem.options:
        return multiple_choice(problem.question, problem.options)
    training_set = TRAINING_SETS.get(source.source)
    return training_set.ask.format(question=problem.question) if training_set else problem.question


_READERS: dict[str, Callable[[ProblemSource, int, ProblemSplit], Iterable[Problem]]] = {
    "reasoning": _generated,
    "jsonl": _from_file,
    "prompts": prompts_without_answers,
    **dict.fromkeys(TRAINING_SETS, training_problems),
}
