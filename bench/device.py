"""Kernels, training steps, reinforcement and decoding on the accelerator that JAX finds: time, memory and errors.

    python bench/device.py [--small] [--minutes 5] [--row-seconds 150] [--sections kernels rl] [--out FILE]

Sections, in this order (`--sections` selects some):

- `chip`: what it reaches on a large product and on a copy.
- `kernels`: the mixing operator at the published layer's shape (B4 L1024 K16 H64 M2, packed documents), fused (Pallas),
  chunked and as the L x L matrix. Errors of all values and gradients are relative to the matrix form in float64.
- `train_100m`, `train_370m`: bfloat16 training steps of 100 M parameters and of `configs/nautile_370m.toml`'s model, on
  sequences of random n-grams, which can be learnt. Utilisation: `model.capacity.flops` over the chip's peak.
- `rl`: log p at sampling less that of the learner, of the same tokens, bfloat16, 24 layers, completions of 768 tokens,
  with random weights and with a table whose logits are as far apart as a trained model's; then a balanced update.
- `decode`: tokens/s of the sampler at batch 1 and 64, and of the engine of `nautile serve`.

Each row is printed, and FILE written again, as soon as it is measured; a row that fails is a row with its error. One
child process measures them. It is started again without the row that ended it or took over `--row-seconds`. `--minutes`
is the budget of all rows; those that are left then are listed. `--small` has tiny shapes, for a CPU.
"""

import argparse
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.device_rows import PUBLISHED, SECTIONS, SMALL, Row, Shapes, tasks
from bench.measure import argument_parser, write_results

START_SECONDS = 120  # of the child process, before its first row


def work(shapes: Shapes, sections: list[str], done: list[str]) -> None:
    """Measure the rows that are not in `done`; write JSON lines: the name of a row at its start, then its figures."""
    import jax

    def put(row: Row) -> None:
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()

    device = jax.devices()[0]
    put({"device": device.device_kind, "devices": len(jax.devices()), "jax": jax.__version__})
    for name, measure in tasks(shapes, sections):
        if name in done:
            continue
        put({"begins": name})
        start = time.perf_counter()
        try:
            row = measure()
        except Exception as error:  # any: the next row may work
            row = {"error": f"{type(error).__name__}: {error}"[:2000]}
        put({"row": name, "seconds": round(time.perf_counter() - start, 1), **row})
        if "error" in row:
            # A kernel that wrote outside its memory makes every later call of this process fail.
            jax.block_until_ready(jax.numpy.zeros(8) + 1)


def shown(row: Row) -> str:
    """A row in one line: without lists and tables, and an error cut to its first line."""
    parts = [f"{name} {value}" for name, value in row.items() if not isinstance(value, dict | list) and name != "row"]
    return f"{row['row']:34s} " + ", ".join(parts).partition("\n")[0][:400]


def lines_of(process: subprocess.Popen, until: Callable[[], float]) -> Iterator[str]:
    """The lines of a process's output, up to its end or to the moment `until()` (monotonic), when it is killed."""
    assert process.stdout is not None
    buffer = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (left := until() - time.monotonic()) > 0:
            if not selector.select(left):
                continue
            part = os.read(process.stdout.fileno(), 1 << 16)
            if not part:
                return
            *lines, buffer = (buffer + part).split(b"\n")
            yield from (line.decode() for line in lines)
    process.kill()


def measure_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run child processes until every row is measured, has failed, or the minutes are over."""
    deadline = time.monotonic() + 60 * arguments.minutes
    results: dict[str, Any] = {"command": sys.argv[1:], "rows": [], "skipped": []}
    names = [name for name, _ in tasks(SMALL if arguments.small else PUBLISHED, arguments.sections)]
    options = ["--worker", "--sections", *arguments.sections, *(["--small"] if arguments.small else [])]
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92", "TF_CPP_MIN_LOG_LEVEL": "2", **os.environ}

    def add(row: Row) -> None:
        results["rows"].append(row)
        print(shown(row), flush=True)
        write_results(results, arguments.json)

    while left := [name for name in names if name not in {row["row"] for row in results["rows"]}]:
        if time.monotonic() >= deadline:
            break
        done = [name for name in names if name not in left]
        command = [sys.executable, __file__, *options, "--done", *done]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        begun, row_ends = None, time.monotonic() + START_SECONDS
        for line in lines_of(process, lambda: min(deadline, row_ends)):  # noqa: B023, read in this iteration only
            if not line.startswith("{"):
                print(line, flush=True)
                continue
            part = json.loads(line)
            if "row" in part:
                add(part)
                begun = None
            elif "begins" in part:
                begun, row_ends = part["begins"], time.monotonic() + arguments.row_seconds
            else:
                results |= part
                print(", ".join(f"{name} {value}" for name, value in part.items()), flush=True)
        process.wait()
        if begun and time.monotonic() < deadline:
            late, code = time.monotonic() >= row_ends, process.returncode
            why = f"took over {arguments.row_seconds:g} s" if late else f"its process ended with exit code {code}"
            add({"row": begun, "error": why})
        elif not begun and not any(row["row"] in left for row in results["rows"]):
            # Before its first row: the next one would end there too.
            add({"row": "start", "error": f"the process ended before any row: exit code {process.returncode}"})
            break
    results["skipped"] = left
    if left:
        print(f"not measured in {arguments.minutes:g} minutes: {', '.join(left)}", flush=True)
    write_results(results, arguments.json)
    return results


def options() -> argparse.ArgumentParser:
    parser = argument_parser(__doc__, small=False, minutes=5.0, row_seconds=150.0, sections=SECTIONS)
    parser.add_argument("--out", dest="json", type=Path, help="the same as --json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--done", nargs="*", default=[], help=argparse.SUPPRESS)
    return parser


def main() -> None:
    arguments = options().parse_args()
    if arguments.worker:
        work(SMALL if arguments.small else PUBLISHED, arguments.sections, arguments.done)
        return
    measure_all(arguments)


if __name__ == "__main__":
    main()
