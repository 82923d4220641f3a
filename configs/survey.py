"""The sections of `nautile simulate`: a survey (the whole of a SURVEY.toml), who is asked, and how a model answers.

A survey is semantic as a whole: its text is what a model reads, and its humans are what it is compared with.
"""

import math
import re
from string import Formatter
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from configs.base import Operational, Section, Share

FIELD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?(?:@([0-9a-f]{40}))?")
READERS = {
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".toml": "margins",
}
BUILT_IN_SURVEYS = ("anes96", "fair")
SUM_TOLERANCE = 0.005  # of published shares, which are rounded
# Datasets of personas on the Hub: what is added to their name. A revision is given where a public one is known.
KNOWN_PERSONAS: dict[str, dict[str, str]] = {
    "nvidia/Nemotron-Personas-USA": {
        "revision": "5b4cd35ab46490c1da1bd2b5a2324d6f871be180", "id_column": "uuid",
    },
    "proj-persona/PersonaHub": {"subset": "persona"},
}  # fmt: skip

Shares = tuple[float, ...]
GroupShares = dict[str, dict[str, Shares]]  # field -> group -> shares of the options


class PersonasConfig(Section):
    """Who is asked: a table of people with named fields, one row a person.

    `margins`: a TOML file with a table of shares for each field, from which people are drawn, each field by itself.
    """

    reader: Literal["csv", "jsonl", "parquet", "hub", "margins", "built_in"]
    path: str = ""  # a file, the Hub's OWNER/NAME, or the name of a built-in survey
    subset: str = ""  # of the Hub's dataset; empty: its default
    split: str = "train"  # of the Hub's dataset
    revision: str = ""  # a commit of the Hub
    id_column: str = ""  # names a person; empty: the number of the row

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, values: Any) -> Any:
        """A text alone: a file by its ending, a built-in survey, or OWNER/NAME[:SUBSET][@REVISION] of the Hub."""
        if not isinstance(values, str):
            return values
        if values in BUILT_IN_SURVEYS:
            return {"reader": "built_in", "path": values}
        for ending, reader in READERS.items():
            if values.lower().endswith(ending):
                return {"reader": reader, "path": values}
        if match := HUB_ID.fullmatch(values):
            path, subset, revision = match.groups()
            given = {"subset": subset, "revision": revision}
            chosen = {name: value for name, value in given.items() if value}
            return {"reader": "hub", "path": path, **KNOWN_PERSONAS.get(path, {}), **chosen}
        raise ValueError(
            f"{values!r} is no file ({', '.join(READERS)}), no built-in survey ({', '.join(BUILT_IN_SURVEYS)}) and no "
            "dataset of the Hub (OWNER/NAME@REVISION)"
        )

    @model_validator(mode="after")
    def _complete(self) -> "PersonasConfig":
        if not self.path:
            raise ValueError(f"personas of reader {self.reader!r} need a `path`")
        if self.reader == "hub" and not re.fullmatch(r"[0-9a-f]{40}", self.revision):
            raise ValueError(
                f"{self.path} of the Hub needs a full commit hash, from its page's history: {self.path}@REVISION"
            )
        if self.reader == "built_in" and self.path not in BUILT_IN_SURVEYS:
            raise ValueError(f"no built-in survey {self.path!r}; there are {', '.join(BUILT_IN_SURVEYS)}")
        return self

    @property
    def label(self) -> str:
        """What it is called in messages."""
        return f"personas {self.path}"


class QuestionConfig(Section):
    """One question with its options, and how humans answered it where that is known.

    `humans` and `groups` are shares of the options, in their order. Where the survey has `respondents`, their own
    answers in `column` count instead.
    """

    name: str
    text: str
    options: tuple[str, ...]
    ordered: bool = False  # the options are a scale, from the first to the last
    values: tuple[float, ...] = ()  # places of the options on the scale; empty: evenly spaced
    weight: PositiveFloat = 1.0  # in means over the questions
    column: str = ""  # of the respondents' table, with their own answers; empty: the question's name
    codes: tuple[str, ...] = ()  # what that column has for each option; empty: the option's text
    humans: Shares = ()
    respondents: PositiveInt | None = None  # how many humans `humans` is the answers of; None: not known
    groups: GroupShares = {}

    @model_validator(mode="after")
    def _can_be_asked(self) -> "QuestionConfig":
        where = f"question {self.name!r}"
        if not FIELD.fullmatch(self.name):
            raise ValueError(f"{where}: a name has letters, digits and _, and begins with no digit")
        if not self.text.strip():
            raise ValueError(f"{where}: has no text")
        if len(self.options) < 2:
            raise ValueError(f"{where}: has {len(self.options)} options; a question of a survey has at least two")
        if not all(option.strip() for option in self.options):
            raise ValueError(f"{where}: option {[o.strip() for o in self.options].index('') + 1} is empty")
        if len(self.options) > 26:
            raise ValueError(f"{where}: has {len(self.options)} options; each has a letter, so 26 are the most")
        folded = [" ".join(option.split()).casefold() for option in self.options]
        if doubled := sorted({option for option in folded if folded.count(option) > 1}):
            raise ValueError(f"{where}: two of the options are {doubled[0]!r}")
        if self.values and (len(self.values) != len(self.options) or len(set(self.values)) < 2):
            raise ValueError(
                f"{where}: `values` needs a number for each of the {len(self.options)} options, not all equal"
            )
        if self.values and not self.ordered:
            raise ValueError(f"{where}: `values` are places on a scale, so `ordered` must be true")
        if self.codes and (len(self.codes) != len(self.options) or len(set(self.codes)) < len(self.codes)):
            raise ValueError(f"{where}: `codes` needs a different code for each of the {len(self.options)} options")
        named = {"humans": self.humans} if self.humans else {}
        named |= {f"groups.{by}.{g}": shares for by, groups in self.groups.items() for g, shares in groups.items()}
        for name, shares in named.items():
            if len(shares) != len(self.options):
                raise ValueError(f"{where}: `{name}` has {len(shares)} shares for {len(self.options)} options")
            if min(shares) < 0 or abs(math.fsum(shares) - 1) > SUM_TOLERANCE:
                raise ValueError(f"{where}: the shares of `{name}` sum to {math.fsum(shares):.4g}, not to 1")
        return self

    @property
    def scale(self) -> tuple[float, ...]:
        """The place of each option between 0 and 1."""
        values = self.values or tuple(range(len(self.options)))
        low, high = min(values), max(values)
        return tuple((value - low) / (high - low) for value in values)


class SurveyConfig(Section):
    """A survey: what each person is asked, how a persona is put into words, and humans to compare with."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    title: str
    source: str = ""  # who asked whom, when
    licence: str = ""  # of the human answers
    preface: str = ""  # before every persona
    persona: str = Field(min_length=1)  # a template over the fields of a person: "I am {age} years old."
    words: dict[str, str] = {}  # of a field, for {attribute} where a persona is a group; none: the field's name
    bands: dict[str, tuple[float, ...]] = {}  # of a field that is a number: the groups change at each of these
    questions: tuple[QuestionConfig, ...] = ()
    respondents: PersonasConfig | None = None  # people whose own answers are known
    predictors: tuple[str, ...] = ()  # fields that the baselines predict from; empty: those of the template
    held_out_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5  # of the respondents, whom everything is judged on
    split_seed: NonNegativeInt = 0

    @model_validator(mode="after")
    def _consistent(self) -> "SurveyConfig":
        if not self.questions:
            raise ValueError(f"survey {self.name!r} has no questions")
        names = [question.name for question in self.questions]
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"survey {self.name!r}: two questions are called {doubled[0]!r}")
        for field, edges in self.bands.items():
            if not edges or list(edges) != sorted(set(edges)):
                raise ValueError(f"survey {self.name!r}: bands.{field} must be numbers that rise")
        self.persona_fields  # noqa: B018 - raises for a template that cannot be filled
        return self

    @property
    def persona_fields(self) -> tuple[str, ...]:
        """The fields that the template of a persona names, in order."""
        try:
            parts = list(Formatter().parse(self.persona))
        except ValueError as error:
            raise ValueError(
                f"survey {self.name!r}: `persona` is no template ({error}); write {{{{ for a brace"
            ) from None
        fields = []
        for _, field, form, conversion in parts:
            if field is None:
                continue
            if not FIELD.fullmatch(field) or form or conversion:
                raise ValueError(
                    f"survey {self.name!r}: `persona` has {{{field}}}, and only {{name}} of a field is read"
                )
            fields.append(field)
        return tuple(dict.fromkeys(fields))


class SimulateConfig(Section):
    """How a model answers a survey: option probabilities by likelihood, averaged over orders of the options."""

    personas: PersonasConfig | None = None  # None: the survey's held-out respondents
    n: PositiveInt | None = None  # how many personas; None: all
    by: tuple[str, ...] = ()  # fields of the personas that groups are made of, each by itself
    orders: PositiveInt = 8  # of a question's options: all permutations if no more, else at most so many, seeded
    answer: Literal["letter", "text"] = "letter"  # what is weighed: the letter of an option, or its text
    template: Literal["chat", "plain"] = "chat"  # the chat template with empty reasoning, or bare text
    seed: NonNegativeInt = 0  # of the orders, of who is drawn, and of the bootstrap
    draws: PositiveInt = 1000  # of the bootstrap
    interval: Annotated[Share, Field(gt=0.0, lt=1.0)] = 0.95
    rows_at_once: Operational[PositiveInt] = 32  # of one forward pass

    @model_validator(mode="after")
    def _groups_differ(self) -> "SimulateConfig":
        if len(set(self.by)) < len(self.by):
            raise ValueError(f"`by` names a field twice: {', '.join(self.by)}")
        return self
