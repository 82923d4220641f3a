"""`nautile`: run the pipeline, and look at what it made. The one place that prints.

Exit codes: 0 done; 1 a stage failed; 2 the input is wrong (one line on standard error says what and what to do);
130 stopped by the operator. Whatever is heavy is imported by the command that needs it, so that `--help` is instant.
"""

import atexit
import contextlib
import json
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from common.errors import ConfigError, Retryable
from flows.cli.operate import operating
from flows.cli.serve import serve
from flows.cli.store import store_app
from flows.cli.terminal import ConfigArgument, Json, console_for, show_as, the_store
from flows.cli.watch import watching

app = typer.Typer(
    name="nautile",
    help="A small reasoning model, from text to evaluation: ingest, distil, pretrain, align, reason, self-distil.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(operating)
app.add_typer(watching)
app.add_typer(store_app, name="store")

IdArgument = Annotated[
    str, typer.Argument(metavar="ID", help="kind/digits, or as many digits of the key as are unique")
]
CheckpointArgument = Annotated[
    str | None, typer.Argument(metavar="[CHECKPOINT]", help="an id, or a folder; the newest in the store if none")
]
CheckpointRequired = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="an id, or a folder")]
OutArgument = Annotated[Path, typer.Argument(metavar="OUT", help="a new or an empty folder")]


@app.command()
def run(
    config: ConfigArgument = "local",
    first: Annotated[
        str | None, typer.Option("--from", metavar="STAGE", help="begin here; what is before is read")
    ] = None,
    last: Annotated[str | None, typer.Option("--until", metavar="STAGE", help="stop after this stage")] = None,
    only: Annotated[
        str | None, typer.Option("--only", metavar="STAGE", help="a stage, or one use: evaluate:align")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="make the chosen stages anew; the old artifacts are kept")
    ] = False,
) -> None:
    """Run the pipeline. Stages whose artifacts are in the store are reused; interrupted ones go on where they stood."""
    from configs.load import load
    from flows.run import run as run_pipeline
    from flows.selection import Selection

    selection = Selection(first=first, last=last, only=only, force=force)
    raise typer.Exit(run_pipeline(load(config), config, selection, console_for(), console_for(stderr=True)))


@app.command()
def status(
    config: ConfigArgument = "local",
    watch: Annotated[bool, typer.Option("--watch", help="go on showing it, until Ctrl-C")] = False,
    as_json: Json = False,
) -> None:
    """Where each stage of a configuration stands."""
    from configs.load import load
    from flows.cli import inspect as inspection
    from flows.cli import status_watch as watching
    from flows.cli.tables import status_table

    if watch and as_json:
        raise ConfigError("--json tells one moment: leave out --watch")
    if watch:
        watching.watch(the_store(), load(config), console_for())
    rows = inspection.status(the_store(), load(config))
    show_as(rows, as_json, status_table)


@app.command()
def artifacts(
    kind: Annotated[str | None, typer.Argument(metavar="[KIND]", help="tokens, checkpoint, evaluation, ...")] = None,
    superseded: Annotated[bool, typer.Option("--all", help="also those that a forced rerun replaced")] = False,
    as_json: Json = False,
) -> None:
    """What is in the store, oldest first."""
    from flows.cli import inspect as inspection
    from flows.cli.tables import artifact_table

    show_as(inspection.artifacts(the_store(), kind, superseded), as_json, artifact_table)


@app.command()
def show(artifact: IdArgument, as_json: Json = False) -> None:
    """One artifact: what it holds, the facts about it, what it came from, whether it is whole."""
    from flows.cli import inspect as inspection
    from flows.cli.tables import manifest_view

    show_as(inspection.show(the_store(), artifact), as_json, manifest_view)


@app.command()
def lineage(artifact: IdArgument, as_json: Json = False) -> None:
    """Everything an artifact was made from, down to the token shards and the calls to teachers."""
    from flows.cli import inspect as inspection
    from flows.cli.tables import lineage_tree

    show_as(inspection.lineage(the_store(), artifact), as_json, lineage_tree)


@app.command()
def sql(
    query: Annotated[str, typer.Argument(help='over artifacts, inputs, runs, metrics, calls, samples, lineage("ID")')],
    as_json: Json = False,
) -> None:
    """Ask the catalog, in DuckDB's SQL, read-only."""
    from flows.cli import inspect as inspection
    from flows.cli.tables import query_table

    columns, rows = inspection.sql(the_store(), query)
    show_as([dict(zip(columns, row, strict=True)) for row in rows], as_json, lambda _: query_table(columns, rows))


@app.command()
def params(config: ConfigArgument = "local", as_json: Json = False) -> None:
    """How many parameters the model of a configuration has, by part."""
    from configs.load import load
    from flows.cli import inspect as inspection
    from flows.cli.tables import parameter_table

    counts = inspection.parameters(load(config))
    show_as({**counts, "total": sum(counts.values())}, as_json, lambda _: parameter_table(counts))


@app.command()
def plan(
    config: ConfigArgument = "nautile_370m",
    topology: Annotated[
        str, typer.Option(metavar="T", help="chips to compile for: v4:2x4x4, v5e:8x8, v6e:8x8, h100:8, or local")
    ] = "v4:2x4x4",
    mfu: Annotated[float, typer.Option(help="the utilisation to reckon time with")] = 0.4,
    fsdp: Annotated[int | None, typer.Option(min=1, help="instead of the configuration's")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="do not look for the largest batch that fits")] = False,
    as_json: Json = False,
) -> None:
    """Will it fit, and how long will it take: compile the training step for chips that need not be here."""
    from rich.markdown import Markdown

    from configs.load import load
    from flows.cli import capacity as planning

    with console_for(stderr=True).status(f"compiling for {topology}") as shown:
        folder = planning.plan_pretraining(the_store(), load(config), topology, mfu, fsdp, not quick, shown.update)
    if as_json:
        print((folder / "plan.json").read_text(encoding="utf-8").strip())
    else:
        console, text = console_for(), (folder / "plan.md").read_text(encoding="utf-8")
        console.print(Markdown(text) if console.is_terminal else text.strip(), soft_wrap=not console.is_terminal)


@app.command()
def chat(
    checkpoint: CheckpointArgument = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", metavar="TEXT", help="ask this and end; else questions are read")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="of a reply; three quarters of the context")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token")] = 0.7,
    top_k: Annotated[int, typer.Option(min=0, help="draw among so many tokens; 0: all")] = 0,
    top_p: Annotated[float, typer.Option(help="draw among the likeliest that hold this share")] = 1.0,
    thinking_budget: Annotated[int | None, typer.Option(min=0, help="end the thinking after so many tokens")] = None,
    seed: Annotated[int, typer.Option(min=0, help="the same seed and questions give the same replies")] = 0,
    hide_thinking: Annotated[bool, typer.Option("--hide-thinking", help="show answers only")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="with --prompt: print JSON")] = False,
) -> None:
    """Talk to a checkpoint: its reasoning and its answer, as they are written."""
    if as_json and prompt is None:
        raise ConfigError("--json goes with --prompt: a conversation is written for people")
    from flows.cli.chat import Chat, Manner, converse, tell
    from flows.cli.chat import as_json as reply
    from flows.cli.inspect import checkpoint_folder

    manner = Manner(max_tokens, temperature, top_k, top_p, thinking_budget, seed)
    talker = Chat(checkpoint_folder(checkpoint), manner)
    if prompt is None:
        converse(talker, console_for(), not hide_thinking)
    elif as_json:
        print(json.dumps(reply(talker, prompt), indent=1, ensure_ascii=False))
    else:
        tell(talker, prompt, console_for(), not hide_thinking)


app.command()(serve)


@app.command()
def export(checkpoint: CheckpointRequired, out: OutArgument, as_json: Json = False) -> None:
    """Write a checkpoint for others: safetensors, config.json and the files of its tokenizer."""
    from flows.cli.inspect import checkpoint_folder
    from flows.cli.tables import file_table
    from model.weights.export import export as write

    show_as([str(path) for path in write(checkpoint_folder(checkpoint), out)], as_json, file_table)


@app.command("import")
def import_(
    weights: Annotated[
        Path, typer.Argument(metavar="WEIGHTS", help="the author's, as .safetensors or .npz (never a pickle)")
    ],
    out: OutArgument,
    config: Annotated[
        str, typer.Option("--config", metavar="CONFIG", help="the configuration that has its shape")
    ] = "nautile_370m",
    as_json: Json = False,
) -> None:
    """Make a checkpoint of the author's published weights, computing as theirs do (decay = "window")."""
    from configs.load import load
    from flows.cli.tables import file_table
    from model.weights.author_import import import_weights

    shape = load(config)
    show_as([str(path) for path in import_weights(weights, out, shape.model, shape.tokenizer)], as_json, file_table)


@app.command()
def report(
    artifact: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="a report; the newest if none is named")
    ] = None,
    as_json: Json = False,
) -> None:
    """The report in the terminal, and where its page lies."""
    from rich.markdown import Markdown

    from flows.cli import inspect as inspection
    from flows.cli.tables import relative

    folder = inspection.latest_report(the_store(), artifact).path
    if as_json:
        print((folder / "report.json").read_text(encoding="utf-8"))
        return
    console = console_for()
    text = (folder / "report.md").read_text(encoding="utf-8")
    console.print(Markdown(text) if console.is_terminal else text, soft_wrap=not console.is_terminal)
    console.print(f"page: {relative(folder / 'report.html')}", soft_wrap=True)


@app.command()
def compare(
    first: Annotated[str, typer.Argument(metavar="A", help="an evaluation: an id, or a folder")],
    second: Annotated[str, typer.Argument(metavar="B", help="another one, of the same questions")],
    verdict: Annotated[str, typer.Option(help="strict or lenient")] = "strict",
    way: Annotated[str, typer.Option(help="how they were asked: generate or likelihood")] = "generate",
    changed: Annotated[int, typer.Option(min=0, help="how many of the samples that changed to show")] = 5,
    as_json: Json = False,
) -> None:
    """Two evaluations on the same questions: paired tests, and the samples whose verdict changed."""
    from flows.cli.compare import compared, view

    show_as(compared(the_store(), first, second, verdict, way), as_json, lambda found: view(found, changed))


def main() -> NoReturn:
    """Do what the command line says, then raise `SystemExit`: one clear message, never a stack trace."""
    # A root logger without handlers is given one that prints everything, by absl as orbax is imported: log noise.
    logging.getLogger().addHandler(logging.NullHandler())
    logging.raiseExceptions = False  # a log that a full disk does not take must not print a stack trace for each line
    sys.exit(_command())


def script() -> NoReturn:
    """The console script: `main`, and the end of the process.

    Torn down in the usual way, the interpreter makes DuckDB's binding print pages about leaks that are none.
    """
    try:
        main()
    except SystemExit as ending:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        atexit._run_exitfuncs()
        os._exit(ending.code if isinstance(ending.code, int) else 1)


def _command() -> int:
    """Run what was asked; the exit code."""
    try:
        app()
    except SystemExit as ending:  # how usage errors and exit codes leave
        return ending.code if isinstance(ending.code, int) else 0 if ending.code is None else 1
    except (ConfigError, Retryable) as error:
        return _fail(str(error), 2)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0  # whoever read our output has left; there is nobody to tell
    except Exception as error:
        kept = _keep_trace()
        return _fail(f"unexpected {type(error).__name__}: {error}" + (f" (details in {kept})" if kept else ""), 1)
    return 0


def _fail(message: str, code: int) -> int:
    console_for(stderr=True).print(message, style="red", soft_wrap=True)
    return code


def _keep_trace() -> Path | None:
    """Where the stack trace of the exception at hand was written; None if there is no place for it."""
    path = the_store().root / "logs" / "errors.log"
    try:
        with path.open("a", encoding="utf-8") as file:
            traceback.print_exc(file=file)
    except OSError:
        return None
    return path


if __name__ == "__main__":
    script()
