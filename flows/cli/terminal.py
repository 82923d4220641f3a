"""Shared by all commands of `nautile`: common arguments, the store, the console, and text or JSON output.

The store and Rich are imported when a command runs, so that `--help` stays fast.
"""

import contextlib
import errno
import glob
import json
import sys
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from nautile.common.errors import ConfigError
from nautile.common.text import controls_escaped, visible


def complete_config(incomplete: str) -> list[str]:
    """Shell completion of a configuration: the shipped ones, and TOML files."""
    from nautile.configs.load import shipped_files

    names = [path.stem for path in shipped_files() if path.stem.startswith(incomplete)]
    return [*names, *sorted(glob.glob(f"{glob.escape(incomplete)}*.toml"))]


def complete_stage(incomplete: str) -> list[str]:
    """Shell completion of a stage."""
    from nautile.configs.stages import STAGES

    return [stage for stage in STAGES if stage.startswith(incomplete)]


ConfigArgument = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        help="A TOML file, or the name of a shipped one: local, smollm2, nautile_100m, spark, nautile_370m.",
        autocompletion=complete_config,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="FIELD=VALUE", help="Replace a value of the configuration: reason.policy.steps=3. Repeatable."
    ),
]
IdArgument = Annotated[
    str, typer.Argument(metavar="ID", help="An artifact: KIND/KEY or KEY; the first digits of the key are enough.")
]
CheckpointArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="CHECKPOINT",
        help="An artifact id, a folder, a stage (align), or OWNER/NAME of the Hub. Default: the newest of no sweep.",
    ),
]
RuntimeOption = Annotated[
    str,
    typer.Option("--runtime", metavar="RUNTIME", help="jax: for a checkpoint; onnx: for an export --format onnx."),
]


def print_json_alone(context: typer.Context, wanted: bool) -> bool:
    """With --json: what a plug-in or a library prints while the command runs goes to standard error.

    `write_json` alone writes to standard output then.
    """
    global _json_output
    if wanted and _json_output is None:
        _json_output = sys.stdout
        context.with_resource(contextlib.redirect_stdout(sys.stderr))
        context.call_on_close(_end_json_alone)
    return wanted


def _end_json_alone() -> None:
    global _json_output
    _json_output = None


_json_output: TextIO | None = None  # standard output while `print_json_alone` holds

Json = Annotated[bool, typer.Option("--json", help="Print JSON.", callback=print_json_alone)]
JSON_VERSION = 1  # of the --json outputs (flows/cli/document.py): within a version fields are only added


def show_as(value: Any, as_json: bool, view: Callable[[Any], Any]) -> None:
    """Print `value` as JSON, or as the Rich renderable that `view` builds from it."""
    if as_json:
        write_json(value)  # not Rich, because it would wrap long strings
    else:
        console_for().print(view(value), crop=False)  # keep lines that are longer than the terminal is wide


def write_json(value: Any, *, ensure_ascii: bool = True) -> None:
    """Print `value` as JSON."""
    (_json_output or sys.stdout).write(json_text(value, ensure_ascii=ensure_ascii) + "\n")


def json_text(value: Any, *, ensure_ascii: bool = True) -> str:
    """`value` as JSON for the terminal: with `ensure_ascii=False` all but control characters stay as they are."""
    text = json.dumps(value, indent=1, default=str, ensure_ascii=ensure_ascii)  # `str` for dates, as queries return
    return controls_escaped(text)


def listed_as(total: int, match: str, sort: str, default: str, state: str | None = None) -> list[str]:
    """The options that list all of a list of which only a part was shown."""
    return [
        "--most",
        str(total),
        *(["--match", match] if match else []),
        *(["--sort", sort] if sort != default else []),
        *(["--state", state] if state else []),
    ]


def check_parquet(out: Path | None) -> None:
    """Raise `ConfigError` for an `--out` that no Parquet file can be written to: before a step that may take hours."""
    if out is not None and (out.suffix.lower() != ".parquet" or not out.absolute().parent.is_dir()):
        raise ConfigError(f"--out {out}: must be a .parquet file in a folder that exists")


def the_store() -> Any:
    """The store that NAUTILE_STORE names."""
    from nautile.store.mirror import open_store

    return open_store()


def keep_programs() -> None:
    """Keep the programs that this process compiles in the store, if there is one: the next start loads them.

    They are most of the time to the first token of a small model.
    """
    from nautile.model.compile_cache import enable_compile_cache

    store = the_store()
    if store.root.exists():
        enable_compile_cache(store.compiled)


def unexpected(error: Exception) -> tuple[str, int]:
    """The line about an error that no command expects, and the exit code.

    A setting that Prefect refuses as it is imported is the user's mistake. Else it is a fault of the program or of
    Prefect's server, whose trace goes into the store: logs/errors.log.
    """
    described_as = None
    if find_spec("prefect"):
        from nautile.flows.operate.prefect_faults import described, setting_fault

        if fault := setting_fault(str(error)):
            return fault, 2
        described_as = described(error)
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"{visible(error.filename, 80)}: no file can have a name of this length; check the argument", 2
    path = the_store().logs / "errors.log"
    details = f" (details in {path})"
    try:
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            traceback.print_exception(error, file=file)
    except OSError:
        details = ""
    return (described_as or f"unexpected {type(error).__name__}: {error}") + details, 1


def console_for(stderr: bool = False) -> Any:
    """The Rich console of all commands: it interprets no markup, and prints no control character of any text."""
    from nautile.flows.render import CleanConsole

    return CleanConsole(stderr=stderr, markup=False, emoji=False, highlight=False)


def print_markdown(text: str) -> None:
    """Render markdown on a terminal; write it unchanged to a pipe or a file."""
    from rich.markdown import Markdown

    console = console_for()
    # Without hyperlinks, whose targets are not seen: the address stands behind each link.
    shown = Markdown(text, hyperlinks=False) if console.is_terminal else text.rstrip("\n")
    console.print(shown, soft_wrap=not console.is_terminal)
