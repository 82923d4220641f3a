"""Chaos test: run the pipeline under injected faults and compare the result with an undisturbed run.

    python bench/chaos/chaos.py chain|toy|FILE --work DIR [--faults 50] [--each-round 10] [--seed 1] [--minutes 8]
                                         [--kinds "full disk,clock jump"] [--stop-s 30]
    python bench/chaos/chaos.py local --work DIR [--seed 2]

`chain` is tests/support/stages/chain.toml: the whole pipeline at toy size with real stages and a teacher in a separate
process. `toy` is the same chain with stand-in stages (tests/support/stages/toy_stages.py) that take some seconds each,
for many faults in little time; it has no teacher and no work items. The configuration first runs undisturbed. Then come
rounds, each in a new store. In a round, faults hit `nautile run CONFIG` at seeded moments, some of them during its
start. If the run stops, the same command is repeated (for a damaged artifact, after the command that its message
offers). At the end of a round the store must verify, its payloads and rows must equal those of the undisturbed run, a
catalog rebuilt from the files must be the same, and no process may be left. The bench ends after `--minutes`; called
again, it repeats an interrupted round and continues. Writes DIR/faults.jsonl, table.json and table.md.

`local` is configs/local.toml itself, with its store at an S3 server and its teacher behind a socket, both of which fail
too: some 30 faults in one run, each injected when the run reaches its place (bench/chaos/local.py). Called again, it
continues after the last fault from which the run recovered. Writes docs/results/chaos-local.md after the comparison.

The full disk is real: the store is on its own tmpfs (needs root for `mount`; otherwise this fault is left out). The
clock is a preloaded library (bench/chaos/clock.c; left out without a C compiler): every process of the run reads a wall
clock that jumps, while file times stay correct. Each round starts with the compiled programs of the undisturbed run.
"""

import argparse
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("schedule", help="chain, toy, local, or the file of a configuration")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stop-s", type=float)
    parser.add_argument("--port", type=int, default=47311, help="of the teacher; the S3 server has the next")
    random_options = parser.add_argument_group("at random moments")
    random_options.add_argument("--faults", type=int, default=50)
    random_options.add_argument("--each-round", type=int, default=10)
    random_options.add_argument("--minutes", type=float, default=8.0)
    random_options.add_argument("--kinds", default="")
    local_options = parser.add_argument_group("local")
    local_options.add_argument(
        "--config", type=Path, default=ROOT / "configs/local.toml", help="a smaller one, to try it"
    )
    local_options.add_argument("--only", default="", help="numbers of faults, to try them: 3,7")
    local_options.add_argument("--report", type=Path, default=ROOT / "docs/results/chaos-local.md")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # runs every `finally`
    # Imported here, because each needs packages that the other does not.
    if arguments.schedule == "local":
        from bench.chaos.local import LocalChaos

        arguments.stop_s = arguments.stop_s or 60.0
        LocalChaos(arguments).run()
    else:
        from bench.chaos.random_times import Chaos

        arguments.stop_s = arguments.stop_s or 30.0
        Chaos(arguments).run()


if __name__ == "__main__":
    main()
