"""The `nautile` command line: its commands in the order of `--help`, its error messages and exit codes.

Exit codes: 0 done; 1 a stage failed; 2 the input is wrong (one line on standard error says what is wrong and how to
fix it); 130 stopped by the operator. Each command imports what it needs itself, so that `--help` is instant.
"""

import atexit
import contextlib
import json
import logging
import os
import shlex
import sys
import traceback
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from typer.core import TyperGroup

from common.errors import ConfigError, Retryable
from common.processes import give_way, restart_on_huge_pages
from flows.cli.many.sweep import sweep
from flows.cli.notes import note
from flows.cli.operate import approve, dashboard, deploy, down, reconcile, server, up
from flows.cli.plan import plan
from flows.cli.publish import publish
from flows.cli.serve import serve
from flows.cli.store import store_app
from flows.cli.terminal import (
    JSON_VERSION,
    CheckpointArgument,
    ConfigArgument,
    IdArgument,
    Json,
    RuntimeOption,
    SetOption,
    complete_stage,
    config_words,
    console_for,
    print_markdown,
    show_as,
    the_store,
)
from flows.cli.uses.labelling import classify, extract
from flows.cli.uses.simulate import simulate
from flows.cli.watch import logs, runs, status
from flows.operate.secret_files import read_secret_files

CheckpointRequired = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="An artifact id or a folder.")]
LONGEST_NAME = 100  # characters of a run's name
OutArgument = Annotated[Path, typer.Argument(metavar="OUT", help="A new or empty folder.")]


def run(
    config: ConfigArgument = "local",
    first: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="STAGE",
            help="Start here; read what comes before from the store.",
            autocompletion=complete_stage,
        ),
    ] = None,
    last: Annotated[
        str | None,
        typer.Option("--until", metavar="STAGE", help="Stop after this stage.", autocompletion=complete_stage),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            "--only",
            metavar="STAGE",
            help="Run this stage alone, or one step: evaluate:align.",
            autocompletion=complete_stage,
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Run the chosen stages again; the old artifacts are kept.")
    ] = False,
    ask_again: Annotated[
        bool,
        typer.Option(
            "--ask-again", help="With --force: pay for the replies of endpoints again, instead of reusing them."
        ),
    ] = False,
    settings: SetOption = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="What the run is called. Default: its configuration.")
    ] = None,
) -> None:
    """Run the pipeline. Steps that are in the store are reused; interrupted ones resume."""
    from configs.load import load, load_base

    if name is not None and not (name == name.strip() and 0 < len(name) <= LONGEST_NAME):
        raise ConfigError(f"--name: 1 to {LONGEST_NAME} characters, without spaces at its ends")
    run_config, base = load(config, settings), load_base(config)
    if "PREFECT_API_URL" in os.environ:  # else it starts a server, which keeps its priority
        give_way(run_config.launch.niceness)  # before the imports, which take seconds
    from flows.run import run as run_pipeline
    from flows.selection import Selection

    selection = Selection(first=first, last=last, only=only, force=force, ask_again=ask_again)
    words = config_words(config, settings) + (f" --name {shlex.quote(name)}" if name else "")
    consoles = console_for(), console_for(stderr=True)
    raise typer.Exit(run_pipeline(run_config, words, selection, *consoles, base=base, name=name))


def artifacts(
    kind: Annotated[str | None, typer.Argument(metavar="KIND", help="tokens, checkpoint, evaluation, ...")] = None,
    superseded: Annotated[bool, typer.Option("--all", help="Include those that a forced run replaced.")] = False,
    as_json: Json = False,
) -> None:
    """List the artifacts in the store, oldest first."""
    from flows.cli import inspect
    from flows.cli.tables import artifact_table

    show_as(inspect.artifacts(the_store(), kind, superseded), as_json, artifact_table)


def show(artifact: IdArgument, as_json: Json = False) -> None:
    """Show one artifact: its files, facts and inputs, and whether the files match their digests."""
    from flows.cli import inspect
    from flows.cli.tables import manifest_view

    show_as(inspect.show(the_store(), artifact), as_json, manifest_view)


def lineage(artifact: IdArgument, as_json: Json = False) -> None:
    """Show everything an artifact was made from, down to the token shards and the calls to teachers."""
    from flows.cli import inspect
    from flows.cli.tables import lineage_tree

    show_as(inspect.lineage(the_store(), artifact), as_json, lineage_tree)


def sql(
    query: Annotated[
        str,
        typer.Argument(
            metavar="QUERY", help='DuckDB SQL over artifacts, inputs, runs, metrics, calls, samples, lineage("ID").'
        ),
    ],
    as_json: Json = False,
) -> None:
    """Query the catalog, read-only."""
    from flows.cli import inspect
    from flows.cli.tables import query_table

    columns, rows = inspect.sql(the_store(), query)
    show_as([dict(zip(columns, row, strict=True)) for row in rows], as_json, lambda _: query_table(columns, rows))


def params(config: ConfigArgument = "local", settings: SetOption = None, as_json: Json = False) -> None:
    """Count the parameters of a configuration's model, by part, and the bytes that decoding keeps of a sequence."""
    from configs.load import load
    from flows.cli.tables import count_table
    from model.capacity.decoding_state import state_bytes
    from model.nautile import parameter_counts

    model = load(config, settings).model
    counts = parameter_counts(model)
    state = {f"state_bytes.{name}": size for name, size in state_bytes(model).items()}
    show_as({**counts, "total": sum(counts.values()), **state}, as_json, count_table)


def chat(
    checkpoint: CheckpointArgument = None,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", metavar="TEXT", help="Answer this and exit. Default: read questions from stdin."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens in a reply. Default: three quarters of the context.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0: the likeliest token.")] = 0.7,
    top_k: Annotated[int, typer.Option(min=0, help="Sample among the k most likely tokens; 0: among all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Sample among the most likely tokens whose probabilities add up to p.")
    ] = 1.0,
    thinking_budget: Annotated[
        int | None, typer.Option(min=0, help="End the reasoning after this many tokens.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed and questions give the same replies.")] = 0,
    runtime: RuntimeOption = "jax",
    hide_thinking: Annotated[bool, typer.Option("--hide-thinking", help="Show the answers only.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --prompt: print JSON.")] = False,
) -> None:
    """Talk to a checkpoint. Its reasoning and its answer are shown as they are generated."""
    if as_json and prompt is None:
        raise ConfigError("--json needs --prompt: a conversation is printed as text only")
    from flows.cli.chat import Chat, ChatSettings, answer_as_json, converse, heading, stream_answer
    from flows.cli.inspect import checkpoint_folder
    from store.artifacts import checkpoint_name

    settings = ChatSettings(max_tokens, temperature, top_k, top_p, thinking_budget, seed)
    folder = checkpoint_folder(checkpoint)
    session = Chat(folder, settings, runtime)
    if prompt is None:
        converse(session, console_for(), not hide_thinking, heading(folder, checkpoint_name(folder)))
    elif as_json:
        print(json.dumps(answer_as_json(session, prompt), indent=1, ensure_ascii=False))
    else:
        stream_answer(session, prompt, console_for(), not hide_thinking)


def evaluate(
    checkpoint: CheckpointRequired,
    config: Annotated[
        str, typer.Option("--config", metavar="CONFIG", help="The configuration with the held-out problems.")
    ] = "local",
    runtime: RuntimeOption = "jax",
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="CHECKPOINT", help="Ask this one as well, in JAX, and test the difference."),
    ] = None,
    problems: Annotated[int | None, typer.Option(min=1, help="Ask only so many. Default: all.")] = None,
    as_json: Json = False,
) -> None:
    """Ask a checkpoint or an export the held-out problems; a comparison goes into an export's card."""
    from configs.load import load
    from flows.cli.evaluate import evaluate_folder, evaluation_view
    from flows.cli.inspect import checkpoint_folder

    other = None if against is None else checkpoint_folder(against)
    result = evaluate_folder(checkpoint_folder(checkpoint), runtime, other, load(config), problems)
    show_as(result, as_json, evaluation_view)


def bench(
    checkpoint: CheckpointRequired,
    against: Annotated[
        str | None, typer.Option("--against", metavar="MODEL", help="Measure this checkpoint or export as well.")
    ] = None,
    streams: Annotated[list[int] | None, typer.Option(min=1, help="Completions at once. Default: 1, 8 and 32.")] = None,
    as_json: Json = False,
) -> None:
    """Measure how fast a checkpoint or an ONNX export reads and writes here, and the size of its state."""
    from flows.cli.bench import STREAMS, bench_view
    from flows.cli.bench import bench as measure
    from flows.cli.inspect import checkpoint_folder

    folders = [checkpoint_folder(name) for name in (checkpoint, against) if name]
    show_as(measure(folders, streams or STREAMS), as_json, bench_view)


def export(
    checkpoint: CheckpointRequired,
    out: OutArgument,
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="nautile: our own; transformers: for Hugging Face libraries; onnx: for onnxruntime; web: a page.",
        ),
    ] = "nautile",
    bits: Annotated[
        int | None,
        typer.Option(
            help="With --format onnx or web: 32, 8 or 4 for a weight (with 4, sensitive parts keep 8). Default: 32."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a checkpoint for other programs: weights, configuration and tokenizer files."""
    from functools import partial

    from flows.cli.inspect import checkpoint_folder
    from flows.cli.tables import file_table
    from model.exports.formats import FORMATS, WITH_BITS

    if format_ not in FORMATS:
        raise ConfigError(f"--format {format_}: is not one of {', '.join(FORMATS)}")
    write = FORMATS[format_]
    if bits is not None:
        if format_ not in WITH_BITS:
            raise ConfigError(f"--bits {bits}: goes with --format {' or '.join(WITH_BITS)}, not {format_}")
        write = partial(write, bits=bits)
    show_as([str(path) for path in write(checkpoint_folder(checkpoint), out)], as_json, file_table)
    next_step = {
        "onnx": f"ask it with `nautile chat {out} --runtime onnx`, or without this project with `python {out}/chat.py`",
        "web": f"serve it with `python -m http.server --bind 127.0.0.1 --directory {out} 8000`, and open "
        "http://127.0.0.1:8000/",
    }
    if format_ in next_step and not as_json:
        console_for().print(next_step[format_], soft_wrap=True)


def import_(
    weights: Annotated[
        Path,
        typer.Argument(
            metavar="WEIGHTS",
            help="The author's weights, or an export: a folder, .safetensors or .npz (never a pickle).",
        ),
    ],
    out: OutArgument,
    config: Annotated[
        str,
        typer.Option(
            "--config",
            metavar="CONFIG",
            help="A configuration whose model has the same shape, for what no config.json beside the weights says.",
        ),
    ] = "nautile_370m",
    context: Annotated[
        int | None,
        typer.Option(min=1, help="The longest sequence of the weights, where no file says it: decays depend on it."),
    ] = None,
    sca_epsilon: Annotated[
        float | None,
        typer.Option(help="Epsilon of the SCA layers' norm: 1e-5 in the author's JAX code, 1e-6 in his PyTorch code."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Convert the author's published weights, or an export for transformers, to a checkpoint that computes the same."""
    from configs.load import load
    from flows.cli.tables import file_table
    from model.weights.author_import import import_weights

    base = load(config)
    paths = import_weights(weights, out, base.model, base.tokenizer, context=context, sca_epsilon=sca_epsilon)
    show_as([str(path) for path in paths], as_json, file_table)


def report(
    artifact: Annotated[
        str | None, typer.Argument(metavar="ID", help="A report. Default: the newest in the store.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print a report, whose it is, and the path of its HTML page."""
    from common.files import read_json
    from common.text import visible
    from flows.cli import inspect
    from flows.cli.tables import relative
    from tasks.reporting.opening import about_line

    folder = inspect.named_or_newest(the_store(), "report", artifact).path
    if as_json:
        print((folder / "report.json").read_text(encoding="utf-8"))
        return
    print_markdown((folder / "report.md").read_text(encoding="utf-8"))
    # Again at the end, which stays in view: the newest report may be of another configuration than one expects.
    about = about_line((read_json(folder / "report.json") or {}).get("about") or {})
    console_for().print(visible(f"this report: {about or folder.name[:12]}"), soft_wrap=True, markup=False)
    console_for().print(f"page: {relative(folder / 'report.html')}", soft_wrap=True)


def compare(
    first: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="An evaluation: an artifact id, a folder, or the stage it followed (the newest). Or a run: id, name.",
            autocompletion=complete_stage,
        ),
    ],
    second: Annotated[
        str,
        typer.Argument(
            metavar="B", help="Another, of the same questions; or another run.", autocompletion=complete_stage
        ),
    ],
    verdict: Annotated[str, typer.Option(help="How answers are graded: strict or lenient.")] = "strict",
    way: Annotated[str, typer.Option(help="How questions were asked: generate or likelihood.")] = "generate",
    changed: Annotated[int, typer.Option(min=0, help="Print this many of the samples whose verdict changed.")] = 5,
    as_json: Json = False,
) -> None:
    """Compare two evaluations of the same questions: paired tests, and samples whose verdict changed.

    Or two runs: the settings that differ, their scores by paired test, the ends of their curves, time and cost.
    """
    from flows.cli.many.compare import (
        check_choices,
        compare_evaluations,
        comparison_view,
        run_comparison_view,
        runs_named,
    )
    from flows.sweep.runs import compare_runs
    from store.catalog import Catalog

    store = the_store()
    check_choices(verdict, way)
    if runs := runs_named(store, first, second):
        catalog = Catalog(store)
        runs_compared = compare_runs(store, lambda sql, *given: catalog.query(sql, given), *runs, verdict, way)
        show_as(runs_compared, as_json, run_comparison_view)
        return
    comparison = compare_evaluations(store, first, second, verdict, way)
    show_as(comparison, as_json, lambda comparison: comparison_view(comparison, changed))


def distill(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A TOML file with the tables [label] and [endpoints.NAME].")
    ],
    label: Annotated[
        bool, typer.Option("--label", help="Label the texts of `label.data` by the teacher `label.teacher`.")
    ] = False,
    questions: Annotated[
        str | None,
        typer.Option("--questions", metavar="ID", help="Leave out texts that overlap these questions of benchmarks."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Label again; what is paid for is reused.")] = False,
    settings: SetOption = None,
    as_json: Json = False,
) -> None:
    """Let a teacher label texts, after its agreement with people is measured on rows that they labelled."""
    if not label:
        raise ConfigError(f"distill: give --label; documents are distilled by `nautile run {config} --only distill`")
    from configs.label import LabelRun
    from configs.load import load_part
    from flows.cli.uses.label import label_texts

    words = shlex.join(["nautile", "distill", "--label", *(["--questions", questions] if questions else [])])
    command = f"{words} {config_words(config, settings)}"
    run_config = load_part(config, LabelRun, settings)
    made = label_texts(the_store(), run_config, questions, command, force, as_json)
    if as_json:
        print(json.dumps({"id": made.id, "path": str(made.path), **made.manifest["facts"]}, indent=1))
        return
    print_markdown((made.path / "card.md").read_text(encoding="utf-8"))
    console_for().print(f"{made.id}: `nautile tune` takes it as data", soft_wrap=True)


def tune(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A TOML file with the table [tune], alone or beside others.")
    ],
    force: Annotated[bool, typer.Option("--force", help="Tune again; the old artifacts are kept.")] = False,
    settings: SetOption = None,
    as_json: Json = False,
) -> None:
    """Fine-tune a checkpoint on labelled rows, and compare it with baselines on the same rows."""
    from configs.load import load_part
    from configs.tune import TuneRun
    from flows.cli.uses.tune import run_tune, tuning_view

    section = load_part(config, TuneRun, settings)
    command = f"nautile tune {config_words(config, settings)}"
    result = run_tune(the_store(), section, command, force, as_json)
    show_as(result, as_json, tuning_view)


# The panels of `nautile --help`, and the commands in their order.
PANELS = {
    "Run": {"run": run, "sweep": sweep, "plan": plan, "status": status},
    "Look": {
        "runs": runs,
        "artifacts": artifacts,
        "show": show,
        "lineage": lineage,
        "sql": sql,
        "logs": logs,
        "note": note,
        "report": report,
        "compare": compare,
        "dashboard": dashboard,
    },
    "Model": {
        "params": params,
        "chat": chat,
        "serve": serve,
        "evaluate": evaluate,
        "bench": bench,
        "export": export,
        "import": import_,
        "publish": publish,
    },
    "Use": {"distill": distill, "tune": tune, "classify": classify, "extract": extract, "simulate": simulate},
    "Operate": {
        "deploy": deploy,
        "up": up,
        "down": down,
        "server": server,
        "approve": approve,
        "reconcile": reconcile,
        "store": store_app,
    },
}

COMPUTING = {"chat", "serve", "evaluate", "bench"}  # with a model, in their own process; stages have child processes


class CommandGroup(TyperGroup):
    """Lists the commands as `PANELS` does: Typer by itself would put groups such as `store` first."""

    def list_commands(self, _: object) -> list[str]:
        return [name for commands in PANELS.values() for name in commands]


app = typer.Typer(
    name="nautile",
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # by itself it takes the names of tables, such as [launch], for markup and drops them
)


def print_version(asked: bool) -> None:
    """Print the versions and end, if they are asked for."""
    if asked:
        from importlib.metadata import version

        print(f"nautile {version('nautile')}, --json version {JSON_VERSION}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=print_version, help="Print the versions and exit.")
    ] = False,
) -> None:
    """Make a small reasoning model, from text to evaluation: ingest, distil, pretrain, align, reason, self-distil."""


for panel, commands in PANELS.items():
    for name, command in commands.items():
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=panel)
        else:
            app.command(name, rich_help_panel=panel)(command)


def main() -> NoReturn:
    """Run the command line, then raise `SystemExit`. Errors are one clear message, never a stack trace."""
    # Importing orbax makes absl give a root logger that has no handlers one that prints everything.
    logging.getLogger().addHandler(logging.NullHandler())
    logging.raiseExceptions = False  # a full disk must not print a stack trace for each log line
    sys.exit(_run_command())


def script() -> NoReturn:
    """The console script: `main`, then end the process without the interpreter's teardown.

    In the usual teardown DuckDB's binding prints pages about leaks that do not exist.
    """
    if sys.argv[1:2] and sys.argv[1] in COMPUTING:
        restart_on_huge_pages()
    try:
        main()
    except SystemExit as ending:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        atexit._run_exitfuncs()
        os._exit(ending.code if isinstance(ending.code, int) else 1)


def _run_command() -> int:
    """Run the command; its exit code."""
    try:
        read_secret_files()
        app()
    except SystemExit as ending:  # Typer ends this way, with the code of a usage error or of `typer.Exit`
        return ending.code if isinstance(ending.code, int) else 0 if ending.code is None else 1
    except (ConfigError, Retryable) as error:
        return _fail(str(error), 2)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0  # the reader of our output has left (`nautile sql ... | head`): no error
    except Exception as error:
        path = the_store().root / "logs" / "errors.log"
        details = f" (details in {path})"
        try:
            with path.open("a", encoding="utf-8") as file:
                traceback.print_exc(file=file)
        except OSError:
            details = ""
        return _fail(f"unexpected {type(error).__name__}: {error}{details}", 1)
    return 0


def _fail(message: str, code: int) -> int:
    console_for(stderr=True).print(message, style="red", soft_wrap=True)
    return code


if __name__ == "__main__":
    script()
