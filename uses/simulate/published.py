"""Surveys whose answers are published as shares by group: SubPOP's records, and the waves of OpinionQA.

SubPOP (Suh et al. 2025, arXiv:2502.16761): one record per question and group, with the shares of those who answered;
the last option is the refusal, which the shares leave out. OpinionQA (Santurkar et al. 2023, arXiv:2303.17548): one
folder per wave, with `info.csv` (the questions) and files such as `SEX_data.json` (how many people of each group chose
each option). No file has the answers of everybody. In three waves (26, 27, 29) the counts by party are in
`NONE_data.json` instead of `POLPARTY_data.json` (the authors' repository tatsu-lab/opinions_qa at ed8c4e0).
"""

import ast
import csv
import io
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nautile.common.errors import ConfigError
from nautile.common.files import read_bounded_json, read_bounded_text
from nautile.data.sources.hub import describe, fetch_hub_file, list_hub_files, named_in_errors
from nautile.data.table import is_missing, read_table, require_columns
from nautile.uses.simulate.config import PersonasConfig, SurveyConfig

SUBPOP_COLUMNS = ("qkey", "attribute", "group", "question", "options", "responses", "ordinal")
WORDS = {
    "AGE": "Age", "CITIZEN": "Citizen of the United States", "CREGION": "Region of the United States",
    "EDUCATION": "Education", "INCOME": "Yearly income", "MARITAL": "Marital status", "POLIDEOLOGY": "Political views",
    "POLPARTY": "Party", "RACE": "Race", "RELIG": "Religion", "RELIGATTEND": "Goes to religious services", "SEX": "Sex",
}  # fmt: skip
UNNAMED = {"NONE": "POLPARTY"}  # file name -> field, where they differ
REFUSED = "Refused"  # name of an option, and of the group of people who did not state theirs
TEMPLATE = {"preface": "Answer as this person would.", "persona": "{attribute}: {group}.", "words": WORDS}


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


def subpop_file(path: Path) -> SurveyConfig:
    """Read a survey from SubPOP's records in a JSON-lines file. Raises `ConfigError` with the row's number."""
    return _subpop(read_table(path).rows, path.stem, f"SubPOP, {path.name}", str(path))


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

    The shares of everybody are summed over the groups of one field, including the people who did not state their group.
    That group itself, files of two fields (RACE_SEX) and refusals are left out. Raises `ConfigError` naming the file
    for data in another form.
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
        # field -> group -> count of each option
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
