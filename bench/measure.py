"""What the benches share: options, timing in turns, and where results go."""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar

Name = TypeVar("Name", bound=Hashable)


def options(doc: str, **defaults: Any) -> argparse.ArgumentParser:
    """A parser of `--name VALUE` by the defaults (their type; several values for a list), and of `--json FILE`.

    A default of None stands for a path, False for a flag. `doc`: the bench's docstring, whose first line describes it.
    """
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    for name, default in {**defaults, "json": None}.items():
        option, first = f"--{name.replace('_', '-')}", default[0] if isinstance(default, list) else default
        if default is False:
            parser.add_argument(option, action="store_true")
        else:
            several = {"nargs": "*"} if isinstance(default, list) else {}
            parser.add_argument(option, type=Path if first is None else type(first), default=default, **several)
    return parser


def write_results(results: Any, file: Path | None) -> None:
    """Write the results of a bench as JSON, if `--json` names a file."""
    if file:
        file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def print_rows(results: Mapping[str, Any]) -> None:
    """Print each title with its row or rows under it."""
    for title, rows in results.items():
        print(f"\n{title}")
        for row in rows if isinstance(rows, list) else [rows]:
            print("  ", row)


def in_turns(calls: Mapping[Name, Callable[[], Any]], repeats: int) -> dict[Name, list[tuple[float, float]]]:
    """Seconds of the clock and of the processor of each call, after one call each that is not counted.

    A round goes through all of them, so that a noisy machine disturbs all alike.
    """
    taken: dict[Name, list[tuple[float, float]]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            wall, processor = time.perf_counter(), time.process_time()
            call()
            if repeat:
                taken[name].append((time.perf_counter() - wall, time.process_time() - processor))
    return taken


def medians(taken: Mapping[Name, list[tuple[float, float]]]) -> dict[Name, float]:
    """The median of the clock's seconds of each."""
    return {name: statistics.median(wall for wall, _ in times) for name, times in taken.items()}


def median_seconds(call: Callable[[], Any], repeats: int) -> float:
    """The median of the clock's seconds that a call takes, after one that is not counted."""
    return medians(in_turns({"": call}, repeats))[""]
