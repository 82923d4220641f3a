"""Load surveys: their definition, the respondents with their answers, and the split into training and held-out ones.

Two kinds of surveys have answers that are published as shares by group. SubPOP (Suh et al. 2025, arXiv:2502.16761): one
record per question and group, with the shares of those who answered; the last option is the refusal, which the shares
leave out. OpinionQA (Santurkar et al. 2023, arXiv:2303.17548): one folder per wave, with `info.csv` (the questions) and
files such as `SEX_data.json` (how many people of each group chose each option). No file has the answers of everybody.
In three waves (26, 27, 29) the counts by party are in `NONE_data.json` instead of `POLPARTY_data.json` (the authors'
repository tatsu-lab/opinions_qa at ed8c4e0).
"""

import ast
import csv
import io
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from nautile.common.errors import ConfigError
from nautile.common.files import read_bounded_json, read_bounded_text, read_bounded_toml, read_json, write_json
from nautile.data.sources.hub import describe, fetch_hub_file, list_hub_files, named_in_errors
from nautile.data.table import is_missing, read_table, require_columns
from nautile.uses.simulate.config import (
    BUILT_IN_SURVEYS,
    HUB_ID,
    PersonasConfig,
    QuestionConfig,
    SimulateConfig,
    SurveyConfig,
)
from nautile.uses.simulate.people import Digests, Person, read_people, require_fields, text_of

MISSING = -1  # code of an unknown answer
HELD_OUT_SHARE = 0.5  # of the respondents, whose answers the model is compared with
# Of the split. Whoever tunes on one part and simulates the other gets the same split.
SPLIT_SEED = 0
SUBPOP_COLUMNS = ("qkey", "attribute", "group", "question", "options", "responses", "ordinal")
WORDS = {
    "AGE": "Age", "CITIZEN": "Citizen of the United States", "CREGION": "Region of the United States",
    "EDUCATION": "Education", "INCOME": "Yearly income", "MARITAL": "Marital status", "POLIDEOLOGY": "Political views",
    "POLPARTY": "Party", "RACE": "Race", "RELIG": "Religion", "RELIGATTEND": "Goes to religious services", "SEX": "Sex",
}  # fmt: skip
UNNAMED = {"NONE": "POLPARTY"}  # file name -> field, where they differ
REFUSED = "Refused"  # name of an option, and of the group of people who did not state theirs
TEMPLATE = {"preface": "Answer as this person would.", "persona": "{attribute}: {group}.", "words": WORDS}


@dataclass(frozen=True)
class Respondents:
    """People whose answers are known. `answers_NQ`: the chosen options, int [people, questions], or MISSING.

    `train`, `held_out`: positions of the people of each part, ascending.
    """

    people: list[Person]
    answers_NQ: np.ndarray
    train: np.ndarray
    held_out: np.ndarray

    @property
    def weights(self) -> np.ndarray:
        """The weight of each person in means, float64 [people]."""
        return np.array([person.weight for person in self.people])


def load_survey(name: str | Path) -> SurveyConfig:
    """Load a survey by file or name. Raises `ConfigError` naming the file and field.

    `name`: a SURVEY.toml; a built-in survey; or published shares by group: SubPOP's records (a .jsonl file, or
    OWNER/NAME[:SPLIT]@REVISION of the Hub), or the folder of a wave of OpinionQA.
    """
    path = Path(name)
    if path.is_dir() or path.suffix.lower() in (".jsonl", ".ndjson"):
        if path.is_dir():
            return opinion_qa(path)
        return _subpop(read_table(path).rows, path.stem, f"SubPOP, {path.name}", str(path))
    if not path.is_file() and (match := HUB_ID.fullmatch(str(name))) and match[3]:
        return subpop_hub(*match.groups())
    if not path.is_file() and str(name) in BUILT_IN_SURVEYS:
        path = Path(str(resources.files("nautile.uses.simulate"))) / f"{name}.toml"
    if not path.is_file():
        raise ConfigError(
            f"no survey {str(name)!r}: not a file here, and none of the built-in ones ({', '.join(BUILT_IN_SURVEYS)})"
        )
    return parse_survey(read_bounded_toml(path), str(path))


def personas_config(
    text: str, delimiter: str | None = None, weight_column: str | None = None, encoding: str | None = None
) -> PersonasConfig:
    """Parse the option --personas: a file, a built-in survey, or OWNER/NAME@REVISION of the Hub.

    `delimiter`: between the columns of a CSV. `weight_column`: the column of the people's weights.
    """
    try:
        return PersonasConfig.model_validate(text).model_copy(
            update={"delimiter": delimiter, "weight_column": weight_column, "encoding": encoding}
        )
    except ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(f"--personas {message}") from None


def read_respondents(survey: SurveyConfig, scratch: Path, digests: Digests | None = None) -> Respondents | None:
    """Read the survey's respondents and split them in two; None for a survey without respondents.

    Raises `ConfigError` for an answer that is none of the options, and for a split with an empty part.
    """
    if survey.respondents is None:
        return None
    people = read_people(survey.respondents, scratch, digests=digests)
    label = f"survey {survey.name}"
    # Baselines are fitted on these fields, so a respondent who lacks one cannot be in either part.
    require_fields(people, survey.persona_fields, "which the persona names", label)
    answers_NQ = np.stack([_answers(survey, question, people) for question in survey.questions], axis=1)
    order = np.random.default_rng(SPLIT_SEED).permutation(len(people))
    held_out_count = round(HELD_OUT_SHARE * len(people))
    if not 0 < held_out_count < len(people):
        raise ConfigError(f"{label}: {len(people)} respondents cannot be split in two")
    return Respondents(people, answers_NQ, np.sort(order[held_out_count:]), np.sort(order[:held_out_count]))


def choose_people(
    survey: SurveyConfig,
    config: SimulateConfig,
    respondents: Respondents | None,
    scratch: Path,
    digests: Digests | None = None,
) -> tuple[list[Person], np.ndarray | None]:
    """Choose the people to simulate: the held-out respondents, the declared groups, or the configured personas.

    Returns the people, and their positions among the respondents (None if they are others). Raises `ConfigError` if
    there are no people, and for a persona without a field of the template or of `by`.
    """
    label = f"survey {survey.name}"
    # The survey's own people, or others. Only the former have answers of their own to be compared with.
    if config.personas is None or config.personas == survey.respondents:
        if respondents is None:
            people = declared_groups(survey)
            if not people:
                raise ConfigError(
                    f"{label}: has neither respondents nor shares by group; name whom to ask: --personas FILE"
                )
            require_fields(people, survey.persona_fields, "which the template of the persona names", label)
            return people, None
        positions = respondents.held_out
        if config.n is not None:
            if config.n > len(positions):
                raise ConfigError(
                    f"{label}: {len(positions)} respondents are held out, and {config.n} were asked for: -n"
                )
            positions = np.sort(np.random.default_rng(config.seed).choice(positions, config.n, replace=False))
        people = [respondents.people[i] for i in positions]
    else:
        label, positions = config.personas.label, None
        people = _read_personas(survey, config, scratch, digests)
    require_fields(people, survey.persona_fields, f"which the template of survey {survey.name} names", label)
    require_fields(people, config.by, "which --by names", label)
    return people, positions


def _read_personas(
    survey: SurveyConfig, config: SimulateConfig, scratch: Path, digests: Digests | None
) -> list[Person]:
    """Read the people of `config.personas`; those of the Hub are saved in `scratch` for a resumed job."""
    assert config.personas is not None
    path = scratch / "people.json"
    if config.personas.reader == "hub" and (saved_people := read_json(path)) is not None:
        return [Person(*saved) for saved in saved_people]
    people = read_people(config.personas, scratch, config.n, config.seed, digests)
    if config.personas.reader == "hub":
        # Only the fields that are used: a persona of the Hub may have pages of text.
        field_names = {*survey.persona_fields, *config.by}
        people = [
            Person(p.id, {name: v for name, v in p.fields.items() if name in field_names}, p.weight) for p in people
        ]
        write_json(path, [[person.id, person.fields, person.weight] for person in people])
    return people


def declared_groups(survey: SurveyConfig) -> list[Person]:
    """A person for each group that the questions have shares of, with the fields `attribute`, `group` and the group's.

    For surveys that publish shares by group instead of people; their template uses {attribute} and {group}.
    """
    # A dict as an ordered set.
    pairs = {(by, group): None for q in survey.questions for by, groups in q.groups.items() for group in groups}
    return [
        Person(f"{by}={group}", {"attribute": survey.words.get(by, by), "group": group, by: group})
        for by, group in pairs
    ]


def shares(answers: np.ndarray, options: int, weights: np.ndarray | None = None) -> np.ndarray | None:
    """The share of each option among the known answers, float64 [options]; None if all are missing.

    `weights`: of the people; None: all weigh the same.
    """
    known = answers != MISSING
    known_weights = np.ones(known.sum()) if weights is None else weights[known]
    counts = np.bincount(answers[known], known_weights, minlength=options)
    return counts / known_weights.sum() if known_weights.sum() > 0 else None


def _answers(survey: SurveyConfig, question: QuestionConfig, people: Sequence[Person]) -> np.ndarray:
    """The option of a question that each person chose, int [people], or MISSING. Raises `ConfigError`."""
    column = question.column or question.name
    # Compared as text, so that 1, 1.0 and "1" are the same code.
    codes = {text_of(code): i for i, code in enumerate(question.codes or question.options)}
    no_answer = {text_of(code) for code in (*(question.missing or ()), *(survey.missing or ()))} - codes.keys()
    answers = np.full(len(people), MISSING)
    for i, person in enumerate(people):
        if column not in person.fields:
            raise ConfigError(f"survey {survey.name}: the respondents have no column {column!r} for {question.name!r}")
        if is_missing(value := person.fields[column]):
            continue
        if text_of(value) in no_answer:
            continue
        if (answer := codes.get(text_of(value))) is None:
            raise ConfigError(
                f"survey {survey.name}: respondent {person.id} has {value!r} in {column!r}, which is none of "
                f"{', '.join(codes)}; if it is no answer, name it in `missing`"
            )
        answers[i] = answer
    if (answers == MISSING).all():
        raise ConfigError(f"survey {survey.name}: no respondent has answered {question.name!r}")
    return answers


def parse_survey(table: dict[str, Any], where: str) -> SurveyConfig:
    """Validate a survey given as a table. Raises `ConfigError`, beginning with `where`, for the first fault."""
    try:
        survey = SurveyConfig.model_validate(table)
    except ValidationError as error:
        first_error = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first_error["loc"])
        message = first_error["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{where}: {f'`{field}`: ' if field else ''}{message}") from None
    if survey.respondents is not None:
        # An answer must not be predicted from itself.
        for question in survey.questions:
            if (column := question.column or question.name) in survey.persona_fields:
                raise ConfigError(
                    f"{where}: the persona names {column!r}, which is the answer to question {question.name!r}"
                )
    return survey


def subpop_hub(repository: str, split: str | None, revision: str) -> SurveyConfig:
    """Read a survey from SubPOP's records on the Hub: split `train` (Pew panels) or `test` (General Social Survey)."""
    config = PersonasConfig(reader="hub", path=repository, split=split or "train", revision=revision)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for file in list_hub_files(config):
            path = fetch_hub_file(config, file, Path(folder) / file.item)
            with named_in_errors(path, describe(config, file.path)):
                rows += read_table(path).rows
    source = f"SubPOP, {repository} of the Hub at {revision[:12]}, split {config.split}"
    return _subpop(rows, f"{repository.rpartition('/')[2]}_{config.split}", source, repository)


def opinion_qa(folder: Path) -> SurveyConfig:
    """Read a survey from a wave of OpinionQA: the questions for which there are counts by group.

    Everybody's shares are summed over the groups of one field, with the people who did not state theirs. That group
    itself, files of two fields (RACE_SEX) and refusals are left out. Raises `ConfigError` naming the file for another
    form.
    """
    # Not `read_table`, which rejects unnamed columns: pandas has written its index as an unnamed first column.
    info = csv.DictReader(io.StringIO(read_bounded_text(folder / "info.csv"), newline=""))
    require_columns(folder / "info.csv", info.fieldnames or (), ["key", "question", "references", "option_ordinal"])
    counts: dict[str, dict[str, dict[str, Mapping[str, float]]]] = {}  # field -> question -> group -> option -> people
    for path in sorted(folder.glob("*_data.json")):
        name = path.name.removesuffix("_data.json")
        field = UNNAMED.get(name, name)
        if field in counts:
            raise ConfigError(f"{path}: has counts by {field}, and so has another file of the wave")
        if field in WORDS:
            questions_of_field = read_bounded_json(path)
            if not isinstance(questions_of_field, dict):
                raise ConfigError(f"{path}: must be an object with an object for each question")
            counts[field] = {
                key: {group: by_option for group, by_option in entry.items() if isinstance(by_option, Mapping)}
                for key, entry in questions_of_field.items()
                if isinstance(entry, Mapping)
            }
    if not counts:
        raise ConfigError(f"{folder}: has no counts of answers by group ({', '.join(sorted(WORDS)[:3])}, …_data.json)")
    questions = []
    try:
        info_rows = list(info)
    except csv.Error as error:
        raise ConfigError(f"{folder / 'info.csv'}: is not CSV ({error})") from None
    for number, row in enumerate(info_rows, 1):
        where = f"{folder / 'info.csv'}: row {number}"
        by_field = {
            field: by_question[row["key"]] for field, by_question in counts.items() if row["key"] in by_question
        }
        if not by_field:
            continue
        options = [str(o) for o in _literal(row["references"], where) if str(o) != REFUSED]
        scale = _numbers(_literal(row["option_ordinal"], where), where)
        numbers = {
            f: {g: _numbers([c.get(o, 0) for o in options], f"{where}, {f}") for g, c in by.items()}
            for f, by in by_field.items()
        }
        groups = {
            f: {g: _shares(own) for g, own in by.items() if sum(own) and g != REFUSED} for f, by in numbers.items()
        }
        everybody = [sum(column) for column in zip(*next(iter(numbers.values())).values(), strict=True)]
        if not sum(everybody):
            raise ConfigError(f"{where}: nobody chose one of the options {', '.join(map(repr, options))}")
        questions.append(
            {"name": _name(row["key"]), "text": row["question"], "options": options,
             **_scale(scale, len(options), where), "humans": _shares(everybody),
             "respondents": round(sum(everybody)), "groups": groups}
        )  # fmt: skip
    source = f"OpinionQA, {folder.name.replace('_', ' ')}"
    table = {"name": _name(folder.name).lower(), "title": source, "source": source, "questions": questions, **TEMPLATE}
    return parse_survey({**table, "licence": "Pew Research Center's terms of use"}, str(folder))


def _subpop(rows: Sequence[Mapping[str, Any]], name: str, source: str, where: str) -> SurveyConfig:
    """Build a survey from SubPOP's records, one per question and group."""
    require_columns(where, list(rows[0]), SUBPOP_COLUMNS)
    questions: dict[str, dict[str, Any]] = {}
    for number, row in enumerate(rows, 1):
        row_name = f"{where}: row {number}"
        options, shares, scale = (row[column] for column in ("options", "responses", "ordinal"))
        if not all(isinstance(value, list) for value in (options, shares, scale)):
            raise ConfigError(f"{row_name}: `options`, `responses` and `ordinal` must be lists")
        if unnamed := next(
            (name for name in ("qkey", "attribute", "group", "question") if is_missing(row[name])), None
        ):
            raise ConfigError(f"{row_name}: has no value in column {unnamed!r}")
        scale = _numbers(scale, row_name)
        if len(options) != len(shares) + 1:
            raise ConfigError(f"{row_name}: {len(shares)} responses for {len(options)} options with a refusal")
        fields = {"text": str(row["question"]), "options": options[:-1], **_scale(scale, len(shares), row_name)}
        question = questions.setdefault(str(row["qkey"]), {"name": _name(str(row["qkey"])), **fields, "groups": {}})
        if any(question[field] != value for field, value in fields.items()):
            raise ConfigError(f"{row_name}: question {row['qkey']!r} has another text, options or scale than before")
        groups = question["groups"].setdefault(str(row["attribute"]), {})
        if str(row["group"]) in groups:
            raise ConfigError(f"{row_name}: question {row['qkey']!r} has the group {row['group']!r} twice")
        groups[str(row["group"])] = shares
    table = {"name": _name(name).lower(), "title": source, "source": source, "questions": list(questions.values())}
    return parse_survey({**table, **TEMPLATE, "licence": "CC BY-NC-SA 4.0, with the terms of its page"}, where)


def _scale(values: Sequence[float], options: int, where: str) -> dict[str, Any]:
    """The fields `ordered` and `values` of a question; if all options have the same value, there is no scale."""
    if len(values) != options:
        raise ConfigError(f"{where}: has {len(values)} places on the scale for {options} options")
    return {"ordered": True, "values": list(values)} if len(set(values)) > 1 else {"ordered": False}


def _name(text: str) -> str:
    """Turn a text into an identifier."""
    name = re.sub(r"\W", "_", text, flags=re.ASCII)
    return name if name[:1].isalpha() else f"q_{name}"


def _shares(counts: Sequence[float]) -> list[float]:
    return [count / sum(counts) for count in counts]


def _numbers(values: Sequence[Any], where: str) -> list[float]:
    try:
        return [float(value) for value in values]
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{where}: {str(values)[:60]} are not numbers") from None


def _literal(text: Any, where: str) -> list[Any]:
    """Parse a list in Python syntax, as in `info.csv`."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        value = None
    if not isinstance(value, list):
        raise ConfigError(f"{where}: {str(text)[:60]!r} is not a list")
    return value
