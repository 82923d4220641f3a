"""The mixing operator: every form against float64, segments, padding, causality, extremes, memory and refusals.

Tolerances are relative to the largest entry of each output or gradient: float32 2e-6 (1e-5 at 1,024 positions, where
1,024 terms are summed); bfloat16 inputs 1e-2 for what is returned in bfloat16 (its own rounding is 4e-3).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.section import ConfigError
from model.mixing import MixState, empty_state, mix, mix_step
from model.mixing_parts import divide, sine_cosine
from tests.model.mixing_cases import documents, draw, exact, farthest, value_and_gradients

LENGTHS = (1, 2, 31, 32, 33, 257, 1024)


def chunked(*arguments):
    return mix(*arguments, chunk=32)


def small_chunks(*arguments):
    return mix(*arguments, chunk=8)


def stepwise(*arguments):
    """`mix_step` token after token."""
    *operands, segments, state = arguments
    assert segments is None
    keys, gates, *parameters, q_re, q_im = operands

    def step(state, token):
        keys, gates, q_re, q_im = token
        re, im, state = mix_step(keys, gates, *parameters, q_re, q_im, state)
        return state, (re, im)

    tokens = tuple(jnp.moveaxis(array, 1, 0) for array in (keys, gates, q_re, q_im))
    state, outs = jax.lax.scan(step, MixState(*state), tokens)
    return *(jnp.moveaxis(out, 0, 1) for out in outs), state


def allowed(length: int) -> float:
    return 1e-5 if length > 512 else 2e-6


@pytest.mark.parametrize("length", LENGTHS)
def test_chunked_equals_the_reference_over_documents_and_padding(length):
    case, segments = draw(length=length, heads=2, queries=1), documents(2, length)
    error, where = farthest(value_and_gradients(chunked, case, segments), exact(case, segments))
    assert error < allowed(length), where


@pytest.mark.parametrize("length", [1, 33, 1024])
def test_chunked_and_one_step_equal_the_reference_over_one_document(length):
    case = draw(length=length, heads=2, queries=2)
    wanted = exact(case)
    for form in (chunked, stepwise):
        error, where = farthest(value_and_gradients(form, case), wanted)
        assert error < allowed(length), (form.__name__, where)


@pytest.mark.parametrize(("heads", "queries", "head_dim", "samples"), [(1, 1, 1, 1), (6, 2, 5, 3), (4, 4, 2, 1)])
def test_every_ratio_of_heads_and_number_of_samples(heads, queries, head_dim, samples):
    case = draw(3, 19, heads, head_dim, samples, queries)
    segments = documents(3, 19)
    error, where = farthest(value_and_gradients(small_chunks, case, segments), exact(case, segments))
    assert error < 2e-6, where


def test_bfloat16_inputs_keep_a_float32_state():
    case, segments = draw(length=65, queries=4), documents(2, 65)
    half = {**case, "operands": [np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64) for a in case["operands"]]}
    half["cotangents"] = [
        *(np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64) for a in case["cotangents"][:2]),
        *case["cotangents"][2:],
    ]
    wanted = exact(half, segments)
    outs, gradients = value_and_gradients(small_chunks, half, segments, operands_dtype=jnp.bfloat16)
    assert farthest((outs, gradients), wanted)[0] < 1e-2
    # What stays float32: the state that comes out, and the gradient of the one that went in.
    for ours, theirs in zip([*outs[2:], *gradients[8:]], [*wanted[0][2:], *wanted[1][8:]], strict=True):
        assert np.abs(ours - theirs).max() / np.abs(theirs).max() < 2e-6


def test_dtypes_of_what_comes_out():
    case = draw(length=5, queries=4)
    operands = [jnp.asarray(array, jnp.bfloat16) for array in case["operands"]]
    for form in ("chunked", "reference"):
        re, im, state = jax.eval_shape(lambda *operands, form=form: mix(*operands, form=form), *operands)
        assert re.dtype == im.dtype == jnp.bfloat16
        assert {part.dtype for part in state} == {jnp.dtype(jnp.float32)}


@functools.cache
def of_scores(form):
    def run(keys, scores, *rest):
        return form(keys, jax.nn.softplus(scores), *rest)

    return run


def reference(*arguments):
    return mix(*arguments, form="reference")


@pytest.mark.parametrize("decay", [0.0, 0.01, 3.0, 200.0])
def test_scores_of_sixty_and_any_decay(decay):
    """Gates from 9e-27 to 60 in one row; sums whose every gate is tiny, too. 1/Z² would be infinite in float32."""
    case = draw(length=48, heads=4, queries=4)
    rng = np.random.default_rng(3)
    scores = rng.choice([-60.0, 0.0, 60.0], case["operands"][1].shape)
    scores[:, :, 1] = -60
    scores[:, :20, 2], scores[:, 20:, 2] = -60, 60
    scores[:, :20, 3], scores[:, 20:, 3] = 60, -60
    case["operands"][1] = scores
    case["operands"][2] = np.full(4, decay)
    case["state"] = MixState(*(np.zeros_like(part) for part in case["state"]))
    with jax.enable_x64(True):
        wanted = value_and_gradients(of_scores(reference), case, None, np.float64)
    for form in (small_chunks, stepwise):
        error, where = farthest(value_and_gradients(of_scores(form), case), wanted)
        assert error < 1e-5, (form.__name__, where)
    # Each head on its own scale: a head of -60s must not hide behind one of 60s.
    (re, *_), _ = value_and_gradients(of_scores(small_chunks), case)
    for head in range(4):
        assert np.abs(re[:, :, head] - wanted[0][0][:, :, head]).max() < 2e-6 * np.abs(wanted[0][0][:, :, head]).max()


def test_the_scale_of_the_gates_does_not_matter():
    case = draw(length=40)
    keys, gates, *rest = [jnp.asarray(array, jnp.float32) for array in case["operands"]]
    whole = mix(keys, gates, *rest)[:2]
    for scale in (2.0**-90, 2.0**60):
        for ours, theirs in zip(mix(keys, gates * scale, *rest)[:2], whole, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)


def test_nothing_seen_reads_as_nothing():
    keys, _, *rest = [jnp.asarray(array, jnp.float32) for array in draw(length=6)["operands"]]
    gates = jnp.zeros(keys.shape[:3]).at[:, 3:].set(1.0)
    for form in ("chunked", "reference"):
        re, im, _ = mix(keys, gates, *rest, form=form)
        assert not np.any(re[:, :3]) and not np.any(im[:, :3])
        assert np.all(np.isfinite(re)) and np.any(re[:, 3:])


def test_no_output_depends_on_what_comes_later():
    case = draw(1, 40, 2, 3, 2, 2)
    operands = [jnp.asarray(array, jnp.float32) for array in case["operands"]]
    position = 21

    def before(keys, gates, q_re, q_im):
        re, im, _ = small_chunks(keys, gates, *operands[2:6], q_re, q_im)
        return jnp.sum(re[:, : position + 1] ** 2) + jnp.sum(im[:, : position + 1] ** 2)

    for gradient in jax.grad(before, argnums=(0, 1, 2, 3))(*operands[:2], *operands[6:]):
        assert not np.any(gradient[:, position + 1 :])
        assert np.any(gradient[:, position])


def test_documents_do_not_see_each_other():
    case = draw(1, 41, 2, 3, 2, 2)
    operands = [jnp.asarray(array, jnp.float32) for array in case["operands"]]
    segments = jnp.asarray([[1] * 9 + [2] * 15 + [0] * 5 + [2] * 3 + [7] * 9])
    state = MixState(*(jnp.asarray(part, jnp.float32) for part in case["state"]))
    second = np.flatnonzero(np.asarray(segments[0]) == 2)

    def of_second(keys, gates, q_re, q_im, state):
        re, im, _ = small_chunks(keys, gates, *operands[2:6], q_re, q_im, segments, state)
        return jnp.sum(re[:, second] ** 2) + jnp.sum(im[:, second] ** 2)

    *gradients, d_state = jax.grad(of_second, argnums=(0, 1, 2, 3, 4))(*operands[:2], *operands[6:], state)
    outside = np.setdiff1d(np.arange(41), second)
    for gradient in gradients:
        assert not np.any(gradient[:, outside])
        assert np.any(gradient[:, second])
    assert not any(np.any(part) for part in d_state)
    # And the document alone gives the same, its padding left out.
    alone = [array[:, second] if array.ndim > 2 and array.shape[1] == 41 else array for array in operands]
    whole, cut = small_chunks(*operands, segments, state), small_chunks(*alone)
    for ours, theirs in zip(whole[:2], cut[:2], strict=True):
        np.testing.assert_allclose(ours[:, second], theirs, atol=2e-7)


def test_padding_changes_nothing_and_reads_as_zero():
    case = draw(2, 30, 2, 3, 2, 2)
    operands = [jnp.asarray(array, jnp.float32) for array in case["operands"]]
    segments = jnp.asarray([[0] * 4 + [3] * 10 + [0] * 6 + [3] * 8 + [0] * 2, [5] * 17 + [0] * 13])
    padding = np.asarray(segments) == 0
    other = [array.at[padding].add(9.0) if array.shape[:2] == (2, 30) else array for array in operands]
    re, im, state = small_chunks(*operands, segments)
    assert not np.any(re[padding]) and not np.any(im[padding])
    for ours, theirs in zip(jax.tree.leaves(small_chunks(*other, segments)), (re, im, *state), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    kept = [array[1:, :17] if array.shape[:2] == (2, 30) else array for array in operands]
    for ours, theirs in zip(small_chunks(*kept)[2], state, strict=True):
        np.testing.assert_allclose(ours[0], theirs[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cut", [1, 16, 29])
def test_a_row_in_two_parts_is_the_row(cut):
    case = draw(length=37, queries=4)
    operands = [jnp.asarray(array, jnp.float32) for array in case["operands"]]
    segments = jnp.asarray([[1] * 37, [1] * 20 + [0] * 10 + [1] * 7])
    whole = small_chunks(*operands, segments)
    parts = [[a[:, s] if a.shape[:2] == (2, 37) else a for a in operands] for s in (slice(cut), slice(cut, None))]
    re, im, state = small_chunks(*parts[0], segments[:, :cut])
    more_re, more_im, state = small_chunks(*parts[1], segments[:, cut:], state)
    joined = (jnp.concatenate([re, more_re], 1), jnp.concatenate([im, more_im], 1), *state)
    for ours, theirs in zip(joined, jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=2e-6)


_token_by_token = jax.jit(small_chunks)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=21, max_size=21))
def test_any_segments_as_the_recurrence_says(row):
    """Against the definition, a token at a time: a new document starts afresh, padding is passed over."""
    case = draw(1, 21, 1, 1, 1, 1)
    keys, gates, decay, scale, grid, weights, q_re, q_im = case["operands"]
    sums, total, last = complex(*(np.ravel(part)[0] for part in case["state"][:2])), case["state"][2][0, 0], None
    wanted = np.zeros(21, complex)
    for t, segment in enumerate(row):
        if segment == 0:
            continue
        if last is not None and segment != last:
            sums, total = 0, 0
        key = keys[0, t, 0, 0]
        phase = scale[0] * key / (1 + abs(scale[0] * key)) * grid[0, 0, 0]
        sums = np.exp(-decay[0]) * sums + gates[0, t, 0] * key * np.exp(1j * phase)
        total = np.exp(-decay[0]) * total + gates[0, t, 0]
        query = complex(q_re[0, t, 0, 0, 0], q_im[0, t, 0, 0, 0])
        wanted[t], last = weights[0, 0, 0] * sums / total * query.conjugate(), segment
    re, im, state = _token_by_token(
        *(jnp.asarray(array, jnp.float32) for array in case["operands"]),
        jnp.asarray([row]),
        MixState(*(jnp.asarray(part, jnp.float32) for part in case["state"])),
    )
    np.testing.assert_allclose(np.ravel(re) + 1j * np.ravel(im), wanted, atol=2e-6)
    np.testing.assert_allclose(complex(state.re_BKHM.item(), state.im_BKHM.item()), sums, atol=5e-6)
    np.testing.assert_allclose(state.z_BK.item(), total, rtol=2e-6)


def test_memory_is_linear_in_length_and_small():
    """Temporaries of the gradient pass: no array of B·L·K·H·M (1 MiB a 1,024 positions here), and 4 times L costs 4 times."""

    def temporaries(length):
        shapes = [jax.ShapeDtypeStruct(array.shape, jnp.float32) for array in draw(1, length, 4, 32, 2, 4)["operands"]]

        def pull(operands, cotangents):
            outs, back = jax.vjp(lambda *operands: mix(*operands)[:2], *operands)
            return outs, back(cotangents)

        outs = (jax.ShapeDtypeStruct((1, length, 4, 32), jnp.float32),) * 2
        return jax.jit(pull).lower(shapes, outs).compile().memory_analysis().temp_size_in_bytes

    short, long = temporaries(1024), temporaries(4096)
    assert short < 2**20
    assert long < 4.2 * short


def test_sine_and_cosine():
    turns = np.concatenate([np.linspace(-60, 60, 200_001), np.geomspace(1e-12, 1, 1000)]).astype(np.float32)
    sine, cosine = jax.jit(sine_cosine)(turns)
    angle = 2 * np.pi * turns.astype(np.float64)
    assert np.abs(sine - np.sin(angle)).max() < 4e-7
    assert np.abs(cosine - np.cos(angle)).max() < 4e-7
    np.testing.assert_allclose(sine[-1000:-700], np.sin(angle[-1000:-700]), rtol=3e-7)


def test_division_by_what_was_seen():
    tiny = jnp.float32(1e-26)
    value, gradients = jax.value_and_grad(divide, argnums=(0, 1))(3 * tiny, tiny)
    np.testing.assert_allclose([value, *gradients], [3, 1e26, -3e26], rtol=1e-6)
    assert jax.value_and_grad(divide)(jnp.float32(0), jnp.float32(0)) == (0, 0)


def reshaped(case, **changes):
    names = ("keys", "gates", "decay", "phase_scale", "grid", "weights", "q_re", "q_im")
    return [jnp.zeros(changes.get(name, array.shape)) for name, array in zip(names, case["operands"], strict=True)]


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
        mix(*reshaped(draw(), **changes))


def test_other_arguments_that_do_not_fit():
    operands = reshaped(draw())
    with pytest.raises(ConfigError, match=r"segments \(2, 5\) must be \[batch, length\] = \(2, 33\)"):
        mix(*operands, jnp.ones((2, 5), jnp.int32))
    with pytest.raises(ConfigError, match=r"state .*\(2, 4, 3, 9\).* must be .*\(2, 4, 3, 2\)"):
        mix(*operands, state=empty_state(2, 4, 3, 9))
    with pytest.raises(ConfigError, match="chunk must be at least 1, not 0"):
        mix(*operands, chunk=0)
    with pytest.raises(ConfigError, match="form 'quick' is not one of"):
        mix(*operands, form="quick")
