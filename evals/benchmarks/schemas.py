"""Records of the benchmarks in the Hub's own schemas, read into `Question`s. A record that does not fit is refused by
name: benchmark, position and field."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from common.errors import ConfigError
from evals.graders.instructions import check_known
from evals.graders.numbers import parse_number


@dataclass(frozen=True)
class Question:
    """What a record asks and what is right: `correct` is the index into `options`, where there are any."""

    text: str
    expected: str = ""
    id: str | None = None
    category: str | None = None
    options: tuple[str, ...] = ()
    correct: int | None = None
    aliases: tuple[str, ...] = ()
    instructions: tuple[str, ...] = ()
    arguments: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Row:
    """A record with the name by which errors refer to it."""

    fields: Mapping[str, Any]
    where: str

    def text(self, name: str) -> str:
        value = self.value(name, str)
        return value.strip() or self.refuse(f"field `{name}` is empty")

    def value(self, name: str, *kinds: type) -> Any:
        if name not in self.fields or self.fields[name] is None:
            self.refuse(f"field `{name}` is missing; there are {', '.join(map(str, self.fields)) or 'none'}")
        value = self.fields[name]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            self.refuse(f"field `{name}` is {type(value).__name__}, not {' or '.join(kind.__name__ for kind in kinds)}")
        return value

    def maybe(self, name: str) -> str | None:
        value = self.fields.get(name)
        return None if value in (None, "") else str(value)

    def sub(self, name: str) -> "Row":
        return Row(self.value(name, dict), f"{self.where}, `{name}`")

    def texts(self, name: str) -> tuple[str, ...]:
        values = list(self.value(name, list, tuple))
        if not values or not all(isinstance(value, str) for value in values):
            self.refuse(f"field `{name}` is not a list of texts")
        return tuple(value.strip() for value in values)

    def option(self, options: Sequence[str], index: int, name: str) -> int:
        """`index` if it points into `options`, of which there must be two at least."""
        if len(options) < 2 or not 0 <= index < len(options):
            self.refuse(f"field `{name}` points to option {index}, and there are {len(options)}")
        return index

    def refuse(self, reason: str) -> NoReturn:
        raise ConfigError(f"{self.where}: {reason}")


def labelled(row: Row, question: str) -> Question:
    """OpenBookQA, ARC and CommonsenseQA: `choices` {text, label}, and `answerKey` among the labels."""
    choices = row.sub("choices")
    options, labels, key = choices.texts("text"), choices.texts("label"), row.text("answerKey")
    if len(labels) != len(options):
        row.refuse(f"`choices` has {len(labels)} labels for {len(options)} texts")
    if key not in labels:
        row.refuse(f"`answerKey` {key!r} is not among the labels {', '.join(labels)}")
    correct = row.option(options, labels.index(key), "answerKey")
    return Question(row.text(question), id=row.maybe("id"), options=options, correct=correct)


def openbookqa(row: Row) -> Question:
    return labelled(row, "question_stem")


def arc(row: Row) -> Question:
    return labelled(row, "question")


def commonsense_qa(row: Row) -> Question:
    return labelled(row, "question")


def gsm8k(row: Row) -> Question:
    """The number after `####` in `answer`."""
    worked, marker, final = row.text("answer").rpartition("####")
    number = parse_number(final)
    if not marker or not worked or number is None:
        row.refuse("field `answer` does not end in `#### <number>`")
    return Question(row.text("question"), expected=str(number))


def piqa(row: Row) -> Question:
    options = (row.text("sol1"), row.text("sol2"))
    return Question(row.text("goal"), options=options, correct=row.option(options, row.value("label", int), "label"))


def ifeval(row: Row) -> Question:
    """`kwargs` has a mapping per instruction; the keys of the other instructions are there too, as None."""
    names, arguments = row.texts("instruction_id_list"), row.value("kwargs", list, tuple)
    check_known(names, arguments, row.where)
    given = tuple({key: value for key, value in one.items() if value is not None} for one in arguments)
    return Question(row.text("prompt"), id=row.maybe("key"), instructions=names, arguments=given)


def trivia_qa(row: Row) -> Question:
    answer = row.sub("answer")
    value = answer.text("value")
    aliases = dict.fromkeys([value, *answer.texts("aliases"), *answer.texts("normalized_aliases")])
    spelled = tuple(alias for alias in aliases if alias)
    return Question(row.text("question"), expected=value, id=row.maybe("question_id"), aliases=spelled)


def math_500(row: Row) -> Question:
    return Question(
        row.text("problem"), expected=row.text("answer"), id=row.maybe("unique_id"), category=row.maybe("subject")
    )


def mmlu(row: Row) -> Question:
    options = row.texts("choices")
    correct = row.option(options, row.value("answer", int), "answer")
    return Question(row.text("question"), category=row.maybe("subject"), options=options, correct=correct)


def mmlu_pro(row: Row) -> Question:
    """Up to ten `options`; `answer` is the letter of `answer_index`, and the two must agree."""
    options = row.texts("options")
    correct = row.option(options, row.value("answer_index", int), "answer_index")
    if row.text("answer") != chr(ord("A") + correct):
        row.refuse(f"`answer` {row.text('answer')!r} is not the letter of `answer_index` {correct}")
    identity, category = row.maybe("question_id"), row.maybe("category")
    return Question(row.text("question"), id=identity, category=category, options=options, correct=correct)


def gpqa(row: Row) -> Question:
    """The right answer comes first here; the seeded order of the options moves it."""
    names = ["Correct Answer", *(f"Incorrect Answer {n}" for n in (1, 2, 3))]
    options = tuple(row.text(name) for name in names)
    category = row.maybe("High-level domain")
    return Question(row.text("Question"), id=row.maybe("Record ID"), category=category, options=options, correct=0)


# An option that speaks of the others by their place: such options keep the order in which they were published.
POSITIONAL = re.compile(
    r"\b(?:all|none|both|neither|any|either|two|some)\s+(?:of\s+)?(?:the|these|those|them)\b|\b(?:above|below)\b|"
    r"(?<!\w)\(?[A-J]\)?,?\s+(?:and|or|nor|&)\s+\(?[A-J]\)?(?!\w)|\b(?:options?|choices?|answers?)\s+\(?[A-J]\b",
    re.IGNORECASE,
)
