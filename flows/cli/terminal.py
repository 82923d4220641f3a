"""What every command of `nautile` shares: its common arguments, the store, and how an answer is shown."""

import json
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

ConfigArgument = Annotated[str, typer.Argument(metavar="CONFIG", help="a TOML file, or local, spark, nautile_370m")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


def show_as(value: Any, as_json: bool, view: Callable[[Any], Any]) -> None:
    """As JSON, or as what `view` makes of it for people."""
    if as_json:
        sys.stdout.write(json.dumps(value, indent=1, default=str) + "\n")
    else:
        console_for().print(view(value))


def the_store() -> Any:
    """The store that NAUTILE_STORE names."""
    from store.mirror import open_store

    return open_store()


def console_for(stderr: bool = False) -> Any:
    """A terminal that takes text as it is, never as markup."""
    from rich.console import Console

    return Console(stderr=stderr, markup=False, highlight=False)
