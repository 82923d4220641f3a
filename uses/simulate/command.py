"""`nautile simulate`: simulate a survey of personas with a checkpoint, as a single step."""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from nautile.common.commands import shell_command
from nautile.common.errors import ConfigError
from nautile.common.files import read_json, write_text
from nautile.flows.cli.terminal import Json, check_parquet, console_for, print_markdown, show_as, the_store
from nautile.uses.labelled.command import DelimiterOption, EncodingOption, delimiter_of, encoding_of

if TYPE_CHECKING:
    from nautile.uses.simulate.config import SimulateConfig, SurveyConfig


def simulate(
    survey: Annotated[
        str,
        typer.Argument(
            metavar="SURVEY",
            help="A SURVEY.toml, a built-in survey (anes96, fair), or "
            "published shares: SubPOP's records, a wave of OpinionQA.",
        ),
    ],
    checkpoint: Annotated[
        str | None, typer.Argument(metavar="CHECKPOINT", help="An artifact id or a folder. Default: the newest.")
    ] = None,
    personas: Annotated[
        str | None,
        typer.Option(
            "--personas",
            metavar="FILE",
            help="CSV, JSONL, Parquet, a TOML of margins, or OWNER/NAME@REVISION of the Hub. Default: the survey's "
            "held-out respondents.",
        ),
    ] = None,
    delimiter: DelimiterOption = "",
    encoding: EncodingOption = "",
    weights: Annotated[
        str,
        typer.Option("--weights", metavar="COLUMN", help="The column of the personas' weights. Default: all alike."),
    ] = "",
    n: Annotated[int | None, typer.Option("-n", min=1, help="Number of personas. Default: all.")] = None,
    by: Annotated[
        str | None, typer.Option("--by", metavar="FIELDS", help="Fields that define the groups: age,region.")
    ] = None,
    orders: Annotated[
        int, typer.Option(min=1, help="Maximum number of option orders whose probabilities are averaged.")
    ] = 8,
    answer: Annotated[str, typer.Option(help="Score the letter or the text of an option.")] = "letter",
    template: Annotated[
        str, typer.Option(help="chat: the chat template without reasoning; plain: the text alone.")
    ] = "chat",
    seed: Annotated[
        int, typer.Option(min=0, help="Random seed of the option orders, the sample of personas and the intervals.")
    ] = 0,
    rows_at_once: Annotated[
        int, typer.Option(min=1, help="Batch size: rows per forward pass. Larger is faster and needs more memory.")
    ] = 32,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Also write the rows to this Parquet file.")
    ] = None,
    training: Annotated[
        Path | None,
        typer.Option(
            "--training",
            metavar="FILE",
            help="Do not simulate; write the survey's human answers as training rows for `nautile tune` (.jsonl).",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Simulate again; the old artifact is kept.")] = False,
    as_json: Json = False,
) -> None:
    """Simulate a survey: option probabilities by persona and group, compared with human answers and baselines."""
    from pydantic import ValidationError

    from nautile.data.table import read_table
    from nautile.flows.named import checkpoint_id
    from nautile.store.named import named_or_newest
    from nautile.uses.simulate.config import SimulateConfig
    from nautile.uses.simulate.reading import load_survey, personas_config
    from nautile.uses.simulate.stage import ROWS
    from nautile.uses.simulate.stage import simulate as stage
    from nautile.uses.simulate.tables import NOT_FOR, NOTHING_TO_COMPARE, question_tables, scores_table
    from nautile.uses.step import run_step

    check_parquet(out)
    survey_config = load_survey(survey)
    fields = [field.strip() for field in (by or "").split(",") if field.strip()]
    # Published shares have no respondents, only groups: compare by the fields of those.
    if not fields and survey_config.respondents is None and personas is None:
        fields = list(dict.fromkeys(field for question in survey_config.questions for field in question.groups))
    settings = {"orders": orders, "answer": answer, "template": template, "seed": seed, "rows_at_once": rows_at_once}
    form = (delimiter_of(delimiter), weights or None, encoding_of(encoding))
    people = personas_config(personas, *form) if personas else None
    try:
        config = SimulateConfig.model_validate({"personas": people, "n": n, "by": fields, **settings})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(f"--{'.'.join(map(str, first['loc'])) or 'by'}: {first['msg']}") from None
    if training is not None:
        console_for().print(write_training_rows(survey_config, config, training), soft_wrap=True)
        return
    for table in (people, survey_config.respondents):
        # Read here, so that a table that cannot be read is refused before a process starts.
        if table is None or table.reader not in ("csv", "jsonl"):
            continue
        if found := read_table(table.path, delimiter=table.delimiter, encoding=table.encoding).found:
            console_for(stderr=True).print(Text(found), soft_wrap=True)
    store = the_store()
    words = sys.argv[1:]
    # The newest checkpoint is resolved to its id, so that the resume command means the same one when there is a newer.
    if checkpoint is None:
        checkpoint = named_or_newest(store, "checkpoint", None).id
        words.append(checkpoint)
        console_for(stderr=True).print(f"with the newest checkpoint, {checkpoint}", soft_wrap=True)
    section = {"survey": survey_config.model_dump(mode="json"), "simulate": config.model_dump(mode="json")}
    inputs = {"checkpoint": checkpoint_id(store, checkpoint)}
    artifacts = run_step(
        stage, section, inputs, store, command=shell_command("nautile", *words), force=force, as_json=as_json
    )
    folder = artifacts["opinions"].path
    if out is not None:
        shutil.copyfile(folder / ROWS, out)
    summary: dict[str, Any] = read_json(folder / "summary.json") or {}
    if as_json:
        show_as({"artifact": artifacts["opinions"].id, **summary}, True, str)
        return
    parts = [scores_table(summary) or NOTHING_TO_COMPARE, question_tables(summary, groups=False)]
    print_markdown("\n\n".join(part for part in parts if part))
    console = console_for()
    # What such figures must not be used for is printed with every result, not only in a document.
    console.print(f"\n{NOT_FOR[0]}", soft_wrap=True)
    where = f"groups in {folder / 'tables.md'}, limits of use in {folder / 'card.md'}"
    if summary["left_out"]:
        over = f"were too long by {summary['cut_tokens']:,} tokens and left out (column `cut`)"
        console.print(f"{summary['left_out']:,} of {summary['personas']:,} personas {over}", soft_wrap=True)
    console.print(f"{artifacts['opinions'].id}: {where}", soft_wrap=True)


def write_training_rows(survey: "SurveyConfig", config: "SimulateConfig", path: Path) -> str:
    """Write the survey's human answers as training rows for `nautile tune`; returns a summary sentence."""
    from nautile.uses.simulate.prompts import FEWEST, training_rows
    from nautile.uses.simulate.reading import read_respondents

    if path.suffix.lower() not in (".jsonl", ".ndjson") or not path.absolute().parent.is_dir():
        raise ConfigError(f"--training {path}: must be a .jsonl file in a folder that exists")
    with tempfile.TemporaryDirectory() as scratch:
        rows, left_out = training_rows(survey, config, read_respondents(survey, Path(scratch)))
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    few = f"; {left_out:,} people are in groups of fewer than {FEWEST} and were left out" if left_out else ""
    return f"{len(rows):,} rows of human shares are in {path}, none of held-out people{few}"
