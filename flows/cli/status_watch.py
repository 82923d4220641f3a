"""`nautile status --watch`: the table of the stages, drawn anew every two seconds; elsewhere than on a terminal, a line
for each stage whose state changes."""

import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from common.errors import Retryable
from configs.schema import RunConfig
from flows.cli.inspect import Row, status
from flows.cli.tables import status_table
from store.artifacts import Store

EVERY_S = 2.0


def watch(store: Store, config: RunConfig, console: Console) -> None:
    """Until the operator stops it (`KeyboardInterrupt`)."""
    if not console.is_terminal:
        _lines(store, config, console)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            if rows := _rows(store, config):
                live.update(status_table(rows), refresh=True)
            time.sleep(EVERY_S)


def changes(before: list[Row], after: list[Row]) -> list[str]:
    """`label: state` of each stage that stands otherwise than before."""
    known = {row["label"]: row["state"] for row in before}
    return [f"{row['label']}: {row['state']}" for row in after if known.get(row["label"]) != row["state"]]


def _lines(store: Store, config: RunConfig, console: Console) -> None:
    before: list[dict[str, Any]] = []
    while True:
        after = _rows(store, config) or before
        for line in changes(before, after):
            console.print(Text(line), soft_wrap=True)
        before = after
        time.sleep(EVERY_S)


def _rows(store: Store, config: RunConfig) -> list[Row]:
    """Empty while another process has the catalog: the next look will do."""
    try:
        return status(store, config)
    except Retryable:
        return []
