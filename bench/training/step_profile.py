"""Where a training step's time goes: seconds of each operation of the compiled program, by function of the model.

    python bench/training/step_profile.py [--blocks 2] [--rows 2] [--repeats 3] [--remat dots] [--top 25] [--json FILE]

The step is that of train_step.py (loss and every gradient, B2 L1024 D1024, vocabulary 100,352; `--rows`: another B).
XLA's own trace times each operation; the compiled program says which operations hold a matrix product, and of which
function each one is.
One thread, so that seconds of operations add up; on a busy machine they hold the time of others too, and only shares
that were measured idle are worth keeping. `--json` has each pair of function and kind.
"""

import gzip
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.measure import argument_parser, write_results
from bench.training.train_step import chunked_loss, random_batch
from nautile.configs.model import ModelConfig
from nautile.model.nautile import initialise
from nautile.tasks.engine.child_process import ALLOCATOR

SINGLE = "--xla_cpu_multi_thread_eigen=false"

PRODUCT, ELEMENTWISE, MOVED, REDUCED = "matrix product", "elementwise", "copy, transpose", "sum, maximum"
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = \S+(?: /\*.*?\*/)? (?:[^=]*?\s)?([\w\-]+)\(")
_NESTED = {"while", "call", "conditional"}  # their time is that of what they call
_KINDS = {
    **dict.fromkeys(("dot", "convolution"), PRODUCT),
    **dict.fromkeys(("reduce", "reduce-window"), REDUCED),
    **dict.fromkeys(("copy", "transpose", "concatenate", "slice", "pad"), MOVED),
    **dict.fromkeys(("dynamic-slice", "dynamic-update-slice"), MOVED),
}  # fmt: skip


class Program:
    """What the text of a compiled program says of its operations."""

    def __init__(self, text: str) -> None:
        self._bodies: dict[str, set[str]] = {}  # of each computation: the kinds of operations in it
        self._called: dict[str, tuple[str, str]] = {}  # of each operation: its kind, and the computation that it calls
        self._frames: dict[str, str] = {}
        self._functions = _functions(text)
        computation = ""
        for line in text.splitlines():
            if line.startswith(("%", "ENTRY")):
                computation = line.split()[0].removeprefix("ENTRY").lstrip("%")
                self._bodies.setdefault(computation, set())
            elif found := _INSTRUCTION.match(line):
                name, opcode = found.groups()
                self._bodies.setdefault(computation, set()).add(opcode)
                called = re.search(r"(?:calls|to_apply)=%?([\w.\-]+)", line)
                self._called[name] = opcode, called[1] if called else ""
                if frame := re.search(r"stack_frame_id=(\d+)", line):
                    self._frames[name] = frame[1]

    def kind(self, name: str) -> str | None:
        """The kind of an operation; None if its time is that of others, or there is none of this name."""
        opcode, called = self._called.get(name, ("while", ""))
        if opcode in _NESTED:
            return None
        inside = self._bodies.get(called, set()) if opcode == "fusion" else {opcode}
        # The costliest kind in a fusion is its own.
        for kind in (PRODUCT, REDUCED):
            if any(_KINDS.get(one) == kind for one in inside):
                return kind
        plain = {one for one in inside if one not in ("parameter", "bitcast", "constant", "tuple", "get-tuple-element")}
        if plain and all(_KINDS.get(one) == MOVED for one in plain):
            return MOVED
        return ELEMENTWISE

    def function(self, name: str) -> str:
        """The innermost function of the source that the operation is of."""
        return self._functions.get(self._frames.get(name, ""), "?")


def _functions(text: str) -> dict[str, str]:
    """The name of the function of each stack frame, from the tables that precede a program."""

    def table(title: str) -> dict[str, str]:
        found = re.search(rf"^{title}\n(.*?)(?:\n\n|\Z)", text, re.DOTALL | re.MULTILINE)
        return dict(line.split(" ", 1) for line in found[1].splitlines()) if found else {}

    names, locations = table("FunctionNames"), table("FileLocations")

    def of(location: str) -> str:
        found = re.search(r"function_name_id=(\d+)", locations.get(location, ""))
        return names.get(found[1], "?").strip('"').replace(".<locals>", "") if found else "?"

    frames = {frame: re.search(r"file_location_id=(\d+)", row) for frame, row in table("StackFrames").items()}
    return {frame: of(found[1]) for frame, found in frames.items() if found}


def main() -> None:
    if SINGLE not in os.environ.get("XLA_FLAGS", ""):  # a process reads these settings as it starts
        flags = ALLOCATOR | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {SINGLE}"}
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **flags})
    parser = argument_parser(__doc__, blocks=2, rows=2, repeats=3, top=25)
    parser.add_argument("--remat", default="dots", choices=["none", "block", "layer", "dots"])
    arguments = parser.parse_args()
    config = ModelConfig(vocabulary=100_352, blocks=arguments.blocks, remat=arguments.remat)
    params, batch = jax.jit(initialise, static_argnums=0)(config, 0), random_batch(config.vocabulary, arguments.rows)
    step = jax.jit(jax.value_and_grad(chunked_loss(config))).lower(params, batch).compile()
    program = Program(step.as_text())
    jax.block_until_ready(step(params, batch))
    seconds: list[Counter[tuple[str, str]]] = []
    for _ in range(arguments.repeats):
        with tempfile.TemporaryDirectory() as folder:
            wall, processor = time.perf_counter(), time.process_time()
            with jax.profiler.trace(folder, create_perfetto_trace=True):
                jax.block_until_ready(step(params, batch))
                wall, processor = time.perf_counter() - wall, time.process_time() - processor
            [file] = Path(folder).rglob("perfetto_trace.json.gz")
            events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        spent: Counter[tuple[str, str]] = Counter()
        for event in events:
            if event.get("ph") == "X" and (kind := program.kind(event["name"])):
                spent[program.function(event["name"]), kind] += event["dur"] / 1e6
        seconds.append(spent)
        print(f"step: {wall:.2f} s, {processor:.2f} processor s, {spent.total():.2f} s in operations")
    median = {key: statistics.median(one[key] for one in seconds) for one in seconds for key in one}
    total = sum(median.values())
    kinds: Counter[str] = Counter()
    for (_, kind), value in median.items():
        kinds[kind] += value
    for kind, value in kinds.most_common():
        print(f"{value:8.2f} s {100 * value / total:5.1f} %  {kind}")
    rows = sorted(median.items(), key=lambda row: -row[1])
    print("what is no matrix product, by function:")
    for (function, kind), value in [row for row in rows if row[0][1] != PRODUCT][: arguments.top]:
        print(f"{value:8.2f} s {100 * value / total:5.1f} %  {function}: {kind}")
    write_results([{"function": name, "kind": kind, "seconds": value} for (name, kind), value in rows], arguments.json)


if __name__ == "__main__":
    main()
