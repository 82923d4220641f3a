"""Overhead of operation: an empty stage, a run that reuses everything, and the read commands.

    python bench/operation/overhead.py stage [--repeats 9]
    python bench/operation/overhead.py reused [--config FILE --store FOLDER] [--repeats 5]
    python bench/operation/overhead.py commands [--config local --store FOLDER] [--repeats 5]

`stage` publishes an artifact of one small file under a new key each time, in three interleaved forms: as a Prefect task
of a flow with a running server, by the stage alone (child process, publication, catalog), and as a bare Python process
that writes the same file. `reused` is a second `nautile run` of a finished configuration, with a running Prefect server
and without (the run then starts its own); by default of the toy chain, which is run first. `commands` times the read
commands. Medians of wall time and of processor time (of the command and its children), in seconds.
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


def time_call(work: Callable[[], object]) -> tuple[float, float]:
    """Wall time of a call, and processor time of the child processes that ended meanwhile, in seconds."""
    usage_before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    work()
    seconds, usage_after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, usage_after.ru_utime + usage_after.ru_stime - usage_before.ru_utime - usage_before.ru_stime


def print_medians(result: dict[str, list[tuple[float, float]]]) -> dict[str, float]:
    """Print the medians; returns those of wall time by name."""
    medians = {}
    for name, pairs in result.items():
        clock, processor = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"{name:44s} {clock:7.2f} s   {processor:7.2f} s of the processor   ({len(pairs)} times)")
        medians[name] = clock
    return medians


@contextmanager
def server(home: Path) -> Iterator[str]:
    """Start a Prefect server as `nautile run` does; yields its URL."""
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


def stage(arguments: argparse.Namespace) -> None:
    """An empty stage through Prefect, without Prefect, and as a bare process."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "store")
        configure_prefect(store)
        with server(store.root / "prefect") as url:
            os.environ["PREFECT_API_URL"] = url
            # Imported after Prefect is configured, because it reads its settings on import.
            from overhead_stages import empty
            from prefect import flow

            from tasks.engine.attempt import run_stage
            from tasks.engine.prefect_task import as_prefect_task
            from tasks.engine.stage import RunContext

            def without_prefect() -> None:
                run_stage(empty, {"n": uuid.uuid4().hex}, {}, RunContext("bench", str(store.root)))

            @flow(name="overhead")
            def through_prefect() -> list[tuple[float, float]]:
                context = RunContext("bench", str(store.root))
                return [time_call(lambda: as_prefect_task(empty)({"n": uuid.uuid4().hex}, {}, context))]

            # The least that any stage must do: start an interpreter and write a file.
            code = f"open({str(Path(folder) / 'nothing.txt')!r}, 'w').write('nothing')"
            # Form -> a call that returns its wall and processor seconds.
            forms: dict[str, Callable[[], tuple[float, float]]] = {
                "through Prefect, as a task of a flow": lambda: through_prefect()[0],
                "by the stage alone": lambda: time_call(without_prefect),
                "a bare Python process": lambda: time_call(
                    lambda: subprocess.run([sys.executable, "-c", code], check=True)
                ),
            }
            by_name: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
            for repeat in range(arguments.repeats + 1):
                for name, form in forms.items():
                    times = form()
                    if repeat:  # the first one imports modules
                        by_name[name].append(times)
            medians = print_medians(by_name)
    through, alone_s, bare = medians.values()
    print(
        f"overhead: {through - bare:.2f} s over a bare process ({through / bare:.1f} times it; aim: < 3 s), by the "
        f"stage alone {alone_s - bare:.2f} s ({alone_s / bare:.1f} times)"
    )


@contextmanager
def finished_store(arguments: argparse.Namespace) -> Iterator[tuple[list[str], str, dict[str, str]]]:
    """The command, configuration and environment of a store in which every step is finished."""
    base = {name: value for name, value in os.environ.items() if not name.startswith(("NAUTILE_", "PREFECT_"))}
    base |= {"PYTHONPATH": str(ROOT)}
    if arguments.store:
        yield (
            [sys.executable, "-m", "flows.cli.main"],
            arguments.config,
            base | {"NAUTILE_STORE": str(arguments.store.resolve())},
        )
        return
    command = [sys.executable, "-m", "flows.cli.main"]
    with tempfile.TemporaryDirectory() as folder:
        environment = base | {
            "NAUTILE_DAG": "tests.support.stages.toy_dag:toy_dag",
            "NAUTILE_STORE": f"{folder}/store",
        }
        subprocess.run([*command, "run", str(TOY)], env=environment, check=True, stdout=subprocess.DEVNULL)
        yield command, str(TOY), environment


def reused(arguments: argparse.Namespace) -> None:
    """A second `nautile run`, which reuses every step."""
    with (
        finished_store(arguments) as (command, config, environment),
        tempfile.TemporaryDirectory() as home,
        server(Path(home)) as url,
    ):
        # The second is what a person on a laptop has; the first what a scheduled run finds.
        servers = {"a server is up": {"PREFECT_API_URL": url}, "it brings its own server": {}}
        by_name: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
        for _ in range(arguments.repeats):
            for name, server_settings in servers.items():

                def run_again(server_settings: dict[str, str] = server_settings) -> None:
                    subprocess.run(
                        [*command, "run", config],
                        env=environment | server_settings,
                        stdout=subprocess.DEVNULL,
                        check=True,
                    )

                by_name[name].append(time_call(run_again))
    print(f"a second run of {Path(config).stem}, all of it reused (aim: under 10 s with a server up)")
    print_medians(by_name)


def commands(arguments: argparse.Namespace) -> None:
    """The read commands."""
    with finished_store(arguments) as (command, config, environment):
        command_words = {
            "--help": ["--help"],
            "artifacts": ["artifacts"],
            "status": ["status", config],
            "params": ["params", config],
            "sql": ["sql", "SELECT count(*) FROM runs"],
            "store verify": ["store", "verify"],
        }
        by_name: dict[str, list[tuple[float, float]]] = {name: [] for name in command_words}
        for repeat in range(arguments.repeats + 1):
            for name, words in command_words.items():

                def run_command(words: list[str] = words) -> None:
                    subprocess.run([*command, *words], env=environment, stdout=subprocess.DEVNULL, check=True)

                times = time_call(run_command)
                if repeat:
                    by_name[name].append(times)
        print_medians(by_name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    subparsers = parser.add_subparsers(required=True)
    for work, repeats in ((stage, 9), (reused, 5), (commands, 5)):
        subparser = subparsers.add_parser(work.__name__, help=work.__doc__)
        subparser.add_argument("--repeats", type=int, default=repeats)
        if work is not stage:
            subparser.add_argument("--config", default=str(TOY))
            subparser.add_argument("--store", type=Path)
        subparser.set_defaults(run=work)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
