"""What operating costs: a stage that does nothing, a run that reuses everything, and the read commands.

    python bench/operation/overhead.py stage [--repeats 9]
    python bench/operation/overhead.py reused [--config FILE --store FOLDER] [--repeats 5]
    python bench/operation/overhead.py commands [--config local --store FOLDER] [--repeats 5]

`stage` makes an artifact of one small file, its key new each time, three ways interleaved in one run: as a Prefect task
of a flow with a server up, by the stage alone (child process, publication, catalog), and as a bare Python process that
writes the same file. `reused` is a second `nautile run` when all is made, with a Prefect server up and without (the run
then brings its own); by default of the toy chain, which it makes first. `commands` are the ones that people wait for.
Medians, in seconds of the clock and of the processor (of the command and its children).
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from common.processes import free_port
from flows.operate.prefect_server import configure_prefect, healthy
from store.artifacts import Store

ROOT = Path(__file__).resolve().parents[2]
TOY = ROOT / "tests/support/stages/toy.toml"


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the clock, and of the processor in child processes that have ended."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    work()
    took, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def print_medians(result: dict[str, list[tuple[float, float]]]) -> dict[str, float]:
    """Print the medians; those of the clock by name."""
    medians = {}
    for name, pairs in result.items():
        clock, processor = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"{name:44s} {clock:7.2f} s   {processor:7.2f} s of the processor   ({len(pairs)} times)")
        medians[name] = clock
    return medians


@contextmanager
def server(home: Path) -> Iterator[str]:
    """A Prefect server of our own, as `nautile run` starts it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/api"
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.operate.prefect_server", str(port), str(os.getpid())],
        env={**os.environ, "PREFECT_HOME": str(home), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not healthy(url, 5.0):
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def stage(options: argparse.Namespace) -> None:
    """An empty stage through Prefect, by itself, and as a bare process."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "store")
        configure_prefect(store)
        with server(store.root / "prefect") as url:
            os.environ["PREFECT_API_URL"] = url
            from overhead_stages import empty
            from prefect import flow

            from tasks.engine.attempt import run_stage
            from tasks.engine.prefect_task import as_prefect_task
            from tasks.engine.stage import RunContext

            def alone() -> None:
                run_stage(empty, {"n": uuid.uuid4().hex}, {}, RunContext("bench", str(store.root)))

            @flow(name="overhead")
            def through_prefect() -> list[tuple[float, float]]:
                context = RunContext("bench", str(store.root))
                return [timed(lambda: as_prefect_task(empty)({"n": uuid.uuid4().hex}, {}, context))]

            code = f"open({str(Path(folder) / 'nothing.txt')!r}, 'w').write('nothing')"
            ways: dict[str, Callable[[], tuple[float, float]]] = {
                "through Prefect, as a task of a flow": lambda: through_prefect()[0],
                "by the stage alone": lambda: timed(alone),
                "a bare Python process": lambda: timed(
                    lambda: subprocess.run([sys.executable, "-c", code], check=True)
                ),
            }
            by_name: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
            for repeat in range(options.repeats + 1):
                for name, way in ways.items():
                    took = way()
                    if repeat:  # the first imports
                        by_name[name].append(took)
            medians = print_medians(by_name)
    through, alone_s, bare = medians.values()
    print(
        f"overhead: {through - bare:.2f} s over a bare process ({through / bare:.1f} times it; aim: < 3 s), by the "
        f"stage alone {alone_s - bare:.2f} s ({alone_s / bare:.1f} times)"
    )


@contextmanager
def made(options: argparse.Namespace) -> Iterator[tuple[list[str], str, dict[str, str]]]:
    """The command, the configuration and the environment of a store in which all of it is made."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NAUTILE_", "PREFECT_"))}
    kept |= {"PYTHONPATH": str(ROOT)}
    if options.store:
        yield (
            [sys.executable, "-m", "flows.cli.main"],
            options.config,
            kept | {"NAUTILE_STORE": str(options.store.resolve())},
        )
        return
    command = [sys.executable, "-m", "flows.cli.main"]
    with tempfile.TemporaryDirectory() as folder:
        environment = kept | {"NAUTILE_DAG": "tests.support.stages.toy_dag:toy_dag", "NAUTILE_STORE": f"{folder}/store"}
        subprocess.run([*command, "run", str(TOY)], env=environment, check=True, stdout=subprocess.DEVNULL)
        yield command, str(TOY), environment


def reused(options: argparse.Namespace) -> None:
    """`nautile run` again, with everything there."""
    with (
        made(options) as (command, config, environment),
        tempfile.TemporaryDirectory() as home,
        server(Path(home)) as url,
    ):
        ways = {"a server is up": {"PREFECT_API_URL": url}, "it brings its own server": {}}
        by_name: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(options.repeats):
            for name, more in ways.items():

                def again(more: dict[str, str] = more) -> None:
                    quietly = {"stdout": subprocess.DEVNULL, "check": True}
                    subprocess.run([*command, "run", config], env=environment | more, **quietly)

                by_name[name].append(timed(again))
    print(f"a second run of {Path(config).stem}, all of it reused (aim: under 10 s with a server up)")
    print_medians(by_name)


def commands(options: argparse.Namespace) -> None:
    """The read commands."""
    with made(options) as (command, config, environment):
        asked = {
            "--help": ["--help"],
            "artifacts": ["artifacts"],
            "status": ["status", config],
            "params": ["params", config],
            "sql": ["sql", "SELECT count(*) FROM runs"],
            "store verify": ["store", "verify"],
        }
        by_name: dict[str, list[tuple[float, float]]] = {name: [] for name in asked}
        for repeat in range(options.repeats + 1):
            for name, words in asked.items():

                def ask(words: list[str] = words) -> None:
                    subprocess.run([*command, *words], env=environment, stdout=subprocess.DEVNULL, check=True)

                took = timed(ask)
                if repeat:
                    by_name[name].append(took)
        print_medians(by_name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ways = parser.add_subparsers(required=True)
    for work, repeats in ((stage, 9), (reused, 5), (commands, 5)):
        result = ways.add_parser(work.__name__, help=work.__doc__)
        result.add_argument("--repeats", type=int, default=repeats)
        if work is not stage:
            result.add_argument("--config", default=str(TOY))
            result.add_argument("--store", type=Path)
        result.set_defaults(run=work)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
