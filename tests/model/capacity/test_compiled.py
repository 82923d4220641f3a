"""The cost of a compiled program from its text: loops whole, cycles, kernels."""

import jax
import jax.numpy as jnp
import pytest

from nautile.model.capacity.compiled import program_cost

# As a TPU's compiler writes it: an operation of 1,000 cycles, a kernel, and a loop of 8 turns with 2 x 4² FLOPs and 30
# cycles each, whose length is told by its condition alone.
TEXT = """HloModule jit_f, is_scheduled=true

%body (state: (s32[], f32[4,4])) -> (s32[], f32[4,4]) {
  %state = (s32[]{:T(128)}, f32[4,4]{1,0:T(8,128)}) parameter(0)
  %index = s32[]{:T(128)} get-tuple-element(%state), index=0
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%index, %one)
  %value = f32[4,4]{1,0:T(8,128)} get-tuple-element(%state), index=1
  %sum = f32[4,4]{1,0:T(8,128)} add(%value, %value), backend_config={"window_config":{"estimated_cycles":"30"}}
  ROOT %result = (s32[], f32[4,4]) tuple(%next, %sum)
}

%condition (state.1: (s32[], f32[4,4])) -> pred[] {
  %turns = s32[]{:T(128)} constant(8)
  %state.1 = (s32[]{:T(128)}, f32[4,4]{1,0:T(8,128)}) parameter(0)
  %index.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  ROOT %less = pred[]{:T(512)} compare(%index.1, %turns), direction=LT
}

ENTRY %main (x: f32[4,4]) -> f32[4,4] {
  %x = f32[4,4]{1,0:T(8,128)} parameter(0)
  %double = f32[4,4]{1,0:T(8,128)} add(%x, %x), backend_config={"window_config":{"estimated_cycles":"1000"}}
  %mixed = f32[4,4]{1,0:T(8,128)} custom-call(%double), custom_call_target="tpu_custom_call"
  %zero = s32[]{:T(128)} constant(0)
  %start = (s32[]{:T(128)}, f32[4,4]{1,0:T(8,128)}) tuple(%zero, %mixed)
  %loop = (s32[]{:T(128)}, f32[4,4]{1,0:T(8,128)}) while(%start), condition=%condition, body=%body
  ROOT %out = f32[4,4]{1,0:T(8,128)} get-tuple-element(%loop), index=1
}
"""


def test_a_loop_is_counted_whole():
    cost = program_cost(TEXT)
    assert cost.cycles == 1000 + 8 * 30
    assert cost.kernels == 1
    assert cost.unknown_loops == 0
    turn = 16 + 1  # the sum and the counter
    assert cost.flops == pytest.approx(16 + 8 * turn, abs=1)  # XLA counts -1 for a custom call, and once the condition


def test_a_loop_of_unknown_length_is_counted_once_and_said():
    cost = program_cost(TEXT.replace("direction=LT", "direction=NE"))
    assert (cost.cycles, cost.unknown_loops) == (1030, 1)


def test_it_agrees_with_xla_and_with_the_same_program_unrolled():
    """A product of [32, 32] matrices five times over: in a loop and one after the other."""
    square = jax.ShapeDtypeStruct((32, 32), jnp.float32)

    def turn(_, x):
        return x @ x

    looped = jax.jit(lambda x: jax.lax.fori_loop(0, 5, turn, x)).lower(square).compile()
    whole = jax.jit(lambda x: jax.lax.fori_loop(0, 5, turn, x, unroll=True)).lower(square).compile()
    cost = program_cost(whole.as_text())
    assert cost.flops == whole.cost_analysis()["flops"] == 5 * 2 * 32**3
    assert cost.cycles is None  # a CPU's compiler estimates none
    assert program_cost(looped.as_text()).flops == pytest.approx(cost.flops, rel=1e-3)
    assert looped.cost_analysis()["flops"] < 0.3 * cost.flops  # XLA's own, which counts the loop's body once
