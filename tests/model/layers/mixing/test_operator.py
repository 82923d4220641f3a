"""The mixing operator: every form against float64, segments, padding, causality, extremes, memory and refusals.

Tolerances are relative to the largest entry of each output or gradient: float32 4e-6 (1e-5 at 1,024 positions, where
1,024 terms are summed); bfloat16 inputs 1e-2 for what is returned in bfloat16 (its own rounding is 4e-3).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nautile.common.errors import ConfigError
from nautile.model.layers.mixing.chunked import MixState, Operands, divide, sine_cosine
from nautile.model.layers.mixing.operator import empty_state, mix, mix_step
from tests.model.layers.mixing.cases import NAMES, documents, draw, exact, largest_error, value_and_gradients

ONE_DOCUMENT = np.ones((2, 33), np.int32)
LENGTHS = (1, 32, 33, 1024)


def chunked(operands, segments, state):
    return mix(operands, segments, state, chunk=32)


def small_chunks(operands, segments, state):
    return mix(operands, segments, state, chunk=8)


def stepwise(operands, segments, state):
    """`mix_step` token after token."""
    assert segments is None
    per_token = ("keys", "gates", "q_re", "q_im")

    def step(state, token):
        re, im, state = mix_step(operands._replace(**token), state)
        return state, (re, im)

    tokens = {name: jnp.moveaxis(getattr(operands, name), 1, 0) for name in per_token}
    state, outs = jax.lax.scan(step, MixState(*state), tokens)
    return *(jnp.moveaxis(out, 0, 1) for out in outs), state


def allowed(length: int) -> float:
    return 1e-5 if length > 512 else 4e-6


@pytest.mark.slow
@pytest.mark.parametrize("length", LENGTHS)
def test_chunked_equals_the_reference_over_documents_and_padding(length):
    case, segments = draw(length=length, heads=2, queries=1), documents(2, length)
    error, where = largest_error(value_and_gradients(chunked, case, segments), exact(case, segments))
    assert error < allowed(length), where


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 1024])
def test_chunked_and_one_step_equal_the_reference_over_one_document(length):
    case = draw(length=length, heads=2, queries=1)
    expected = exact(case)
    for form in (chunked, stepwise):
        error, where = largest_error(value_and_gradients(form, case), expected)
        assert error < allowed(length), (form.__name__, where)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "queries", "head_dim", "samples"), [(1, 1, 1, 1), (6, 2, 5, 3), (4, 4, 2, 1)])
def test_every_ratio_of_heads_and_number_of_samples(heads, queries, head_dim, samples):
    case = draw(3, 19, heads, head_dim, samples, queries)
    segments = documents(3, 19)
    error, where = largest_error(value_and_gradients(small_chunks, case, segments), exact(case, segments))
    assert error < 4e-6, where


@pytest.mark.slow
def test_bfloat16_inputs_keep_a_float32_state():
    case, segments = draw(), documents(2, 33)
    half = {**case, "operands": [np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64) for a in case["operands"]]}
    half["cotangents"] = [
        *(np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64) for a in case["cotangents"][:2]),
        *case["cotangents"][2:],
    ]
    expected = exact(half, segments)
    outs, gradients = value_and_gradients(small_chunks, half, segments, operands_dtype=jnp.bfloat16)
    assert largest_error((outs, gradients), expected)[0] < 1e-2
    # The final state, and the gradient of the initial state, are float32.
    for ours, theirs in zip([*outs[2:], *gradients[8:]], [*expected[0][2:], *expected[1][8:]], strict=True):
        assert np.abs(ours - theirs).max() / np.abs(theirs).max() < 2e-6


def test_dtypes_of_the_outputs():
    case = draw(length=5, queries=4)
    operands = Operands(*(jnp.asarray(array, jnp.bfloat16) for array in case["operands"]))
    for form in ("chunked", "reference"):
        re, im, state = jax.eval_shape(functools.partial(mix, form=form), operands)
        assert re.dtype == im.dtype == jnp.bfloat16
        assert {part.dtype for part in state} == {jnp.dtype(jnp.float32)}


@pytest.mark.slow
@pytest.mark.parametrize("decay", [0.0, 0.01, 3.0, 200.0])
def test_scores_of_plus_and_minus_sixty_at_any_decay(decay):
    """Gates from 9e-27 to 60 in a row, and sums of tiny gates alone. 1/Z² would be infinite in float32."""
    case = draw()
    scores = np.random.default_rng(3).choice([-60.0, 0.0, 60.0], case["operands"][1].shape)
    scores[:, :, 1] = -60
    scores[:, :20, 2], scores[:, 20:, 2] = -60, 60
    scores[:, :20, 3], scores[:, 20:, 3] = 60, -60
    case["operands"][1] = np.logaddexp(0, scores)
    case["operands"][2] = np.full(4, decay)
    case["state"] = MixState(*(np.zeros_like(part) for part in case["state"]))
    outs, gradients = (list(part) for part in exact(case))
    _by_score(gradients, scores)
    for form in (small_chunks, stepwise):
        segments = None if form is stepwise else ONE_DOCUMENT
        result = value_and_gradients(form, case, segments)
        _by_score(result[1], scores)
        error, where = largest_error(result, (outs, gradients))
        assert error < 1e-5, (form.__name__, where)
        # Each head on its own scale: errors of a head of -60s must not hide behind a head of 60s.
        for ours, theirs in zip([*result[0][:2], result[1][0]], [*outs[:2], gradients[0]], strict=True):
            for head in range(4):
                assert np.abs(ours[:, :, head] - theirs[:, :, head]).max() <= 1e-5 * np.abs(theirs[:, :, head]).max()


def _by_score(gradients: list, scores: np.ndarray) -> None:
    """The gradient by the score instead of its gate, whose derivative at -60 is 9e-27."""
    gradients[1] = gradients[1] / (1 + np.exp(-scores))


@pytest.mark.slow
def test_the_scale_of_the_gates_does_not_matter():
    case = draw()
    case["state"] = MixState(*(np.zeros_like(part) for part in case["state"]))
    whole = value_and_gradients(small_chunks, case, ONE_DOCUMENT)[0]
    for scale in (2.0**-90, 2.0**60):
        scaled = {**case, "operands": [a * scale if i == 1 else a for i, a in enumerate(case["operands"])]}
        for ours, theirs in zip(value_and_gradients(small_chunks, scaled, ONE_DOCUMENT)[0][:2], whole[:2], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_without_a_token_so_far_the_readout_is_zero():
    case = draw()
    case["state"] = MixState(*(np.zeros_like(part) for part in case["state"]))
    case["operands"][1][:, :3] = 0
    for form in (small_chunks, stepwise):
        segments = None if form is stepwise else ONE_DOCUMENT
        outs, gradients = value_and_gradients(form, case, segments)
        assert not np.any(outs[0][:, :3])
        assert not np.any(outs[1][:, :3])
        assert np.all(outs[0][:, 3:])
        assert all(np.isfinite(array).all() for array in gradients)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 2), min_size=33, max_size=33))
def test_any_segments_as_the_recurrence_says(row):
    """Against the definition, a token at a time: a new document resets the sums, padding is skipped."""
    case = draw()
    outs = value_and_gradients(small_chunks, case, np.asarray([row, row[::-1]], np.int32))[0]
    re, im, state = by_definition(case["operands"], case["state"], np.asarray([row, row[::-1]]))
    for ours, theirs in zip(outs, (re, im, *state), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=5e-6, atol=5e-6)


def by_definition(operands, state, segments):
    """Equations of the module's docstring in numpy, complex, one token after another."""
    keys, gates, decay, scale, grid, weights, q_re, q_im = operands
    share = keys.shape[2] // q_re.shape[2]
    queries = np.repeat(q_re + 1j * q_im, share, axis=2)
    outs, lasts = np.zeros(keys.shape, complex), []
    for b, row in enumerate(segments):
        sums, total, last = state.re_BKHM[b] + 1j * state.im_BKHM[b], state.z_BK[b], None
        for t, segment in enumerate(row):
            if segment == 0:
                continue
            kept = np.exp(-decay) * (last in (None, segment))
            scaled = scale[:, None] * keys[b, t]
            phase = (scaled / (1 + np.abs(scaled)))[..., None] * grid
            value = (gates[b, t, :, None] * keys[b, t])[..., None] * np.exp(1j * phase)
            sums, total, last = kept[:, None, None] * sums + value, kept * total + gates[b, t], segment
            match = weights * sums / total[:, None, None] * queries[b, t].conj()
            outs[b, t] = match.sum(axis=-1) / np.sqrt(keys.shape[-1])
        lasts.append((sums.real, sums.imag, total))
    return outs.real, outs.imag, [np.stack(part) for part in zip(*lasts, strict=True)]


@pytest.mark.slow
def test_memory_is_linear_in_length_and_small():
    """Temporaries of the gradient pass: no array of B·L·K·H·M (1 MiB at 1,024 positions); 4 times L costs 4 times."""

    def temporaries(length):
        shapes = (jax.ShapeDtypeStruct(array.shape, jnp.float32) for array in draw(1, length, 4, 32, 2, 4)["operands"])

        def pull(operands, cotangents):
            outs, back = jax.vjp(lambda operands: mix(operands)[:2], operands)
            return outs, back(cotangents)

        outs = (jax.ShapeDtypeStruct((1, length, 4, 32), jnp.float32),) * 2
        return jax.jit(pull).lower(Operands(*shapes), outs).compile().memory_analysis().temp_size_in_bytes

    short, long = temporaries(1024), temporaries(4096)
    assert short < 2**20
    assert long < 4.2 * short


def test_sine_and_cosine():
    turns = np.concatenate([np.linspace(-60, 60, 200_001), np.geomspace(1e-12, 1, 1000)]).astype(np.float32)
    optimised = {"xla_backend_optimization_level": 3, "xla_cpu_use_fusion_emitters": True}  # as in use, not as in tests
    sine, cosine = jax.jit(sine_cosine, compiler_options=optimised)(turns)
    angle = 2 * np.pi * turns.astype(np.float64)
    assert np.abs(sine - np.sin(angle)).max() < 4e-7
    assert np.abs(cosine - np.cos(angle)).max() < 4e-7
    np.testing.assert_allclose(sine[-1000:-700], np.sin(angle[-1000:-700]), rtol=3e-7)


def test_division_by_tiny_and_zero_sums():
    tiny, slope = np.float32(1e-26), jax.jit(jax.value_and_grad(divide, argnums=(0, 1)))
    value, gradients = slope(3 * tiny, tiny)
    np.testing.assert_allclose([value, *gradients], [3, 1e26, -3e26], rtol=1e-6)
    value, gradients = slope(np.float32(0), np.float32(0))
    assert (value, gradients[0]) == (0, 0)


def reshaped(case, **changes):
    arrays = zip(NAMES, case["operands"], strict=False)
    return Operands(*(jnp.zeros(changes.get(name, array.shape)) for name, array in arrays))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keys": (2, 33, 4)}, r"keys \(2, 33, 4\) must be"),
        ({"keys": (2, 0, 4, 3)}, r"keys \(2, 0, 4, 3\) must be"),
        ({"gates": (2, 32, 4)}, r"gates \(2, 32, 4\) must be \(2, 33, 4\)"),
        ({"decay": (3,)}, r"decay \(3,\) must be \(4,\)"),
        ({"phase_scale": (4, 1)}, r"phase_scale \(4, 1\) must be \(4,\)"),
        ({"grid": (4, 5, 2)}, r"grid \(4, 5, 2\) must be \[4, 3, M\]"),
        ({"weights": (4, 3, 3)}, r"weights \(4, 3, 3\) must be \(4, 3, 2\)"),
        ({"q_re": (2, 33, 3, 3, 2)}, r"the 4 memory heads a multiple of the query heads"),
        ({"q_im": (2, 33, 4, 3, 2)}, r"q_im \(2, 33, 4, 3, 2\) must be \(2, 33, 2, 3, 2\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_with_the_numbers(changes, message):
    with pytest.raises(ConfigError, match=message):
        mix(reshaped(draw(), **changes))


def test_other_arguments_that_do_not_fit():
    operands = reshaped(draw())
    with pytest.raises(ConfigError, match=r"segments \(2, 5\) must be \[batch, length\] = \(2, 33\)"):
        mix(operands, jnp.ones((2, 5), jnp.int32))
    with pytest.raises(ConfigError, match=r"state .*\(2, 4, 3, 9\).* must be .*\(2, 4, 3, 2\)"):
        mix(operands, state=empty_state(2, 4, 3, 9))
    with pytest.raises(ConfigError, match="chunk must be at least 1, not 0"):
        mix(operands, chunk=0)
    with pytest.raises(ConfigError, match="form 'quick' is not one of"):
        mix(operands, form="quick")
