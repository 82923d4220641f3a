"""The graphs against the model in JAX: prompts of every kind of length, ragged rows, single tokens, both decays."""

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import pytest

from nautile.model.exports.onnx.graph import Quantised, WeightFile, quantise
from nautile.model.exports.onnx.graphs import BLOCKS, FINE_BLOCK, prompt_graph, step_graph, write_weights
from nautile.model.exports.onnx.signature import state_shapes
from nautile.model.loss import masked_logits
from nautile.model.nautile import forward, initialise
from tests.model.conftest import tiny_config
from tests.model.exports.onnx.conftest import MODEL

FLOAT_ACTIVATIONS = 1
BLOCK = BLOCKS[4]
LENGTH = 200


def reference(params, config, tokens):
    """Our logits at every position."""
    shape = tokens.shape
    positions = np.broadcast_to(np.arange(shape[1]), shape)
    hidden = forward(params, config, jnp.asarray(tokens), jnp.ones(shape, jnp.int32), jnp.asarray(positions))
    return np.asarray(masked_logits(hidden, params["embedding"], config.vocabulary))[..., : config.vocabulary]


def graphs(folder, params, config, bits):
    """Sessions of the two graphs."""
    with WeightFile(folder / "weights.bin", bits) as weights:
        write_weights(weights, params, config)
    sessions = []
    for name, graph in (("prompt", prompt_graph), ("step", step_graph)):
        onnx.save(graph(weights, config, FLOAT_ACTIVATIONS), folder / f"{name}.onnx")
        sessions.append(onnxruntime.InferenceSession(folder / f"{name}.onnx"))
    return sessions


def run(session, **inputs):
    """Outputs by name; keys and values with room for the whole context."""
    names = [output.name for output in session.get_outputs()]
    state = dict(zip(names, session.run(names, inputs), strict=True))
    logits = state.pop("logits")
    for name in state:
        if name.startswith(("keys", "values")):
            room = MODEL.context - state[name].shape[2]
            state[name] = np.pad(state[name], ((0, 0), (0, 0), (0, room), (0, 0)))
    return logits, state


def times_last_tap(params, power):
    """With each column of the input projections times a power of its last tap, as the graphs have it with 1."""
    scas = {name: layer for name, layer in params["blocks"].items() if "conv" in layer}
    turned = {name: {**own, "in_proj": own["in_proj"] * own["conv"][:, -1:] ** power} for name, own in scas.items()}
    return {**params, "blocks": {**params["blocks"], **turned}}


def dequantise(matrix: Quantised, inputs: int) -> np.ndarray:
    """The float32 matrix [N, inputs] that a quantised matrix stands for."""
    levels_NbC, scales_Nb, zero_points = matrix
    rows, blocks = scales_Nb.shape
    zero_Nb1 = np.full((rows, blocks, 1), 128.0, np.float32)
    if zero_points is not None:
        levels_NbC = _unpack(levels_NbC)
        zero_Nb1 = _unpack(zero_points)[:, :blocks, None].astype(np.float32)
    weights_NbC = (levels_NbC.astype(np.float32) - zero_Nb1) * scales_Nb[..., None]
    return weights_NbC.reshape(rows, -1)[:, :inputs]


def _unpack(packed: np.ndarray) -> np.ndarray:
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(2).integers(0, MODEL.vocabulary, (2, LENGTH))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"decay": "window"},
        {"spectral_samples": 1, "query_heads": 4, "qk_norm": False},
        {"pattern": "S", "blocks": 1, "grid": "free", "integration": "free"},
        {"pattern": "ASA", "blocks": 1, "integration": "free"},
    ],
    ids=["relative", "window", "one spectral sample, no qk norm", "no attention", "two attention layers a block"],
)
def test_prompts_and_steps_are_ours(tmp_path, weights, tokens, changes):
    config = MODEL.model_copy(update=changes)
    if changes and "decay" not in changes:
        config = tiny_config(vocabulary=MODEL.vocabulary, width=64, context=256, **changes)
        weights = jax.tree.map(lambda leaf: leaf + 0.05, initialise(config, 3))
    sca = weights["blocks"]["sca_0"]
    without_tap = {**sca, "conv": sca["conv"].at[:, -1, :3].set(0)}  # by which the graphs divide the others
    weights = {**weights, "blocks": {**weights["blocks"], "sca_0": without_tap}}
    expected = reference(weights, config, tokens)
    prompt, step = graphs(tmp_path, weights, config, 32)
    every = np.broadcast_to(np.arange(LENGTH), tokens.shape).copy()
    logits, _ = run(prompt, tokens=tokens, lengths=np.array([LENGTH, LENGTH]), logit_columns=every)
    np.testing.assert_allclose(logits, expected, atol=1e-3)
    for length in (1, 2, 3, 31, 32, 33, 64, 127):
        logits, _ = run(
            prompt,
            tokens=tokens[:, :length],
            lengths=np.array([length] * 2),
            logit_columns=every[:, length - 1 :][:, :1],
        )
        np.testing.assert_allclose(logits[:, 0], expected[:, length - 1], atol=1e-3)
    # Rows of different lengths, continued token by token.
    lengths, rows = np.array([40, 1]), np.arange(2)
    padded = np.where(np.arange(40) < lengths[:, None], tokens[:, :40], 7)
    logits, state = run(prompt, tokens=padded, lengths=lengths, logit_columns=lengths[:, None] - 1)
    assert set(state) == set(state_shapes(config))
    np.testing.assert_allclose(logits[:, 0], expected[rows, lengths - 1], atol=1e-3)
    for count in range(70):
        positions = lengths + count
        past = {f"past.{name}": value for name, value in state.items()}
        logits, state = run(step, tokens=tokens[rows, positions][:, None], positions=positions, **past)
        np.testing.assert_allclose(logits[:, 0], expected[rows, positions], atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantised_graph_computes_with_the_dequantised_weights(tmp_path, weights, tokens, bits):
    """Products in float32: then the only difference from our model is that of its weights."""

    def rounded(path, leaf):
        name = path[-1].key
        if name == "embedding":
            return dequantise(quantise(np.asarray(leaf), 8, BLOCKS[8]), leaf.shape[1])
        matrices = {"in_proj", "gate_proj", "readout", "out_proj", "q_proj", "k_proj", "v_proj", "ff_in", "ff_out"}
        if name not in matrices:
            return leaf
        flat = np.asarray(leaf).swapaxes(-1, -2).reshape(-1, leaf.shape[-2])
        kept = 8 if name == "readout" else bits
        block = FINE_BLOCK if (name, bits) == ("in_proj", 4) else BLOCKS[kept]
        wide = dequantise(quantise(flat, kept, block), leaf.shape[-2])
        return wide.reshape(*leaf.shape[:-2], leaf.shape[-1], leaf.shape[-2]).swapaxes(-1, -2)

    rounded_weights = jax.tree_util.tree_map_with_path(rounded, times_last_tap(weights, 1))
    expected = reference(times_last_tap(rounded_weights, -1), MODEL, tokens[:, :40])
    prompt, step = graphs(tmp_path, weights, MODEL, bits)
    lengths = np.array([39, 39])
    logits, state = run(prompt, tokens=tokens[:, :39], lengths=lengths, logit_columns=lengths[:, None] - 1)
    np.testing.assert_allclose(logits[:, 0], expected[:, 38], atol=2e-3)
    past = {f"past.{name}": value for name, value in state.items()}
    logits, _ = run(step, tokens=tokens[:, 39:40], positions=lengths, **past)
    np.testing.assert_allclose(logits[:, 0], expected[:, 39], atol=2e-3)


@pytest.mark.parametrize(("bits", "allowed"), [(8, 0.5 / 127), (4, 2.4 / 15)])
def test_no_weight_moves_far(bits, allowed):
    """At 8 bits by half a level; at 4 bits by 1.2 levels of a range that is at most twice the largest weight."""
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(6, 2 * BLOCK + 7)).astype(np.float32)
    matrix[1], matrix[2] = 0, np.abs(matrix[2])
    quantised = quantise(matrix, bits, BLOCK)
    assert quantised.levels.shape == (6, 3, BLOCK * bits // 8)
    wide = dequantise(quantised, matrix.shape[1])
    np.testing.assert_array_equal(wide[1], 0)
    blocks = np.pad(matrix, ((0, 0), (0, -matrix.shape[1] % BLOCK))).reshape(6, 3, BLOCK)
    largest = np.repeat(np.abs(blocks).max(-1), BLOCK, axis=1)[:, : matrix.shape[1]]
    assert np.all(np.abs(wide - matrix) <= allowed * largest + 1e-7)


def test_four_bits_fit_each_block_better_than_its_whole_range():
    """The plain form: 16 levels from the least weight to the largest."""
    matrix = np.random.default_rng(0).normal(size=(64, 4 * BLOCK)).astype(np.float32)
    blocks = matrix.reshape(64, 4, BLOCK)
    least, step = blocks.min(-1, keepdims=True), np.ptp(blocks, axis=-1, keepdims=True) / 15
    zero_point = np.rint(-least / step)
    plain = (np.clip(np.rint(blocks / step) + zero_point, 0, 15) - zero_point) * step
    plain_error = ((plain - blocks) ** 2).sum(-1)
    error = ((dequantise(quantise(matrix, 4, BLOCK), 4 * BLOCK).reshape(64, 4, BLOCK) - blocks) ** 2).sum(-1)
    assert np.all(error <= plain_error * (1 + 1e-6))
    assert error.sum() < 0.95 * plain_error.sum()
