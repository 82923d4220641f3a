"""A chaos run: the pipeline under faults, and what is left of them at its end.

    python bench/chaos/chaos.py chain|toy|FILE --work DIR [--faults 50] [--each-round 10] [--seed 1] [--minutes 8]
                                         [--kinds "full disk,clock jump"] [--stop-s 30]
    python bench/chaos/chaos.py local --work DIR [--seed 2]

`chain` is tests/support/stages/chain.toml, the whole pipeline at toy size with every stage real, its teacher a server
in a process of its own; `toy` is the same chain of quick stand-in stages (tests/support/stages/toy_stages.py), slowed
down to some seconds each, for many faults in little time: it has no teacher and no workers to lose. First it is run
undisturbed. Then come rounds, each in a new store: `nautile run CONFIG` meets faults at seeded moments (a share of them
while it is still starting), each is answered by the same command again if the run has stopped (for a damaged artifact,
by the command its message offers first), and at the round's end the store must verify, its payloads and rows must be
those of the undisturbed run, a catalog rebuilt from the files must be the same, and nothing may be left running. Ends
after `--minutes`, and goes on from there when called again: a round that was cut off is begun anew. Writes
DIR/faults.jsonl, table.json and table.md.

`local` is configs/local.toml itself, with its store at an S3 server and its teacher behind a socket, both of which fail
too: some 30 faults in one run, placed by what is seen of it (bench/chaos/local.py). Called again it goes on after the
last fault that was overcome. Writes docs/results/chaos-local.md once all is compared.

The full disk is real: the store lies on a tmpfs of its own (`mount`, as root; else the fault is left out). The clock is
a preloaded library (bench/chaos/clock.c, needs a C compiler; else left out): every process of the run reads a wall
clock that jumps, while file times stay true. The rounds' stores begin with the undisturbed run's compiled programs.
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
    several = parser.add_argument_group("at random moments")
    several.add_argument("--faults", type=int, default=50)
    several.add_argument("--each-round", type=int, default=10)
    several.add_argument("--minutes", type=float, default=8.0)
    several.add_argument("--kinds", default="")
    seen = parser.add_argument_group("local")
    seen.add_argument("--config", type=Path, default=ROOT / "configs/local.toml", help="a smaller one, to try it")
    seen.add_argument("--only", default="", help="numbers of faults, to try them: 3,7")
    seen.add_argument("--report", type=Path, default=ROOT / "docs/results/chaos-local.md")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # by way of every `finally`
    # Each needs packages that the other does not.
    if options.schedule == "local":
        from bench.chaos.local import LocalChaos

        options.stop_s = options.stop_s or 60.0
        LocalChaos(options).run()
    else:
        from bench.chaos.random_times import Chaos

        options.stop_s = options.stop_s or 30.0
        Chaos(options).run()


if __name__ == "__main__":
    main()
