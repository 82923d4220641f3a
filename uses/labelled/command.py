"""`nautile extract` and `nautile classify`: run a model on each row of a table of texts, as a step that can resume."""

import codecs
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError
from rich.text import Text

from nautile.common.commands import shell_command
from nautile.common.errors import ConfigError
from nautile.flows.cli.terminal import Json, RuntimeOption, console_for, show_as, the_store

if TYPE_CHECKING:
    from nautile.configs.base import Section
    from nautile.data.table import Table
    from nautile.store.artifacts import Artifact, Store
    from nautile.tasks.engine.stage import Stage
    from nautile.uses.labelled.config import TextsConfig

CheckpointOfStore = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="An artifact id of a checkpoint or an export, or its folder.")
]
FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A table of texts: .csv, .tsv, .jsonl or .parquet.")]
ColumnOption = Annotated[str, typer.Option("--text", metavar="COLUMN", help="The column of the texts.")]
OutOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Also write the table with the answers to FILE: .csv, .jsonl or .parquet."),
]
DelimiterOption = Annotated[
    str,
    typer.Option(
        "--delimiter", metavar="CHARACTER", help="Between the columns of a CSV: , ; | or tab. Default: found."
    ),
]
EncodingOption = Annotated[
    str,
    typer.Option(
        "--encoding", metavar="NAME", help="Of a CSV or JSON lines, such as cp1252. Default: UTF-8, or by its mark."
    ),
]
InstructionsOption = Annotated[
    str, typer.Option(help="The prompt before every text. Default: the instructions of the tuning.")
]
ForceOption = Annotated[bool, typer.Option("--force", help="Answer again; the old artifact is kept.")]


def extract(
    checkpoint: CheckpointOfStore,
    file: FileArgument,
    schema: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON schema of a document. Default: that of a model tuned on entities."),
    ] = None,
    text: ColumnOption = "text",
    delimiter: DelimiterOption = "",
    encoding: EncodingOption = "",
    out: OutOption = None,
    all_spans: Annotated[
        bool, typer.Option("--spans", help='All strings must occur in the text, not only those with "x-span": true.')
    ] = False,
    instructions: InstructionsOption = "",
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens of a reply. Default: what the text leaves of the context.")
    ] = None,
    thinking: Annotated[int, typer.Option(min=0, help="Maximum reasoning tokens before the answer.")] = 0,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0: greedy decoding.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the sampling.")] = 0,
    slots: Annotated[int, typer.Option(min=1, max=1024, help="Number of replies decoded in parallel.")] = 16,
    runtime: RuntimeOption = "jax",
    force: ForceOption = False,
    as_json: Json = False,
) -> None:
    """Extract a JSON document from every text, constrained to a schema, and check it against the text."""
    from nautile.common.files import read_bounded_json
    from nautile.data.json_schema import entity_schema
    from nautile.data.label_set import read_label_set
    from nautile.data.tokenizer import read_tokenizer, tokenizer_for
    from nautile.model.decoding.constrained import Constraint
    from nautile.uses.extract.stage import REASONS, ROWS
    from nautile.uses.extract.stage import extract as stage
    from nautile.uses.labelled.config import ExtractConfig

    store = the_store()
    artifact = _checkpoint(store, checkpoint, runtime)
    if schema is not None:
        # The schema is checked here, in the operator's terminal, because a mistake in it would otherwise show in the
        # log of the step's process.
        shape = read_bounded_json(schema)
        tokenizer = read_tokenizer(read_bounded_json(artifact.path / "config.json")["tokenizer"], artifact.path)
        Constraint(tokenizer_for(tokenizer), shape, str(schema))  # raises for an unusable schema
    else:
        labels = read_label_set(artifact.path)
        if labels is None or labels.form != "entities":
            raise ConfigError("--schema: required, because this checkpoint was not tuned on entities")
        shape = entity_schema(labels.labels)
    texts, table = _texts(file, text, delimiter, encoding, out)
    section = ExtractConfig(
        texts=texts, json_schema=json.dumps(shape, ensure_ascii=False),
        spans="all" if all_spans else "marked", instructions=instructions, max_tokens=max_tokens, thinking=thinking,
        temperature=temperature, seed=seed, slots=slots,
    )  # fmt: skip
    result = _run(stage, section, artifact, store, force=force, as_json=as_json)
    if out is not None:
        columns = {
            "number": "row",
            "json": "document",
            "spans": "spans",
            "cut": "cut",
            "reason": "refused",
            "detail": "detail",
        }
        _write_out(out, texts, table.sha256, result.path / ROWS, columns)

    def lines(facts: dict[str, Any]) -> list[str]:
        total = f"{facts['extracted']:,} of {facts['rows']:,} rows extracted, {facts['spans']:,} spans in their texts"
        refused = [f"  {count:,} refused: {REASONS[reason]}" for reason, count in facts["refused"].items()]
        over = f"  {facts['cut']:,} texts were too long, by {facts['cut_tokens']:,} tokens (column `cut`)"
        return [total, *refused, *([over] if facts["cut"] else [])]

    _show(result, out, as_json, lines)


def classify(
    checkpoint: CheckpointOfStore,
    file: FileArgument,
    labels: Annotated[
        str,
        typer.Option(
            metavar="A,B,C",
            help="The labels to choose from; required if the checkpoint was not tuned on labels.",
        ),
    ] = "",
    text: ColumnOption = "text",
    delimiter: DelimiterOption = "",
    encoding: EncodingOption = "",
    gold: Annotated[
        str, typer.Option(metavar="COLUMN", help="The column of the correct labels, to compute scores.")
    ] = "",
    out: OutOption = None,
    instructions: InstructionsOption = "",
    longest: Annotated[
        int, typer.Option(min=1, help="With --labels: maximum tokens of a text; longer texts are cut.")
    ] = 128,
    threshold: Annotated[
        float | None, typer.Option(min=0, max=1, help="Abstain below this probability. Default: that of the tuning.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Batch size: texts per forward pass.")] = 16,
    runtime: RuntimeOption = "jax",
    force: ForceOption = False,
    as_json: Json = False,
) -> None:
    """Label every text: with a checkpoint tuned on labels, or zero-shot by the likelihood of each of --labels."""
    from nautile.data.label_set import read_label_set
    from nautile.uses.classify.stage import ANSWER, ROWS, SEVERAL, cut_note
    from nautile.uses.classify.stage import classify as stage
    from nautile.uses.labelled.config import ClassifyConfig
    from nautile.uses.labelled.scores import recall_rows
    from nautile.uses.labelled.texts import gold_labels

    store = the_store()
    artifact = _checkpoint(store, checkpoint, runtime)
    tuned = read_label_set(artifact.path)
    if not labels and (tuned is None or tuned.form != "label"):
        raise ConfigError("--labels: required, because this checkpoint was not tuned on labels")
    multi_label = tuned is not None and tuned.multi_label
    texts, table = _texts(file, text, delimiter, encoding, out)
    try:
        section = ClassifyConfig(
            texts=texts, labels=tuple(label.strip() for label in labels.split(",")) if labels else (),
            instructions=instructions, longest=longest, gold_column=gold, threshold=threshold, rows_at_once=rows,
        )  # fmt: skip
    except ValidationError as error:
        raise ConfigError(f"--labels: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
    if gold:  # checked before the step's process starts and loads a model
        gold_labels(table, texts.path, gold, section.labels or (tuned.labels if tuned else ()), multi_label)
    result = _run(stage, section, artifact, store, force=force, as_json=as_json)
    if out is not None:
        columns = {name: name for name in ((*SEVERAL, "cut") if multi_label else ANSWER)}
        _write_out(out, texts, table.sha256, result.path / ROWS, {"number": "row", **columns, "reason": "refused"})

    def lines(facts: dict[str, Any]) -> list[str]:
        counts = [f"  {facts['labelled'][label]:,} {label}" for label in facts["labels"]]
        return [
            f"{facts['rows']:,} rows",
            *counts,
            f"  {facts['abstained']:,} {'without any label' if multi_label else 'abstained'}, "
            f"{facts['no_text']:,} without text",
            f"  {facts['calibration']}",
            *(
                f"  of {rows} rows labelled {label} by people it gives {right} this label: {recall} %; of {given} rows "
                f"that it gives this label so many are right: {precision} %"
                for label, rows, right, recall, given, precision in recall_rows(facts)
            ),
            *([f"  {cut_note(facts)} (column `cut`)"] if facts["cut"] else []),
        ]

    _show(result, out, as_json, lines)


def _checkpoint(store: "Store", name: str, runtime: str) -> "Artifact":
    """The artifact of a checkpoint or an export. Raises `ConfigError` for a folder outside the store.

    The inputs of a step must be artifacts, because its lineage consists of artifacts.
    """
    from nautile.flows.named import checkpoint_artifact
    from nautile.model.runtimes.load import check_runtime

    artifact, folder = checkpoint_artifact(store, name)
    check_runtime(runtime, folder)
    if artifact is None and not Path(name).is_dir():  # of the Hub, whose client keeps links, which no store takes
        first = shell_command("nautile", "export", name, "FOLDER")
        raise ConfigError(f"{name} is not in the store: add it with `{first}` and `nautile store add FOLDER`")
    if artifact is None:
        words = ["nautile", "store", "add", folder, *(["--kind", "export"] if runtime == "onnx" else [])]
        raise ConfigError(f"{folder} is not in the store: add it with `{shell_command(*words)}`")
    return artifact


def delimiter_of(option: str) -> str | None:
    """The character that `--delimiter` names; None for the default. Raises `ConfigError` for any other."""
    from nautile.data.table import DELIMITERS

    by_name = {name: character for character, name in DELIMITERS.items()} | {"\t": "\t", "\\t": "\t"}
    if option and option not in by_name:
        raise ConfigError(f"--delimiter {option!r}: is none of {' '.join(DELIMITERS.values())}")
    return by_name.get(option)


def encoding_of(option: str) -> str | None:
    """The encoding that `--encoding` names; None if it is empty. Raises `ConfigError` for one that Python lacks."""
    try:
        return codecs.lookup(option).name if option else None
    except LookupError:
        raise ConfigError(f"--encoding {option!r}: no encoding has this name; cp1252 is that of Windows") from None


def _texts(file: Path, column: str, delimiter: str, encoding: str, out: Path | None) -> tuple["TextsConfig", "Table"]:
    """The table of texts, and its content; what was found about its form is printed.

    Raises `ConfigError` for an invalid table, or an unusable `--out`.
    """
    from nautile.uses.labelled.config import SUFFIXES, TextsConfig
    from nautile.uses.labelled.texts import check_writable, read_texts

    if file.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{file}: the suffix must be one of {', '.join(SUFFIXES)}")
    if out is not None:
        check_writable(out)
        if out.resolve() == file.resolve():
            raise ConfigError(f"--out {out}: is the table of texts itself")
    texts = TextsConfig.model_validate(
        {
            "reader": SUFFIXES[file.suffix.lower()],
            "path": str(file),
            "text_column": column,
            "delimiter": delimiter_of(delimiter),
            "encoding": encoding_of(encoding),
        }
    )
    table, _ = read_texts(texts)  # raises for an invalid table before a process starts
    if table.found:
        console_for(stderr=True).print(Text(table.found), soft_wrap=True)
    return texts, table


def _run(
    stage: "Stage", section: "Section", checkpoint: "Artifact", store: "Store", *, force: bool, as_json: bool
) -> "Artifact":
    """Run the step, or reuse it; returns its artifact."""
    from nautile.uses.step import run_step

    [artifact] = run_step(
        stage, {stage.name: section.model_dump(mode="json")}, {"checkpoint": checkpoint.id}, store,
        command=shell_command("nautile", *sys.argv[1:]), force=force, as_json=as_json,
    ).values()  # fmt: skip
    return artifact


def _show(artifact: "Artifact", out: Path | None, as_json: bool, lines: Callable[[dict[str, Any]], list[str]]) -> None:
    """Print the facts of the artifact, as JSON or as `lines` formats them, and its location."""
    facts = {**artifact.manifest["facts"], "artifact": artifact.id}
    facts |= {"folder": str(artifact.path), "out": out and str(out)}
    locations = [f"{artifact.id}: {artifact.path}"]
    if out is not None:
        locations.append(f"written to {out}")
    show_as(facts, as_json, lambda facts: "\n".join([*lines(facts), *locations]))


def _write_out(out: Path, texts: "TextsConfig", digest: str, rows: Path, columns: dict[str, str]) -> None:
    """Write the table of texts with the answers of the file `rows` to `out`. `columns`: column of `rows` -> new name.

    In JSON lines, extracted documents are written as objects instead of strings.
    """
    from nautile.data.table import read_table
    from nautile.uses.labelled.texts import read_texts, with_answers, write_rows

    # With its digest, so that a file that was edited while the step ran is refused: answers would stand beside other
    # texts.
    table, _ = read_texts(texts, digest)
    answers = [{new: row.get(old) for old, new in columns.items()} for row in read_table(rows).rows]
    if out.suffix.lower() == ".jsonl":
        for answer in answers:
            answer |= {name: json.loads(value) for name in ("document", "spans") if (value := answer.get(name))}
    write_rows(out, with_answers(table, answers))
