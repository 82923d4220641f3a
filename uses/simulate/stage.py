"""The `simulate` stage: from a checkpoint and a survey to `opinions`: rows, distributions, tables, a card.

Personas are asked in chunks. Each finished chunk is a file in the scratch folder, so that a killed job repeats none.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nautile.common.events import Emit
from nautile.common.files import atomic_path, write_json, write_text
from nautile.data.table import is_missing
from nautile.store.artifacts import checkpoint_name
from nautile.tasks.engine.job import Job
from nautile.tasks.engine.stage import stage
from nautile.uses.simulate.comparison import compare
from nautile.uses.simulate.config import SimulateConfig, SurveyConfig
from nautile.uses.simulate.people import Person, group_name, groups_of
from nautile.uses.simulate.prompts import OpinionScorer, position_bias
from nautile.uses.simulate.reading import choose_people, read_respondents
from nautile.uses.simulate.tables import card, report

CHUNK = 64  # personas
ROWS = "opinions.parquet"


@stage("simulate", version=2, outputs=("opinions",), accelerator=True)
def simulate(job: Job) -> None:
    """Ask each persona that has no row yet, then compare with the survey and publish."""
    survey, config = job.part("survey", SurveyConfig), job.part("simulate", SimulateConfig)
    digests = job.file_digests
    respondents = read_respondents(survey, job.scratch, digests)
    people, respondent_indices = choose_people(survey, config, respondents, job.scratch, digests)
    groups_of(people, config.by, survey.bands, "personas")  # raises `ConfigError` now, not after all have been asked
    scorer = OpinionScorer(job.inputs["checkpoint"], survey, config)
    out = job.output("opinions")
    chunks = ask_in_chunks(scorer, survey, config, people, job.scratch / "chunks", job.emit)
    with atomic_path(out / ROWS) as temporary, pq.ParquetWriter(temporary, schema(config)) as writer:
        for chunk in chunks:
            writer.write_table(pq.read_table(chunk, schema=schema(config)))
    by_order = read_probabilities(out / ROWS, survey, len(people))
    means = [orders_NOK.mean(axis=1) for orders_NOK in by_order]
    summary = compare(survey, config, people, means, respondents, respondent_indices)
    left_out = int(np.isnan(means[0][:, 0]).sum())
    summary |= {
        "survey": survey.name,
        "title": survey.title,
        "model": checkpoint_name(job.inputs["checkpoint"]),
        "personas": len(people),
        "personas_source": _source(survey, config),
        "left_out": left_out,
        "cut_tokens": sum(row["cut"] for row in pq.read_table(out / ROWS, columns=["cut"]).to_pylist())
        // len(survey.questions),
        "by": list(config.by),
        "answer": config.answer,
        "interval": config.interval,
        "orders": {
            q.name: [list(o) for o in orders] for q, orders in zip(survey.questions, scorer.orders, strict=True)
        },
        "position_bias": {
            question.name: position_bias(orders_NOK[~np.isnan(orders_NOK[:, 0, 0])], orders)
            for question, orders_NOK, orders in zip(survey.questions, by_order, scorer.orders, strict=True)
            if left_out < len(people)
        },
    }
    write_json(out / "summary.json", summary)
    write_text(out / "tables.md", report(summary))
    write_text(out / "card.md", card(summary))
    _describe(job, summary)


def schema(config: SimulateConfig) -> pa.Schema:
    """The Parquet schema: a row for each persona and question, with the options in the survey's order.

    `left_out` is the reason why there is no answer, else null; `cut`: the tokens by which the persona is too long.
    """
    shares = pa.list_(pa.float64())
    return pa.schema(
        [
            ("persona", pa.string()),
            ("question", pa.string()),
            *((f"by_{field}", pa.string()) for field in config.by),
            ("left_out", pa.string()),
            ("cut", pa.int64()),
            ("probabilities", shares),
            ("by_order", pa.list_(shares)),
        ]
    )


def ask_in_chunks(
    scorer: OpinionScorer,
    survey: SurveyConfig,
    config: SimulateConfig,
    people: Sequence[Person],
    folder: Path,
    emit: Emit,
) -> list[Path]:
    """Ask the personas in chunks; returns the files of all chunks in order. Chunks already in `folder` are reused."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for start in range(0, len(people), CHUNK):
        chunk = people[start : start + CHUNK]
        path = folder / f"{start:09d}.parquet"
        if not path.exists():
            emit("progress", done=start, total=len(people), unit="personas")
            rows = _rows(scorer, survey, config, chunk)
            with atomic_path(path) as temporary:
                pq.write_table(pa.Table.from_pylist(rows, schema=schema(config)), temporary)
        paths.append(path)
    emit("progress", done=len(people), total=len(people), unit="personas")
    return paths


def read_probabilities(path: Path, survey: SurveyConfig, people: int) -> list[np.ndarray]:
    """Read for each question an array [people, orders, options] of probabilities; NaN for people who were left out."""
    columns = pq.read_table(path, columns=["by_order"]).column("by_order").to_pylist()
    questions = []
    # Rows are ordered by persona, then by question.
    for number in range(len(survey.questions)):
        rows = columns[number :: len(survey.questions)]
        first_row = next((row for row in rows if row is not None), None)
        # Nobody was asked: an array of the right rank, full of NaN.
        shape = (
            people,
            *(np.shape(first_row) if first_row is not None else (1, len(survey.questions[number].options))),
        )
        values = np.full(shape, np.nan)
        for i, row in enumerate(rows):
            if row is not None:
                values[i] = row
        questions.append(values)
    return questions


def _rows(
    scorer: OpinionScorer, survey: SurveyConfig, config: SimulateConfig, people: Sequence[Person]
) -> list[dict[str, Any]]:
    """The rows of `schema` for a chunk of personas."""
    rows = []
    for person, opinions in zip(people, scorer.opinions(people), strict=True):
        groups = {
            f"by_{field}": None
            if is_missing(value := person.fields.get(field))
            else group_name(value, survey.bands.get(field))
            for field in config.by
        }
        cut = scorer.tokens_over(person)
        for question, opinion in zip(survey.questions, opinions, strict=True):
            row: dict[str, Any] = {"persona": person.id, "question": question.name, **groups, "cut": cut}
            if opinion is None:
                row |= {"left_out": "too_long", "probabilities": None, "by_order": None}
            else:
                row |= {"left_out": None, "probabilities": opinion.mean(axis=0), "by_order": opinion.tolist()}
            rows.append(row)
    return rows


def _source(survey: SurveyConfig, config: SimulateConfig) -> str:
    """Where the personas come from, in words for the card."""
    personas = config.personas
    if personas is None or personas == survey.respondents:
        return "the survey's respondents" if survey.respondents else "the groups whose shares are published"
    if personas.reader == "margins":
        return f"{Path(personas.path).name}, drawn field by field from margins: how fields go together is not in them"
    if personas.reader == "hub":
        return f"{personas.path} of the Hub at {personas.revision[:12]}, synthetic people, the first of the files"
    return Path(personas.path).name


def _describe(job: Job, summary: dict[str, Any]) -> None:
    """Emit the scores as metrics, and describe the artifact."""
    for arm, score in summary["scores"].items():
        for figure, interval in score.items():
            if interval is not None:
                job.emit("metric", name=f"simulate/{arm}/{figure}", step=0, value=interval["value"])
    job.describe(
        "opinions",
        survey=summary["survey"],
        model=summary["model"],
        personas=summary["personas"],
        left_out=summary["left_out"],
        compared=summary["compared"],
        similarity={
            arm: score["similarity"]["value"] for arm, score in summary["scores"].items() if score.get("similarity")
        },
    )
