"""The sections of `nautile simulate`: a survey (the content of a SURVEY.toml), personas, and how a model answers.

All fields of a survey are semantic: the model reads its texts, and is compared with its human answers.
"""

import math
import re
from string import Formatter
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from nautile.configs.base import Delimiter, Encoding, Operational, Section, Seed, Share

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
# Defaults for datasets of personas on the Hub, by name; with a revision if a public one is known.
KNOWN_PERSONAS: dict[str, dict[str, str]] = {
    "nvidia/Nemotron-Personas-USA": {
        "revision": "5b4cd35ab46490c1da1bd2b5a2324d6f871be180", "id_column": "uuid",
    },
    "proj-persona/PersonaHub": {"subset": "persona"},
}  # fmt: skip

Shares = tuple[float, ...]
GroupShares = dict[str, dict[str, Shares]]  # field -> group -> shares of the options


class PersonasConfig(Section):
    """The personas: a table of people with named fields, one row per person.

    Reader "margins": a TOML file with a table of shares for each field, from which each field is drawn independently.
    """

    reader: Literal["csv", "jsonl", "parquet", "hub", "margins", "built_in"]
    path: str = ""  # a file, the Hub's OWNER/NAME, or the name of a built-in survey
    subset: str = ""  # of the Hub's dataset; empty: its default
    split: str = "train"  # of the Hub's dataset
    revision: str = ""  # a commit of the Hub
    id_column: str = ""  # column with the id of a person; empty: the number of the row
    delimiter: Delimiter | None = None  # csv; None: found
    encoding: Encoding | None = None  # csv, jsonl; None: UTF-8, or the one that a byte-order mark names
    weight_column: str | None = None  # column with the survey weight of a person; None: all weigh the same

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, values: Any) -> Any:
        """A plain string: a file, by its suffix, a built-in survey, or OWNER/NAME[:SUBSET][@REVISION] of the Hub."""
        if not isinstance(values, str):
            return values
        if values in BUILT_IN_SURVEYS:
            return {"reader": "built_in", "path": values}
        for suffix, reader in READERS.items():
            if values.lower().endswith(suffix):
                return {"reader": reader, "path": values}
        if match := HUB_ID.fullmatch(values):
            path, subset, revision = match.groups()
            options = {"subset": subset, "revision": revision}
            explicit = {name: value for name, value in options.items() if value}
            return {"reader": "hub", "path": path, **KNOWN_PERSONAS.get(path, {}), **explicit}
        raise ValueError(
            f"{values!r} is neither a file ({', '.join(READERS)}), nor a built-in survey "
            f"({', '.join(BUILT_IN_SURVEYS)}), nor a dataset of the Hub (OWNER/NAME@REVISION)"
        )

    @model_validator(mode="after")
    def _complete(self) -> "PersonasConfig":
        if not self.path:
            raise ValueError(f"personas of reader {self.reader!r} need a `path`")
        if self.reader == "hub" and not re.fullmatch(r"[0-9a-f]{40}", self.revision):
            raise ValueError(
                f"{self.path} of the Hub needs a full commit hash (from its page's history): {self.path}@REVISION"
            )
        if self.reader == "built_in" and self.path not in BUILT_IN_SURVEYS:
            raise ValueError(f"no built-in survey {self.path!r}; there are {', '.join(BUILT_IN_SURVEYS)}")
        return self

    @property
    def label(self) -> str:
        """The name of the section in messages."""
        return f"personas {self.path}"


class QuestionConfig(Section):
    """A question with its options, and the answers of humans if they are known.

    `humans` and `groups` are shares of the options, in their order. If the survey has `respondents`, their own answers
    in `column` are used instead.
    """

    name: str
    text: str
    options: tuple[str, ...]
    ordered: bool = False  # the options are a scale, from the first to the last
    values: tuple[float, ...] = ()  # positions of the options on the scale; empty: evenly spaced
    weight: PositiveFloat = 1.0  # in means over the questions
    column: str = ""  # column of the respondents' table with their answers; empty: the question's name
    codes: tuple[str, ...] = ()  # the value of that column for each option; empty: the option's text
    missing: tuple[str, ...] | None = None  # values of that column that are no answer, such as "99" or "Refused"
    humans: Shares = ()
    respondents: PositiveInt | None = None  # number of people behind `humans`; None: unknown
    groups: GroupShares = {}

    @model_validator(mode="after")
    def _can_be_asked(self) -> "QuestionConfig":
        where = f"question {self.name!r}"
        if not FIELD.fullmatch(self.name):
            raise ValueError(f"{where}: a name consists of letters, digits and _, and does not begin with a digit")
        if not self.text.strip():
            raise ValueError(f"{where}: has no text")
        if len(self.options) < 2:
            raise ValueError(f"{where}: has {len(self.options)} options; at least two are needed")
        if not all(option.strip() for option in self.options):
            raise ValueError(f"{where}: option {[o.strip() for o in self.options].index('') + 1} is empty")
        if len(self.options) > 26:
            raise ValueError(f"{where}: has {len(self.options)} options; at most 26 are possible, a letter for each")
        folded = [" ".join(option.split()).casefold() for option in self.options]
        if duplicates := sorted({option for option in folded if folded.count(option) > 1}):
            raise ValueError(f"{where}: two of the options are {duplicates[0]!r}")
        if self.values and (len(self.values) != len(self.options) or len(set(self.values)) < 2):
            raise ValueError(
                f"{where}: `values` needs a number for each of the {len(self.options)} options, not all equal"
            )
        if self.values and not self.ordered:
            raise ValueError(f"{where}: `values` are positions on a scale, so `ordered` must be true")
        if self.codes and (len(self.codes) != len(self.options) or len(set(self.codes)) < len(self.codes)):
            raise ValueError(f"{where}: `codes` needs a different code for each of the {len(self.options)} options")
        if both := sorted({*(self.missing or ())} & {*(self.codes or self.options)}):
            raise ValueError(f"{where}: {both[0]!r} is an option, and in `missing` it is no answer")
        shares_by_field = {"humans": self.humans} if self.humans else {}
        shares_by_field |= {f"groups.{by}.{g}": s for by, groups in self.groups.items() for g, s in groups.items()}
        for name, shares in shares_by_field.items():
            if len(shares) != len(self.options):
                raise ValueError(f"{where}: `{name}` has {len(shares)} shares for {len(self.options)} options")
            if min(shares) < 0 or abs(math.fsum(shares) - 1) > SUM_TOLERANCE:
                raise ValueError(f"{where}: the shares of `{name}` sum to {math.fsum(shares):.4g}, not to 1")
        return self

    @property
    def scale(self) -> tuple[float, ...]:
        """The position of each option between 0 and 1."""
        values = self.values or tuple(range(len(self.options)))
        low, high = min(values), max(values)
        return tuple((value - low) / (high - low) for value in values)


class SurveyConfig(Section):
    """A survey: its questions, the text template of a persona, and human answers to compare with."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    title: str
    source: str = ""  # who surveyed whom, and when
    licence: str = ""  # of the human answers
    preface: str = ""  # text before every persona
    persona: str = Field(min_length=1)  # a template over the fields of a person: "I am {age} years old."
    words: dict[str, str] = {}  # field -> its words for {attribute} if a persona is a group; default: the field's name
    bands: dict[str, tuple[float, ...]] = {}  # numeric field -> boundaries between its groups
    questions: tuple[QuestionConfig, ...] = ()
    respondents: PersonasConfig | None = None  # people whose own answers are known
    missing: tuple[str, ...] | None = None  # values of the respondents' columns that are no answer to any question

    @model_validator(mode="after")
    def _consistent(self) -> "SurveyConfig":
        if not self.questions:
            raise ValueError(f"survey {self.name!r} has no questions")
        names = [question.name for question in self.questions]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"survey {self.name!r}: two questions are called {duplicates[0]!r}")
        for field, edges in self.bands.items():
            if not edges or list(edges) != sorted(set(edges)):
                raise ValueError(f"survey {self.name!r}: bands.{field} must be increasing numbers")
        self.persona_fields  # noqa: B018 - raises for a template that cannot be filled
        return self

    @property
    def persona_fields(self) -> tuple[str, ...]:
        """The fields in the template of a persona, in order."""
        try:
            parts = list(Formatter().parse(self.persona))
        except ValueError as error:
            raise ValueError(
                f"survey {self.name!r}: `persona` is not a valid template ({error}); write {{{{ for a brace"
            ) from None
        fields = []
        for _, field, format_spec, conversion in parts:
            if field is None:
                continue
            if not FIELD.fullmatch(field) or format_spec or conversion:
                raise ValueError(
                    f"survey {self.name!r}: `persona` has {{{field}}}, but only plain field names are allowed: {{name}}"
                )
            fields.append(field)
        return tuple(dict.fromkeys(fields))


class SimulateConfig(Section):
    """How a model answers a survey: option probabilities by likelihood, averaged over orders of the options."""

    personas: PersonasConfig | None = None  # None: the survey's held-out respondents
    n: PositiveInt | None = None  # how many personas; None: all
    by: tuple[str, ...] = ()  # fields of the personas to group by, each separately
    orders: PositiveInt = 8  # permutations of a question's options: all if there are no more, else so many, seeded
    answer: Literal["letter", "text"] = "letter"  # what is scored: the letter of an option, or its text
    template: Literal["chat", "plain"] = "chat"  # the chat template with empty reasoning, or bare text
    seed: Seed = 0  # of the permutations, the drawn personas and the bootstrap
    draws: PositiveInt = 1000  # bootstrap samples
    interval: Annotated[Share, Field(gt=0.0, lt=1.0)] = 0.95
    rows_at_once: Operational[PositiveInt] = 32  # rows in a forward pass

    @model_validator(mode="after")
    def _groups_differ(self) -> "SimulateConfig":
        if len(set(self.by)) < len(self.by):
            raise ValueError(f"`by` names a field twice: {', '.join(self.by)}")
        return self
