"""The stack: its size, its initial values, and isolation of documents, padding and later tokens."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nautile.common.errors import ConfigError
from nautile.configs.model import ModelConfig
from nautile.model.capacity.flops import parameter_counts
from nautile.model.loss import weighted_loss
from nautile.model.nautile import continue_from, forward, initialise, run_prefixes, shapes
from tests.model.conftest import packed_rows, tiny_config

# Golden losses of three steps of gradient descent; they change only with the model's arithmetic or its start.
GOLDEN = [5.01264, 5.01146, 4.95049]  # the logarithm of the vocabulary of 150 is 5.01064


@pytest.fixture(scope="module")
def batch(config):
    return packed_rows(config.vocabulary, [[9, 7], [5, 1, 6]], 20)


@partial(jax.jit, static_argnames="config")
def hidden(params, config, batch):
    return forward(params, config, batch["tokens"], batch["segments"], batch["positions"])


def test_the_published_model_has_exactly_its_parameters():
    counts = parameter_counts(ModelConfig(vocabulary=100_300))
    assert sum(counts.values()) == 371_901_088
    assert counts["embedding"] == 100_300 * 1024
    assert counts["sca.in_proj"] == 16 * 1024 * 5136
    assert counts["sca.conv"] == 16 * 5136 * 4
    assert counts["sca.readout"] == 16 * 16 * 128 * 384
    assert counts["attention.ff_in"] == 8 * 1024 * 5460


PAPERS = {"grid": "free", "integration": "free"}


@pytest.mark.parametrize("pattern", ["S", "A", "SSA", "SSSA", "AS", "ASSA"])
def test_counts_are_of_the_parameters_that_exist(pattern):
    config = tiny_config(pattern=pattern, **PAPERS)
    parameters = shapes(config)
    leaves = jax.tree.leaves(parameters)
    counts: Counter[str] = Counter(embedding=config.vocabulary * config.width)
    for layer, own in parameters["blocks"].items():
        for name, leaf in own.items():
            counts[f"{layer.split('_')[0]}.{name}"] += int(np.prod(leaf.shape))
    assert parameter_counts(config) == counts
    assert all(leaf.dtype == jnp.float32 for leaf in leaves)


def test_free_spectra_move_no_count_of_the_published_model():
    model = ModelConfig(vocabulary=100_300)
    assert sum(parameter_counts(model.model_copy(update=PAPERS)).values()) == 371_901_088
    shared = model.model_copy(update={"query_heads": 4, **PAPERS})  # ω is by query head, θ by memory head
    assert parameter_counts(shared)["sca.integration"] == 16 * 4 * 64 * 2
    assert parameter_counts(shared)["sca.theta"] == 16 * 16 * 64 * 2


def test_layers_have_names_by_kind_and_number():
    """A block's only Transformer layer has no number, so that checkpoints of the paper's pattern keep their names."""
    assert tiny_config(pattern="SSA").layers == (("S", "sca_0"), ("S", "sca_1"), ("A", "attention"))
    several = tiny_config(pattern="ASA")
    assert several.layers == (("A", "attention_0"), ("S", "sca_0"), ("A", "attention_1"))
    assert set(shapes(several)["blocks"]) == {"attention_0", "sca_0", "attention_1"}


def test_initialisation_is_a_function_of_the_seed(config):
    start = jax.jit(initialise, static_argnums=0)
    first, again, other = (start(config, seed) for seed in (3, 3, 4))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert not np.array_equal(first["embedding"], other["embedding"])
    in_proj = np.asarray(first["blocks"]["sca_0"]["in_proj"])
    assert not np.array_equal(in_proj[0], in_proj[1])
    assert np.all(np.asarray(first["embedding"])[config.vocabulary :] == 0)


@pytest.mark.slow
def test_the_loss_starts_near_the_logarithm_of_the_vocabulary():
    """Of a wide and deep model; that of a small one is the first of the golden losses."""
    config = tiny_config(width=128, blocks=8, vocabulary=500, feed_forward=256)
    batch = packed_rows(500, [[64]] * 4, 64)
    sums = jax.jit(lambda: weighted_loss(initialise(config, 0), config, batch))()
    assert abs(float(sums.loss / sums.weight) - np.log(500)) < 0.15


@pytest.fixture(scope="module")
def influence(config, params, batch):
    """How strongly each column's embedding acts on the hidden states of a row's columns, by gradients."""

    def read(added, mask):
        hidden_BLD = from_vectors(params, config, batch, added)
        return jnp.sum(jnp.sin(hidden_BLD) * mask[..., None])

    slope = jax.jit(jax.grad(read))
    zero = jnp.zeros((*batch["tokens"].shape, config.width))

    def measure(row, columns):
        mask = np.zeros(batch["tokens"].shape, np.float32)
        mask[row, columns] = 1
        return np.asarray(jnp.abs(slope(zero, mask)).sum(-1))

    return measure


@pytest.mark.slow
def test_causality_by_gradients(influence):
    """No later column acts on column 6; every one up to it does; no other row does."""
    reach = influence(0, 6)
    assert np.all(reach[0, 7:] == 0)
    assert np.all(reach[0, :7] > 0)
    assert np.all(reach[1] == 0)


@pytest.mark.slow
@pytest.mark.parametrize(("row", "first", "last"), [(0, 9, 16), (1, 5, 6), (1, 6, 12)])
def test_segments_are_isolated_by_gradients(influence, row, first, last):
    """A document does not see the one before it: not through SCA, the convolution, or attention."""
    reach = influence(row, slice(first, last))[row]
    assert np.all(reach[:first] == 0)
    assert np.all(reach[first:last] > 0)
    assert np.all(reach[last:] == 0)


@pytest.mark.slow
def test_padding_acts_on_nothing_and_nothing_acts_on_it(influence):
    reach = influence(1, slice(12, 20))
    assert np.all(reach[1, :12] == 0)


@pytest.mark.slow
def test_a_packed_document_reads_as_it_does_alone(config, params, batch):
    packed = hidden(params, config, batch)[1, 6:12]
    alone = {name: jnp.zeros_like(array).at[1, :6].set(array[1, 6:12]) for name, array in batch.items()}
    np.testing.assert_allclose(packed, hidden(params, config, alone)[1, :6], atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["S", "ASA"])
def test_rows_that_continue_a_beginning_read_as_whole_rows(pattern, monkeypatch):
    """Two rows from the first of two prefixes and one from the second; queries in blocks."""
    config = tiny_config(pattern=pattern, blocks=1, **PAPERS)
    params = moved(config)
    monkeypatch.setattr("nautile.model.layers.attention.QUERY_BLOCK", 8)
    lengths, source, width = np.array([5, 3], np.int32), np.array([0, 1, 0], np.int32), 13
    texts = np.random.default_rng(1).integers(0, config.vocabulary, (3, 5 + width)).astype(np.int32)
    texts[2, :5] = texts[0, :5]
    early = np.zeros((2, 5), np.int32)
    early[0], early[1, 2:] = texts[0, :5], texts[1, :3]
    tokens = np.stack([text[lengths[number] :][:width] for text, number in zip(texts, source, strict=True)])

    @jax.jit
    def apart(params):
        prefixes = run_prefixes(params, config, early, lengths)
        return continue_from(params, config, prefixes, jnp.asarray(lengths), source, tokens, jnp.ones_like(tokens))

    positions = jnp.broadcast_to(jnp.arange(texts.shape[1]), texts.shape)
    whole = jax.jit(lambda params: forward(params, config, texts, jnp.ones_like(texts), positions))(params)
    for row, number in enumerate(source):
        last = lengths[number] - 1
        np.testing.assert_allclose(apart(params)[row], whole[row, last : last + width + 1], atol=2e-5)


@pytest.mark.slow
def test_gradients_are_those_of_the_naive_form(batch):
    """Of every parameter, with free θ and ω."""
    config = tiny_config(pattern="ASA", blocks=1, **PAPERS)

    def gradient(params, **changes):
        changed = config.model_copy(update=changes)
        return jax.jit(jax.value_and_grad(lambda params: weighted_loss(params, changed, batch).loss))(params)

    params = moved(config)
    (loss, ours), (naive_loss, naive) = gradient(params), gradient(params, mixing="reference", remat="none")
    assert float(loss) == pytest.approx(float(naive_loss), rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4, rtol=1e-3), ours, naive)
    assert all(np.abs(ours["blocks"]["sca_0"][name]).max() > 0 for name in ("theta", "integration"))


@pytest.mark.slow
def test_rematerialisation_changes_no_gradient(batch):
    """On Transformer layers alone, which compile fast; the golden steps use rematerialised SCA layers."""
    config = tiny_config(pattern="A")
    params = initialise(config, 0)

    def gradient(remat):
        changed = config.model_copy(update={"remat": remat})
        return jax.jit(jax.grad(lambda params: weighted_loss(params, changed, batch).loss))(params)

    kept, *recomputed = (gradient(remat) for remat in ("none", "block", "layer", "dots"))
    for other in recomputed:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4, rtol=1e-4), kept, other)


@pytest.mark.slow
def test_bfloat16_stays_near_float32(config, params, batch):
    half = hidden(params, config.model_copy(update={"compute_dtype": "bfloat16"}), batch)
    assert half.dtype == jnp.bfloat16
    full = hidden(params, config, batch)
    real = np.asarray(batch["segments"]) > 0
    error = np.asarray(half.astype(jnp.float32) - full)[real]
    # 8 bits of mantissa through 6 residual branches whose scales were all moved at random.
    assert np.sqrt(np.mean(error**2)) < 0.1 * float(jnp.std(full))


def test_rows_of_different_shapes_are_refused(config, params, batch):
    with pytest.raises(ConfigError, match=r"tokens \(2, 20\), segments \(2, 19\)"):
        forward(params, config, batch["tokens"], batch["segments"][:, :-1], batch["positions"])


@pytest.mark.slow
def test_golden_train_steps():
    """Three steps of plain gradient descent from a seed give the recorded losses."""
    config = tiny_config(pattern="SSA")
    batch = packed_rows(config.vocabulary, [[20, 12], [32]], 32, seed=5)

    @jax.jit
    def step(params):
        def loss(params):
            sums = weighted_loss(params, config, batch)
            return sums.loss / sums.weight

        value, slopes = jax.value_and_grad(loss)(params)
        return value, jax.tree.map(lambda leaf, slope: leaf - 0.3 * slope, params, slopes)

    params, losses = initialise(config, 7), []
    for _ in range(3):
        value, params = step(params)
        losses.append(float(value))
    np.testing.assert_allclose(losses, GOLDEN, atol=2e-3)


def moved(config):
    """Weights away from their initial values, as those of the fixture `params`."""
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda leaf: leaf + 0.1 * rng.normal(size=leaf.shape).astype(np.float32), initialise(config, 0))


def from_vectors(params, config, batch, added):
    """`forward` with something added to the embedded tokens, so that gradients show which column reads which."""
    table = (params["embedding"][batch["tokens"]] + added).reshape(-1, config.width)
    indices = jnp.arange(table.shape[0]).reshape(batch["tokens"].shape)
    return forward({**params, "embedding": table}, config, indices, batch["segments"], batch["positions"])
