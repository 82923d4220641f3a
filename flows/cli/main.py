"""The `nautile` command line: its commands in the order of `--help`, error messages and exit codes.

Exit codes: 0 success; 1 a stage failed; 2 invalid input (one line on standard error explains how to fix it); 130
stopped by the operator. Each command imports its modules when it runs, so that `--help` is fast.
"""

import atexit
import contextlib
import logging
import os
import pkgutil
import re
import sys
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from nautile.common.commands import config_words, shell_command
from nautile.common.errors import ConfigError, Retryable
from nautile.common.extras import missing_extra
from nautile.common.files import read_bounded_text, read_json
from nautile.common.processes import begin_as_usual, die_with_parent, give_way, loopback_direct, restart_on_huge_pages
from nautile.common.text import visible
from nautile.flows.cli.operate import approve, dashboard, deploy, down, reconcile, retry, server, up
from nautile.flows.cli.plan import plan
from nautile.flows.cli.plugins import plugins
from nautile.flows.cli.publish import publish
from nautile.flows.cli.rehearse import rehearse
from nautile.flows.cli.serve import serve
from nautile.flows.cli.store import store_app
from nautile.flows.cli.sweep import sweep
from nautile.flows.cli.terminal import (
    JSON_VERSION,
    CheckpointArgument,
    ConfigArgument,
    IdArgument,
    Json,
    RuntimeOption,
    SetOption,
    complete_stage,
    console_for,
    keep_programs,
    listed_as,
    print_markdown,
    show_as,
    the_store,
    unexpected,
    write_json,
)
from nautile.flows.cli.watch import logs, note, runs, status
from nautile.flows.uses import COMMANDS, UseCommand

CheckpointRequired = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="An artifact id or a folder.")]
# Secrets from files, as is usual in containers: NAME_FILE is the path of a file with the value of NAME.
_SECRET = re.compile(
    r"(PREFECT_API_AUTH_STRING|PREFECT_SERVER_DATABASE_(CONNECTION_URL|PASSWORD)|HF_TOKEN|\w+_API_KEY)_FILE"
)
LONGEST_NAME = 100  # characters in the name of a run
OutArgument = Annotated[Path, typer.Argument(metavar="OUT", help="A new or empty folder.")]


def run(
    config: ConfigArgument = "local",
    first: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="STAGE",
            help="Start at this stage; read the outputs of earlier stages from the store.",
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
            "--ask-again", help="With --force: request replies of endpoints again and pay for them, instead of reuse."
        ),
    ] = False,
    settings: SetOption = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name of the run. Default: its configuration.")
    ] = None,
) -> None:
    """Run the pipeline. Steps that are in the store are reused; interrupted steps resume."""
    from nautile.configs.load import load, load_base

    if name is not None and not (name == name.strip() and 0 < len(name) <= LONGEST_NAME):
        raise ConfigError(f"--name: a name has 1 to {LONGEST_NAME} characters and does not begin or end with a space")
    run_config, base = load(config, settings), load_base(config)
    # Lower the priority before the imports, which take seconds; but not if the run starts an embedded Prefect server,
    # which inherits the priority and must keep the normal one.
    if "PREFECT_API_URL" in os.environ:
        give_way(run_config.launch.niceness)
    from nautile.flows.run import run as run_pipeline
    from nautile.flows.selection import Selection

    selection = Selection(first=first, last=last, only=only, force=force, ask_again=ask_again)
    words = config_words(config, settings) + (f" {shell_command('--name', name)}" if name else "")
    consoles = console_for(), console_for(stderr=True)
    raise typer.Exit(run_pipeline(run_config, words, selection, *consoles, base=base, name=name))


def artifacts(
    kind: Annotated[str | None, typer.Argument(metavar="KIND", help="tokens, checkpoint, evaluation, ...")] = None,
    superseded: Annotated[bool, typer.Option("--all", help="Include those that a forced run replaced.")] = False,
    match: Annotated[
        str, typer.Option(metavar="TEXT", help="Only those with all of its words in the id, the step, or the run.")
    ] = "",
    sort: Annotated[str, typer.Option(metavar="FIELD", help="created, or bytes: the largest last.")] = "created",
    most: Annotated[
        int | None,
        typer.Option("--most", "--limit", "-n", min=1, help="The last N of the list. Default: 100, with --json all."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the artifacts in the store, oldest first."""
    from nautile.flows.cli import inspect
    from nautile.flows.cli.tables import last_artifacts

    most = most or (None if as_json else 100)
    rows, total = inspect.artifacts(the_store(), kind, superseded, match=match, sort=sort, most=most)
    given = [*([kind] if kind else []), *(["--all"] if superseded else []), *listed_as(total, match, sort, "created")]
    show_as(rows, as_json, lambda rows: last_artifacts(rows, total, shell_command("nautile", "artifacts", *given)))


def show(artifact: IdArgument, as_json: Json = False) -> None:
    """Show one artifact: its files, facts and inputs, and whether its files match their digests."""
    from nautile.flows.cli import inspect
    from nautile.flows.cli.tables import manifest_view

    show_as(inspect.show(the_store(), artifact), as_json, manifest_view)


def lineage(artifact: IdArgument, as_json: Json = False) -> None:
    """Show all artifacts that an artifact was made from, down to the token shards and the calls to teachers."""
    from nautile.flows.cli import inspect
    from nautile.flows.cli.tables import lineage_tree

    show_as(inspect.lineage(the_store(), artifact), as_json, lineage_tree)


def sql(
    query: Annotated[
        str,
        typer.Argument(metavar="QUERY", help="DuckDB SQL over runs, steps, scores, metrics, and more: docs/store.md."),
    ],
    as_json: Json = False,
) -> None:
    """Query the catalog with SQL, read-only."""
    from nautile.flows.cli import inspect
    from nautile.flows.render import query_table

    columns, rows = inspect.sql(the_store(), query)
    show_as([dict(zip(columns, row, strict=True)) for row in rows], as_json, lambda _: query_table(columns, rows))


def params(config: ConfigArgument = "local", settings: SetOption = None, as_json: Json = False) -> None:
    """Count the parameters of a configuration's model by part, and the bytes of decoding state per sequence."""
    from nautile.configs.load import load
    from nautile.flows.cli.tables import count_table
    from nautile.model.capacity.flops import parameter_counts, state_bytes

    model = load(config, settings).model
    counts = parameter_counts(model)
    state = {f"state_bytes.{name}": size for name, size in state_bytes(model).items()}
    show_as({**counts, "total": sum(counts.values()), **state}, as_json, count_table)


def chat(
    checkpoint: CheckpointArgument = None,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", metavar="TEXT", help="Answer TEXT and exit. Default: read questions from stdin."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens in a reply. Default: three quarters of the context.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0: greedy decoding.")] = 0.7,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the k most likely tokens; 0: from all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Sample from the most likely tokens whose probabilities add up to p.")
    ] = 1.0,
    thinking_budget: Annotated[
        int | None, typer.Option(min=0, help="End the reasoning after this many tokens.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed and questions give the same replies.")] = 0,
    runtime: RuntimeOption = "jax",
    hide_thinking: Annotated[bool, typer.Option("--hide-thinking", help="Show only the answers.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --prompt: print JSON.")] = False,
) -> None:
    """Chat with a checkpoint. Reasoning and answer are shown while they are generated."""
    if as_json and prompt is None:
        raise ConfigError("--json needs --prompt: an interactive chat prints text only")
    from nautile.flows.chat import Chat, ChatSettings
    from nautile.flows.cli.chat import answer_as_json, converse, heading, stream_answer
    from nautile.flows.named import checkpoint_folder
    from nautile.model.runtimes.load import load_runtime
    from nautile.store.artifacts import checkpoint_name

    settings = ChatSettings(max_tokens, temperature, top_k, top_p, thinking_budget, seed)
    folder = checkpoint_folder(checkpoint)
    keep_programs()
    session = Chat(load_runtime(runtime, folder), settings)
    name = heading(folder, checkpoint_name(folder))
    if checkpoint is None and not (prompt is None and sys.stdin.isatty()):  # a conversation begins with the name
        console_for(stderr=True).print(name, markup=False, soft_wrap=True)
    if prompt is None:
        converse(session, console_for(), not hide_thinking, name)
    elif as_json:
        write_json(answer_as_json(session, prompt), ensure_ascii=False)
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
        typer.Option(
            "--against", metavar="CHECKPOINT", help="Also evaluate this checkpoint, in JAX, and test the difference."
        ),
    ] = None,
    problems: Annotated[int | None, typer.Option(min=1, help="Number of problems. Default: all.")] = None,
    as_json: Json = False,
) -> None:
    """Evaluate a checkpoint or an export on held-out problems; an export's card records its comparison (--against)."""
    from nautile.configs.load import load
    from nautile.flows.cli.measure import evaluate_folder, evaluation_view
    from nautile.flows.named import checkpoint_folder

    other = None if against is None else checkpoint_folder(against)
    keep_programs()
    result = evaluate_folder(checkpoint_folder(checkpoint), runtime, other, load(config), problems)
    show_as(result, as_json, evaluation_view)


def bench(
    checkpoint: CheckpointRequired,
    against: Annotated[
        str | None, typer.Option("--against", metavar="MODEL", help="Also measure this checkpoint or export.")
    ] = None,
    streams: Annotated[
        list[int] | None, typer.Option(min=1, help="Parallel completions. Repeatable. Default: 1, 8 and 32.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure prefill and decoding speed of a checkpoint or an ONNX export here, and the size of its state."""
    from nautile.flows.cli.measure import STREAMS, bench_view
    from nautile.flows.cli.measure import bench as measure
    from nautile.flows.named import checkpoint_folder

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
            help="nautile: the project's own format; transformers: for Hugging Face libraries; onnx: for onnxruntime; "
            "web: a web page with the model.",
        ),
    ] = "nautile",
    bits: Annotated[
        int | None,
        typer.Option(
            help="With --format onnx or web: bits per weight, 32, 8 or 4 (with 4, sensitive parts use 8). Default: 32."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a checkpoint for other programs: weights, configuration and tokenizer files."""
    from nautile.flows.cli.tables import file_table, how_to_try
    from nautile.flows.named import checkpoint_folder
    from nautile.model.exports.formats import FORMATS, WITH_BITS

    if format_ not in FORMATS:
        raise ConfigError(f"--format {format_}: not one of {', '.join(FORMATS)}")
    write = FORMATS[format_]
    if bits is not None:
        if format_ not in WITH_BITS:
            raise ConfigError(f"--bits {bits}: only for --format {' or '.join(WITH_BITS)}, not {format_}")
        write = partial(write, bits=bits)
    show_as([str(path) for path in write(checkpoint_folder(checkpoint), out)], as_json, file_table)
    if not as_json:
        console_for().print(how_to_try(format_, out), soft_wrap=True, end="")


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
            help="A configuration whose model has the same shape; used for values that config.json does not have.",
        ),
    ] = "nautile_370m",
    context: Annotated[
        int | None,
        typer.Option(min=1, help="Context length of the weights, if no file has it; the decays depend on it."),
    ] = None,
    sca_epsilon: Annotated[
        float | None,
        typer.Option(help="Epsilon of the SCA layers' norm: 1e-5 in the author's JAX code, 1e-6 in his PyTorch code."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Convert the author's published weights, or an export for transformers, to an equivalent checkpoint."""
    from nautile.configs.load import load
    from nautile.flows.cli.tables import file_table
    from nautile.model.weights.author_import import import_weights

    base = load(config)
    paths = import_weights(weights, out, base.model, base.tokenizer, context=context, sca_epsilon=sca_epsilon)
    show_as([str(path) for path in paths], as_json, file_table)


def report(
    artifact: Annotated[
        str | None, typer.Argument(metavar="ID", help="A report. Default: the newest in the store.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print a report, the configuration it is about, and the path of its HTML page."""
    from nautile.flows.render import relative
    from nautile.store.named import named_or_newest
    from nautile.tasks.reporting.about import about_line

    folder = named_or_newest(the_store(), "report", artifact).path
    if as_json:
        write_json(read_json(folder / "report.json"), ensure_ascii=False)
        return
    print_markdown((folder / "report.md").read_text(encoding="utf-8"))
    # Repeated at the end, which stays visible: the newest report may be about another configuration than expected.
    about = about_line((read_json(folder / "report.json") or {}).get("about") or {})
    console_for().print(visible(f"this report: {about or folder.name[:12]}"), soft_wrap=True, markup=False)
    console_for().print(f"page: {relative(folder / 'report.html')}", soft_wrap=True)


def compare(
    first: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="An evaluation: an artifact id, a folder, or a stage (its newest evaluation). Or a run: id or name.",
            autocompletion=complete_stage,
        ),
    ],
    second: Annotated[
        str,
        typer.Argument(
            metavar="B",
            help="Another evaluation of the same questions, or another run.",
            autocompletion=complete_stage,
        ),
    ],
    verdict: Annotated[
        str, typer.Option(help="Grading of the answers: strict, lenient, or pass@K of sampled ones.")
    ] = "strict",
    way: Annotated[str, typer.Option(help="Answering mode: generate, likelihood or sampled.")] = "generate",
    changed: Annotated[int, typer.Option(min=0, help="Number of samples to print whose verdict changed.")] = 5,
    as_json: Json = False,
) -> None:
    """Compare two evaluations of the same questions: paired tests, and samples whose verdict changed.

    Or two runs: settings that differ, paired tests of their scores, last values of their curves, time and cost.
    """
    from nautile.flows.cli.compare import comparison_view, run_comparison_view
    from nautile.flows.sweep.comparisons import compare_named

    comparison = compare_named(the_store(), first, second, verdict, way)
    view = run_comparison_view if "runs" in comparison else partial(comparison_view, shown=changed)
    show_as(comparison, as_json, view)


# The default mode drops names of tables such as [launch], as if they were markup.
MARKUP: Literal["markdown"] = "markdown"


def built(name: str, command: Callable[..., Any] | typer.Typer, panel: str | None = None) -> Any:
    """Typer's command of a function, or its group of an app: its signature is read now."""
    if isinstance(command, typer.Typer):
        made: Any = typer.main.get_group(command)
    else:
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=MARKUP)
        alone.command(name)(command)
        made = typer.main.get_command(alone)
    made.name, made.rich_help_panel = name, panel
    return made


class CommandByReference(TyperCommand):
    """A command whose module is imported when it is called, or asked for its parameters."""

    def __init__(self, name: str, panel: str, help_: str, reference: str) -> None:
        self._name, self._reference = name, reference
        super().__init__(name, help=help_, rich_help_panel=panel, rich_markup_mode=MARKUP)

    @cached_property
    def _command(self) -> Any:
        return built(self._name, pkgutil.resolve_name(self._reference))

    @property
    def params(self) -> Any:
        return self._command.params

    @params.setter
    def params(self, _: object) -> None:
        """What the base class sets: none."""

    def make_context(self, *arguments: Any, **more: Any) -> Any:
        """The context of the imported command, which is therefore what runs."""
        return self._command.make_context(*arguments, **more)


# The panels of `nautile --help`, and the commands in their order.
PANELS: dict[str, dict[str, Callable[..., Any] | typer.Typer | UseCommand]] = {
    "Run": {"run": run, "rehearse": rehearse, "sweep": sweep, "plan": plan, "status": status},
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
    **({"Use": {**COMMANDS}} if COMMANDS else {}),
    "Operate": {
        "deploy": deploy,
        "up": up,
        "down": down,
        "server": server,
        "approve": approve,
        "retry": retry,
        "reconcile": reconcile,
        "plugins": plugins,
        "store": store_app,
    },
}

COMPUTING = {"chat", "serve", "evaluate", "bench"}  # run a model in this process; stages run in child processes
# Show what the catalog records, so that a plug-in with a fault hides nothing; to look for plug-ins takes 30 ms. A
# configuration that one of them reads is checked as it is loaded.
SHOWING = {"status", "runs", "compare", "artifacts", "lineage", "sql"}


class CommandGroup(TyperGroup):
    """The commands in the order of `PANELS`, each built when it is asked for: a process runs one of forty."""

    @cached_property
    def _built(self) -> dict[str, Any]:
        return {}

    def get_command(self, _: object, name: str) -> Any:
        if name not in self._built:
            panel = next((panel for panel, commands in PANELS.items() if name in commands), None)
            if panel is None:
                return None
            command = PANELS[panel][name]
            if isinstance(command, UseCommand):
                self._built[name] = CommandByReference(name, panel, *command)
            else:
                self._built[name] = built(name, command, panel)
        return self._built[name]

    def list_commands(self, _: object) -> list[str]:
        return [name for commands in PANELS.values() for name in commands]

    @property
    def commands(self) -> dict[str, Any]:
        return {name: self.get_command(None, name) for name in self.list_commands(None)}

    @commands.setter
    def commands(self, _: object) -> None:
        """What the base class sets: none."""


app = typer.Typer(
    name="nautile",
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=MARKUP,
)


def print_version(version: bool) -> None:
    """Print the versions and exit, if `--version` is set."""
    if version:
        from importlib import metadata

        print(f"nautile {metadata.version('nautile')}, --json version {JSON_VERSION}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=print_version, help="Print the versions and exit.")
    ] = False,
) -> None:
    """Train a small reasoning model, from text to evaluation: ingest, distil, pretrain, align, reason, self-distil."""
    if context.invoked_subcommand not in SHOWING | {"plugins"}:  # which lists them with their faults
        from nautile.configs.plugins import check_plug_ins

        check_plug_ins()


def main() -> NoReturn:
    """Run the command line, then raise `SystemExit`. Errors are one clear message, never a stack trace."""
    # When orbax is imported, absl adds a handler that prints everything to a root logger without handlers.
    logging.getLogger().addHandler(logging.NullHandler())
    logging.raiseExceptions = False  # a full disk must not print a stack trace for each log line
    sys.exit(_run_command())


def script() -> NoReturn:
    """The console script: `main`, then end the process without the interpreter's teardown.

    In the usual teardown DuckDB's binding prints pages about leaks that do not exist.
    """
    begin_as_usual()
    if not os.environ.get("COLUMNS", "1").strip("0"):  # of a terminal without a size: Rich would print nothing
        del os.environ["COLUMNS"]
    # The setting is read when a process starts, so this one starts itself again.
    if sys.argv[1:2] and sys.argv[1] in COMPUTING:
        restart_on_huge_pages()
    try:
        main()
    except SystemExit as ending:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        # Exit functions still run (temporary folders, Prefect's threads); only the teardown of modules is skipped.
        atexit._run_exitfuncs()
        os._exit(ending.code if isinstance(ending.code, int) else 1)


def _run_command() -> int:
    """Run the command and return its exit code."""
    try:
        read_secret_files()
        os.environ |= loopback_direct(os.environ)
        app()
    except SystemExit as ending:  # raised by Typer, with the code of a usage error or of `typer.Exit`
        # The reader has closed the output (`nautile sql ... | head`).
        if isinstance(ending.__context__, BrokenPipeError):
            return 0
        return ending.code if isinstance(ending.code, int) else 0 if ending.code is None else 1
    except (ConfigError, Retryable) as error:
        return _fail(str(error), 2)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        refusal = missing_extra(error)
        return _fail(str(refusal), 2) if refusal else _fail(*unexpected(error))
    return 0


def read_secret_files() -> None:
    """Replace each variable NAME_FILE of the environment by NAME with the content of the file.

    Only for known secrets, because other programs have variables that end in _FILE too. Raises `ConfigError` if a file
    is unreadable, empty or not one line of text, and if both variables are set.
    """
    for variable in [name for name in os.environ if _SECRET.fullmatch(name)]:
        name, path = variable.removesuffix("_FILE"), os.environ[variable]
        if name in os.environ:
            raise ConfigError(f"{name} and {variable} are both set: keep one of them")
        try:
            value = read_bounded_text(Path(path)).strip()
        except ConfigError as error:
            raise ConfigError(f"{variable}: {error}") from None
        if not value or not value.isprintable():
            raise ConfigError(f"{variable}: {path} {'is empty' if not value else 'is not one line of text'}")
        del os.environ[variable]
        os.environ[name] = value


def _fail(message: str, code: int) -> int:
    console_for(stderr=True).print(visible(message), style="red", soft_wrap=True)
    return code


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].isdigit():  # a run of a sweep, which ends with the process of this number
        die_with_parent(int(sys.argv.pop(1)))
    script()
