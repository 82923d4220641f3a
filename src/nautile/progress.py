"""A progress bar in a terminal or a notebook, and nothing where neither is."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from nautile.flows.render import CleanConsole

Update = Callable[[float, str], None]  # (completed share from 0 to 1, description)


@contextmanager
def progress_bar(description: str, show: bool | None) -> Iterator[Update | None]:
    """Show a bar while the block runs; it yields the function that moves it, None where no bar is shown.

    `show`: None for a bar in a terminal or a notebook. It is removed at the end there, and written to standard error.
    """
    console = CleanConsole(stderr=True, markup=False)
    if show is False or (show is None and not (console.is_terminal or console.is_jupyter)):
        yield None
    elif console.is_jupyter:
        with _in_notebook(description) as update:
            yield update
    else:
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.percentage:3.0f} %"))
        with Progress(*columns, TimeRemainingColumn(), console=console, transient=console.is_terminal) as bar:
            task = bar.add_task(description, total=1.0)
            yield lambda share, text: bar.update(task, completed=share, description=text)


@contextmanager
def _in_notebook(description: str) -> Iterator[Update]:
    """A line below the cell that is replaced as it moves: Rich would need ipywidgets for one."""
    display = sys.modules["IPython"].display.display  # a notebook has it, and no requirement of ours
    handle = display({"text/plain": description}, raw=True, display_id=True)

    def update(share: float, text: str) -> None:
        done = round(20 * min(max(share, 0.0), 1.0))
        line = f"{text} {'█' * done}{'░' * (20 - done)} {share:4.0%}"
        handle.update({"text/plain": line}, raw=True)

    try:
        yield update
    finally:
        handle.update({"text/plain": ""}, raw=True)
