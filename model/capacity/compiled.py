"""The cost of a compiled program by the compiler's cost model: operations, bytes and cycles, read from its text.

XLA's analysis counts the body of a loop once, whatever its length, and the operations of a custom call (a Pallas
kernel) not at all. Here each body is analysed separately and multiplied by its iterations; kernels are counted, so that
their work can be added by formula (`model.capacity.flops`). Only the TPU compiler writes an estimate of cycles.
"""

import re
from collections import defaultdict
from functools import cached_property
from typing import NamedTuple

import jax
from jaxlib import _hlo, _jax  # type: ignore[attr-defined]  # jaxlib has no stubs of `_hlo`

_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_LOOP = re.compile(r" while\(.*?condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_CALL = re.compile(r" call\(.*?to_apply=%?([\w.\-]+)")
_TRIP_COUNT = re.compile(r'known_trip_count"?:\{"n":"(\d+)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
# JAX counts its loops from 0 in steps of 1: their condition is a comparison with the number of iterations.
_BOUND = re.compile(r"ROOT .* compare\(.*?%?([\w.\-]+)\), direction=LT")
_CONSTANT = re.compile(r"%?([\w.\-]+) = s32\[\]\S* constant\((\d+)\)")
_KERNEL = re.compile(r'custom_call_target="(?:tpu_custom_call|__gpu\$xla\.gpu\.triton)"')


class ProgramCost(NamedTuple):
    """Sums over a program, with loops multiplied by their iterations.

    flops, bytes: of XLA's analysis, without kernels; bytes of the operands and results of every operation, in any kind
    of memory. cycles: None if the compiler estimates none. kernels: number of calls of Pallas kernels. unknown_loops:
    loops whose number of iterations is not in the text, counted once.
    """

    flops: float
    bytes: float
    cycles: float | None
    kernels: float
    unknown_loops: int


def program_cost(text: str) -> ProgramCost:
    """The cost of an optimised program, from `compiled.as_text()`."""
    program = _Program(text)
    cost = program.total(program.entry)
    return cost if _CYCLES.search(text) else cost._replace(cycles=None)


class _Program:
    """The computations of a program by name, each with its lines."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.computations: dict[str, list[str]] = defaultdict(list)
        self.entry = current = ""
        for line in self.lines:
            if start := _COMPUTATION.match(line):
                current = start[1]
                self.entry = current if line.startswith("ENTRY ") else self.entry
            elif line.startswith("}"):
                current = ""
            elif current:
                self.computations[current].append(line)

    @cached_property
    def client(self) -> object:
        return jax.local_devices(backend="cpu")[0].client

    def total(self, name: str) -> ProgramCost:
        """The cost of a computation, with each loop counted for all its iterations."""
        # XLA's figures count each loop body once: add the remaining iterations.
        once = self.once(name)
        flops, bytes_, cycles, kernels, unknown = *once, 0.0, 0.0, 0
        for line in self._lines_with_calls(name):
            cycles += int(estimate[1]) if (estimate := _CYCLES.search(line)) else 0
            kernels += bool(_KERNEL.search(line))
            if not (loop := _LOOP.search(line)):
                continue
            iterations = self._iterations(line, loop[1])
            unknown += iterations is None
            iterations = 1 if iterations is None else iterations
            body, counted = self.total(loop[2]), self.once(loop[2])
            flops += iterations * body.flops - counted[0]
            bytes_ += iterations * body.bytes - counted[1]
            cycles += iterations * (body.cycles or 0.0)
            kernels += iterations * body.kernels
            unknown += body.unknown_loops
        return ProgramCost(flops, bytes_, cycles, kernels, unknown)

    def once(self, name: str) -> tuple[float, float]:
        """XLA's FLOPs and bytes of a computation, with each loop counted once.

        Analyses the program's text with this computation as its entry.
        """
        lines = ["HloModule part", *self.lines[1:]]
        for index, line in enumerate(lines):
            if start := _COMPUTATION.match(line):
                lines[index] = ("ENTRY " if start[1] == name else "") + line.removeprefix("ENTRY ")
        module = _hlo.hlo_module_from_text("\n".join(lines))
        costs = _jax.hlo_module_cost_analysis(self.client, module)
        return max(0.0, costs.get("flops", 0.0)), max(0.0, costs.get("bytes accessed", 0.0))

    def _lines_with_calls(self, name: str) -> list[str]:
        """The lines of a computation and of those that it calls."""
        lines = list(self.computations[name])
        for line in self.computations[name]:
            if called := _CALL.search(line):
                lines += self._lines_with_calls(called[1])
        return lines

    def _iterations(self, line: str, condition: str) -> int | None:
        """The number of iterations of a loop, from its annotation or its condition; None if the text has neither."""
        if annotation := _TRIP_COUNT.search(line):
            return int(annotation[1])
        lines = self.computations[condition]
        bound = next((match[1] for match in map(_BOUND.search, lines) if match), None)
        constants = {match[1]: match[2] for match in map(_CONSTANT.search, lines) if match}
        return int(constants[bound]) if bound in constants else None
