"""Load surveys: their definition, the respondents with their answers, and the split into training and held-out ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from nautile.common.errors import ConfigError
from nautile.common.files import read_bounded_toml, read_json, write_json
from nautile.data.table import is_missing
from nautile.uses.simulate.config import (
    BUILT_IN_SURVEYS,
    HUB_ID,
    PersonasConfig,
    QuestionConfig,
    SimulateConfig,
    SurveyConfig,
)
from nautile.uses.simulate.people import Digests, Person, read_people, require_fields, text_of
from nautile.uses.simulate.published import opinion_qa, parse_survey, subpop_file, subpop_hub

MISSING = -1  # code of an unknown answer
HELD_OUT_SHARE = 0.5  # of the respondents, whose answers the model is compared with
# Of the split. Whoever tunes on one part and simulates the other gets the same split.
SPLIT_SEED = 0


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
    """Load a survey by file or name.

    `name`: a SURVEY.toml; a built-in survey; or published shares by group (`uses.simulate.published`): SubPOP's records
    (a .jsonl file, or OWNER/NAME[:SPLIT]@REVISION of the Hub), or the folder of a wave of OpinionQA. Raises
    `ConfigError` naming the file and field.
    """
    path = Path(name)
    if path.is_dir() or path.suffix.lower() in (".jsonl", ".ndjson"):
        return opinion_qa(path) if path.is_dir() else subpop_file(path)
    if not path.is_file() and (match := HUB_ID.fullmatch(str(name))) and match[3]:
        return subpop_hub(*match.groups())
    if not path.is_file() and str(name) in BUILT_IN_SURVEYS:
        path = Path(str(resources.files("nautile.uses.simulate"))) / f"{name}.toml"
    if not path.is_file():
        raise ConfigError(
            f"no survey {str(name)!r}: not a file here, and none of the built-in ones ({', '.join(BUILT_IN_SURVEYS)})"
        )
    return parse_survey(read_bounded_toml(path), str(path))


def personas_config(text: str, delimiter: str | None = None, weight_column: str | None = None) -> PersonasConfig:
    """Parse the option --personas: a file, a built-in survey, or OWNER/NAME@REVISION of the Hub.

    `delimiter`: between the columns of a CSV. `weight_column`: the column of the people's weights.
    """
    try:
        return PersonasConfig.model_validate(text).model_copy(
            update={"delimiter": delimiter, "weight_column": weight_column}
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
