"""Helpers of the benches: command-line options, interleaved timing, and output of results."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[1]
Name = TypeVar("Name", bound=Hashable)


def argument_parser(doc: str, **defaults: Any) -> argparse.ArgumentParser:
    """A parser with an option `--name VALUE` for each default, and `--json FILE`.

    An option has the type of its default, and takes several values for a list. None stands for a path, False for a
    flag. `doc`: the bench's docstring, whose first line is the description.
    """
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    for name, default in {**defaults, "json": None}.items():
        option, example = f"--{name.replace('_', '-')}", default[0] if isinstance(default, list) else default
        if default is False:
            parser.add_argument(option, action="store_true")
        else:
            list_options: dict[str, Any] = {"nargs": "*"} if isinstance(default, list) else {}
            parser.add_argument(
                option, type=Path if example is None else type(example), default=default, **list_options
            )
    return parser


def run_sweep(file: Path, store: Path) -> None:
    """Run a sweep in a store to its end, one run at a time. Its exit ends this program, whose next start goes on."""
    command: list[str | Path] = [sys.executable, "-m", "nautile.flows.cli.main", "sweep", file.absolute(), "--yes"]
    environment = os.environ | {"NAUTILE_STORE": str(store)}
    subprocess.run([*command, "--parallel", "1"], cwd=ROOT, env=environment, check=True)


def write_results(results: Any, file: Path | None) -> None:
    """Write results as JSON, if `--json` names a file."""
    if file:
        file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def print_rows(results: Mapping[str, Any]) -> None:
    """Print each title with its row or rows under it."""
    for title, rows in results.items():
        print(f"\n{title}")
        for row in rows if isinstance(rows, list) else [rows]:
            print("  ", row)


def time_interleaved(calls: Mapping[Name, Callable[[], Any]], repeats: int) -> dict[Name, list[tuple[float, float]]]:
    """Wall time and processor time, in seconds, of each call, after one call each that is not counted.

    Each round makes every call once, so that other work on the machine disturbs all of them alike.
    """
    timings: dict[Name, list[tuple[float, float]]] = {name: [] for name in calls}
    for round_number in range(repeats + 1):
        for name, call in calls.items():
            wall, processor = time.perf_counter(), time.process_time()
            call()
            # The first round compiles, loads files and warms caches.
            if round_number:
                timings[name].append((time.perf_counter() - wall, time.process_time() - processor))
    return timings


def medians(timings: Mapping[Name, list[tuple[float, float]]]) -> dict[Name, float]:
    """The median wall time of each call, in seconds."""
    return {name: statistics.median(wall for wall, _ in times) for name, times in timings.items()}


def median_seconds(call: Callable[[], Any], repeats: int) -> float:
    """The median wall time of a call in seconds, after one call that is not counted."""
    return medians(time_interleaved({"": call}, repeats))[""]


@contextmanager
def workers(
    command: Sequence[str], places: Mapping[Name, tuple[Mapping[str, str], Path]]
) -> Iterator[Callable[[Name, str], str]]:
    """A process of `command` for each name, in its environment and folder; yields `ask(name, line)`, its reply.

    A worker answers each line of its standard input with one line. While one works, the others wait for theirs.
    """
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = {name: subprocess.Popen(command, env=env, cwd=cwd, **pipes) for name, (env, cwd) in places.items()}

    def ask(name: Name, line: str) -> str:
        process = processes[name]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
        if not (reply := process.stdout.readline()):
            raise SystemExit(f"the worker {name} ended with exit code {process.wait()}")
        return reply

    try:
        yield ask
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
