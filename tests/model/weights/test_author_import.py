"""Imported weights against the author's arithmetic, written independently here in numpy and float64."""

import ast
import json
import re
import shlex
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from nautile.common.errors import ConfigError
from nautile.configs.model import TokenizerConfig
from nautile.model.loss import masked_logits
from nautile.model.nautile import forward
from nautile.model.weights.author_import import load_author_weights, tensor_files
from nautile.model.weights.author_shapes import author_shapes
from tests.model.conftest import tiny_config

TOKENIZER = TokenizerConfig(ranks=256)
SHAPE = tiny_config(blocks=2, pattern="SSA", context=16)


@pytest.fixture(scope="module")
def tensors():
    """A checkpoint of the author's in their layout, with the spare rows that their table has."""
    rng = np.random.default_rng(0)
    model = SHAPE.model_copy(update={"vocabulary": TOKENIZER.vocabulary})
    arrays = {name: rng.normal(size=shape).astype(np.float32) * 0.3 for name, shape in author_shapes(model)}
    arrays["embedding.weight"] = rng.normal(size=(TOKENIZER.vocabulary + 9, SHAPE.width)).astype(np.float32)
    return arrays


@pytest.fixture
def archive(tensors, tmp_path):
    np.savez(tmp_path / "theirs.npz", **tensors)
    return tmp_path / "theirs.npz"


@pytest.mark.slow
def test_their_arithmetic_is_reproduced(tensors, archive):
    """Logits equal theirs after the shift of ids, for a row as long as the context, where their weights are clipped."""
    params, model, tokenizer = load_author_weights(archive, SHAPE, TOKENIZER, context=16)
    assert (model.decay, model.vocabulary, tokenizer) == ("window", TOKENIZER.vocabulary, TOKENIZER)
    ids = np.random.default_rng(1).integers(0, TOKENIZER.vocabulary, (1, 16))
    positions = jnp.arange(16)[None]
    hidden_BLD = jax.jit(lambda: forward(params, model, jnp.asarray(ids), jnp.ones_like(positions), positions))()
    logits_BLV = masked_logits(hidden_BLD, params["embedding"], model.vocabulary)[..., : model.vocabulary]
    theirs_LV = their_logits(tensors, model, ids[0] + 1)[:, 1 : model.vocabulary + 1]
    np.testing.assert_allclose(logits_BLV[0], theirs_LV, rtol=1e-4, atol=1e-4 * theirs_LV.std())


def test_safetensors_and_a_prefix_read_the_same(tensors, archive, tmp_path):
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "theirs.safetensors")
    ours, prefixed = (
        load_author_weights(archive, SHAPE, TOKENIZER, context=16),
        load_author_weights(tmp_path / "theirs.safetensors", SHAPE, TOKENIZER, context=16),
    )
    jax.tree.map(np.testing.assert_array_equal, ours[0], prefixed[0])
    assert ours[1:] == prefixed[1:]


def redundant(tensors):
    """What their state dict holds besides the parameters: the output matrix is the embedding, and RoPE's tables."""
    half = SHAPE.attention_head_dim // 2
    angles_LH = np.arange(40)[:, None] / 10000 ** (np.arange(half) / half)
    return {
        "lm_head.weight": tensors["embedding.weight"],
        "cos_emb": np.cos(angles_LH).astype(np.float32),
        "sin_emb": np.sin(angles_LH).astype(np.float32),
    }


def test_a_plain_conversion_of_their_state_dict_is_read(tensors, archive, tmp_path):
    everything = {f"model.{name}": tensor for name, tensor in {**tensors, **redundant(tensors)}.items()}
    save_file({name: tensor.copy() for name, tensor in everything.items()}, tmp_path / "theirs.safetensors")
    plain, converted = (
        load_author_weights(path, SHAPE, TOKENIZER, context=40)[0]
        for path in (archive, tmp_path / "theirs.safetensors")
    )
    jax.tree.map(np.testing.assert_array_equal, plain, converted)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("lm_head.weight", lambda array: array + 1e-3, r"`lm_head.weight` is not equal to `embedding.weight`"),
        ("lm_head.weight", lambda array: array[:-1], r"`lm_head.weight` has shape \(269, 32\), .* is \(270, 32\)"),
        ("cos_emb", lambda array: array**2, r"`cos_emb` is not RoPE's table with base 10000"),
        ("sin_emb", lambda array: array[:, :2], r"`sin_emb` has shape \(40, 2\), and this model's is \(40, 4\)"),
        ("sin_emb", lambda array: np.float32(0), r"`sin_emb` has shape \(\), and this model's is \(0, 4\)"),
    ],
)
def test_a_redundant_tensor_of_another_model_is_refused(tensors, tmp_path, name, change, message):
    others = redundant(tensors)
    np.savez(tmp_path / "theirs.npz", **tensors, **{**others, name: change(others[name])})
    with pytest.raises(ConfigError, match=message):
        load_author_weights(tmp_path / "theirs.npz", SHAPE, TOKENIZER, context=40)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks.1.attn.conv_weight": None}, r"lacks the tensor `blocks.1.attn.conv_weight` of shape \(100, 1, 4\)"),
        ({"blocks.2.ff_in.bias": np.zeros(3, np.float32)}, r"`blocks.2.ff_in.bias` has shape \(3,\), .* is \(80,\)"),
        ({"blocks.9.norm.scale": np.zeros(3, np.float32)}, r"holds the tensor `blocks.9.norm.scale`"),
        ({"embedding.weight": np.zeros((261, 32), np.float32)}, r"`embedding.weight` has shape \(261, 32\)"),
    ],
)
def test_the_first_difference_is_named(tensors, tmp_path, change, message):
    changed = {name: tensor for name, tensor in {**tensors, **change}.items() if tensor is not None}
    np.savez(tmp_path / "theirs.npz", **changed)
    with pytest.raises(ConfigError, match=message):
        load_author_weights(tmp_path / "theirs.npz", SHAPE, TOKENIZER, context=16)


def test_nothing_is_unpickled(tmp_path):
    np.savez(tmp_path / "theirs.npz", **{"embedding.weight": np.array([{"not": "numbers"}], dtype=object)})
    with pytest.raises(ConfigError, match=r"theirs\.npz: cannot be read"):
        load_author_weights(tmp_path / "theirs.npz", SHAPE, TOKENIZER, context=16)


@pytest.mark.parametrize("name", ["theirs.npz", "theirs.safetensors", "absent.npz"])
def test_a_damaged_or_missing_file_is_refused(tmp_path, name):
    if not name.startswith("absent"):
        (tmp_path / name).write_bytes(b"nothing of the kind")
    with pytest.raises(ConfigError, match=name):
        load_author_weights(tmp_path / name, SHAPE, TOKENIZER, context=16)


def test_what_a_layer_remembers_between_steps_is_not_read(tensors, archive, tmp_path):
    """A state dict that was taken after generating holds copies of parameters, of other shapes and maybe stale."""
    others = {"blocks.0.attn._theta_cached": np.ones(3), "blocks.0.attn._score_bias_b": np.ones((1, 1, 4))}
    np.savez(tmp_path / "after.npz", **tensors, **others)
    plain, after = (
        load_author_weights(path, SHAPE, TOKENIZER, context=16)[0] for path in (archive, tmp_path / "after.npz")
    )
    jax.tree.map(np.testing.assert_array_equal, plain, after)


def author_config(**changes):
    """The config.json of the author's own export, for `SHAPE`."""
    return {
        "model_type": "seqcond", "d_model": 32, "d_ff": 40, "num_layers": 6, "vocab_size": 300, "maxlen": 16,
        "num_heads": 4, "num_kv_heads": 2, "qk_norm": True, "qk_norm_eps": 1e-6, "seqcond_heads": 4,
        "num_query_heads": 2, "num_thetas": 2, "conv_kernel_size": 4, "expand_factor": 2.0, "out_expand_factor": 3,
        "seqcond_ratio": 2, "num_anchor_heads": 0, **changes,
    }  # fmt: skip


def test_the_config_beside_the_weights_says_shape_and_context(archive, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(author_config(maxlen=48)))
    other_shape = tiny_config(blocks=1, qk_norm=False)
    read = load_author_weights(tmp_path, other_shape, TOKENIZER)
    assert read[1].context == 48
    assert read[1].decay == "window"
    expected = SHAPE.model_copy(update={"vocabulary": TOKENIZER.vocabulary, "decay": "window", "context": 48})
    assert read[1] == expected
    jax.tree.map(np.testing.assert_array_equal, read[0], load_author_weights(archive, SHAPE, TOKENIZER, context=48)[0])
    assert load_author_weights(archive, SHAPE, TOKENIZER, sca_epsilon=1e-6)[1].sca_norm_epsilon == 1e-6


def test_the_context_is_never_a_default(tensors, archive, tmp_path):
    """With decay = "window" a wrong one gives other logits, and nothing else would show it."""
    with pytest.raises(ConfigError, match=r"set --context \(4096 for the published model\)"):
        load_author_weights(archive, SHAPE, TOKENIZER)
    np.savez(tmp_path / "tables.npz", **tensors, **redundant(tensors))
    assert load_author_weights(tmp_path / "tables.npz", SHAPE, TOKENIZER)[1].context == 40
    with pytest.raises(ConfigError, match=r"is not one number: --context 16, cos_emb 40, sin_emb 40"):
        load_author_weights(tmp_path / "tables.npz", SHAPE, TOKENIZER, context=16)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (author_config(num_layers=7), "`num_layers` 7 is no multiple of `seqcond_ratio` \\+ 1 = 3"),
        (author_config(pattern="SSSA"), "`num_layers` 6 is no multiple of the 4 letters of `pattern`"),
        (author_config(pattern="SSB"), "`pattern`: 'SSB' must be letters S"),
        (author_config(pattern=None), "`pattern`: Input should be a valid string"),
        (author_config(num_layers="6"), "`num_layers`: '6' is not an integer from 0 to"),
        (author_config(num_layers=2**40), "`num_layers`: 1099511627776 is not an integer from 0 to"),
        (author_config(num_layers=3 * 2**20), "too few for 3145728 layers"),
        (author_config(d_model=2**40), "`width`: 1099511627776 is more than any model has"),
        (author_config(d_model=[1]), "`d_model`: Input should be a valid integer"),
        (author_config(maxlen=-1), "`maxlen`: Input should be greater than or equal to 1"),
        (author_config(num_kv_heads=3), "attention_heads 4 is not a multiple of kv_heads 3"),
        (author_config(qk_norm_eps=1e-5), "`qk_norm_eps` 1e-05: this model has one epsilon"),
        (author_config(tokenizer_ranks=10**9), "`ranks`: Input should be less than or equal to 1048576"),
        (author_config(tokenizer_ranks=600), "`vocab_size` 300 is too small for its tokenizer"),
        (author_config(tokenizer_fingerprint="x"), "of another tokenizer"),
        ({"format": 1, "model": {}}, "belongs to a checkpoint of this project"),
        ([], "is not a table of settings"),
    ],
)
def test_a_hostile_config_is_refused_in_a_line(archive, tmp_path, config, message):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message) as caught:
        load_author_weights(tmp_path, SHAPE, TOKENIZER)
    assert "\n" not in str(caught.value)


def test_weights_in_several_files_are_read_by_their_index(tensors, archive, tmp_path):
    folder = tmp_path / "sharded"
    folder.mkdir()
    names = sorted(tensors)
    places = {name: f"model-0000{1 + (name in names[30:])}-of-00002.safetensors" for name in names}
    for shard in set(places.values()):
        save_file({f"model.{name}": tensors[name] for name in names if places[name] == shard}, folder / shard)
    index = folder / "model.safetensors.index.json"
    listed = {f"model.{name}": shard for name, shard in places.items()}
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": listed}))
    whole, by_index, by_folder = (
        load_author_weights(path, SHAPE, TOKENIZER, context=16)[0] for path in (archive, index, folder)
    )
    jax.tree.map(np.testing.assert_array_equal, whole, by_index)
    jax.tree.map(np.testing.assert_array_equal, whole, by_folder)
    wrong = {
        "is not the name of a .safetensors file beside it": {**listed, "model.embedding.weight": "../x.safetensors"},
        "names the file y.safetensors, which is not there": {**listed, "model.embedding.weight": "y.safetensors"},
        "lacks the tensor `z`": {**listed, "z": places["embedding.weight"]},
        "holds the tensor `model.embedding.weight`": {
            name: shard for name, shard in listed.items() if name != "model.embedding.weight"
        },
        "has no table `weight_map`": ["model.embedding.weight"],
    }
    for message, table in wrong.items():
        index.write_text(json.dumps({"weight_map": table}))
        with pytest.raises(ConfigError, match=message):
            load_author_weights(folder, SHAPE, TOKENIZER, context=16)


def test_the_name_of_a_pickle_is_no_part_of_the_shells_command(tmp_path):
    path = tmp_path / "$(touch made) `touch made` \" '.pt"
    path.write_bytes(b"anything")
    with pytest.raises(ConfigError, match="is a pickle") as caught:
        load_author_weights(path, SHAPE, TOKENIZER)
    command = re.search(r"(python -c .*), and import", str(caught.value))
    _, option, code = shlex.split(command[1])
    assert option == "-c"
    assert str(path) in [getattr(node, "value", None) for node in ast.walk(ast.parse(code))]


@pytest.mark.parametrize("name", ["nautile.pt", "pytorch_model.bin", "weights.pkl"])
def test_a_pickle_is_refused_with_the_way_to_convert_it(tmp_path, name):
    (tmp_path / name).write_bytes(b"anything")
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(ConfigError, match=r"is a pickle, .* python -c .*weights_only=True.*model.safetensors"):
            load_author_weights(path, SHAPE, TOKENIZER)


def their_logits(tensors, model, ids_L):
    """Their forward pass over one row, token by token where that is simplest."""
    read = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    x_LD = read["embedding.weight"][ids_L]
    for index in range(model.blocks * 3):
        layer = {name.removeprefix(f"blocks.{index}."): value for name, value in read.items()
                 if name.startswith(f"blocks.{index}.")}  # fmt: skip
        x_LD = their_transformer(layer, model, x_LD) if index % 3 == 2 else their_sca(layer, model, x_LD)
    return x_LD @ read["embedding.weight"].T


def their_sca(layer, model, x_LD):
    length, heads, head_dim = len(x_LD), model.memory_heads, model.head_dim
    normed = rms(x_LD, 1e-5) * layer["norm.scale"]
    padded = np.concatenate([np.zeros((3, len(layer["attn.conv_weight"]))), normed @ layer["attn.in_proj.weight"].T])
    taps = layer["attn.conv_weight"][:, 0]
    z = silu(np.stack([(padded[t : t + 4] * taps.T).sum(0) for t in range(length)]))
    keys = z[:, : heads * head_dim].reshape(length, heads, head_dim, 1)
    scores = z[:, heads * head_dim : heads * (head_dim + 1)]
    share = heads // model.query_heads
    q = z[:, heads * (head_dim + 1) :].reshape(length, model.query_heads, 1, head_dim, model.spectral_samples, 2)
    increments = np.cumsum(softplus(layer["attn.theta_d_raw"][0, 0]) + 1e-4, axis=-1)
    theta = 0.001 + increments / increments[..., -1:] * 2.999
    weights = np.exp(layer["attn.w_int_raw"][0, 0])
    weights = weights / (weights.sum(-1, keepdims=True) + 1e-6)
    distance = np.maximum(model.context - 1 - np.arange(length), 0)[:, None]
    alpha = softplus(layer["attn.score_scale"] * scores + layer["attn.score_bias"])
    alpha = np.clip(alpha * np.exp(-softplus(layer["attn.decay_slopes"]) * distance), 1e-4, 5000)
    scaled = layer["attn.phase_scale"][:, None, None] * keys
    value = alpha[..., None, None] * keys * np.exp(1j * scaled / (1 + np.abs(scaled)) * theta)
    state = np.cumsum(value, 0) / np.maximum(np.cumsum(alpha, 0), 1e-4)[..., None, None]
    state = state.reshape(length, model.query_heads, share, head_dim, model.spectral_samples)
    match = state * (q[..., 0] - 1j * q[..., 1]) / np.sqrt(head_dim) * weights
    out = match.sum(-1).reshape(length, heads, head_dim)
    joined = np.concatenate([out.real, out.imag], -1).reshape(length, -1)
    fused = rms(joined * silu(normed @ layer["attn.gate_proj.weight"].T), 1e-6) * layer["attn.gated_norm.weight"]
    read = np.einsum("lkf,kfn->lkn", fused.reshape(length, heads, -1), layer["attn.W_readout"])
    value, gate = np.split(read, 2, -1)
    return x_LD + (value / (1 + np.exp(-gate))).reshape(length, -1) @ layer["attn.out_proj.weight"].T


def their_transformer(layer, model, x_LD):
    length, size = len(x_LD), model.attention_head_dim
    normed = rms(x_LD, 1e-6) * layer["norm1.scale"]
    q, k, v = (
        (normed @ layer[f"attn.{name}_proj.weight"].T).reshape(length, -1, size).swapaxes(0, 1) for name in "qkv"
    )
    angles = np.arange(length)[:, None] / 10_000 ** (np.arange(size // 2) / (size // 2))
    q, k = (rms(turned(part, angles), 1e-6) for part in (q, k))
    k, v = (np.repeat(part, model.attention_heads // model.kv_heads, axis=0) for part in (k, v))
    scores = np.where(np.tri(length, dtype=bool), q @ k.swapaxes(1, 2) / np.sqrt(size), -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    x_LD = x_LD + (shares @ v).swapaxes(0, 1).reshape(length, -1) @ layer["attn.out_proj.weight"].T
    normed = rms(x_LD, 1e-6) * layer["norm2.scale"]
    value, gate = np.split(normed @ layer["ff_in.weight"].T + layer["ff_in.bias"], 2, -1)
    return x_LD + (value * silu(gate)) @ layer["ff_out.weight"].T + layer["ff_out.bias"]


def turned(x, angles):
    first, second = np.split(x, 2, -1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def rms(x, epsilon):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon)


def silu(x):
    return x / (1 + np.exp(-x))


def softplus(x):
    return np.logaddexp(x, 0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_not_imported(tensors, tmp_path, value):
    """The tensor is named as the file has it."""
    name = next(name for name in tensors if name.endswith("ff_in.bias"))
    damaged = tensors[name].copy()
    damaged[2] = value
    np.savez(tmp_path / "theirs.npz", **{**tensors, name: damaged})
    with pytest.raises(ConfigError, match=rf"cannot be imported: 1 of the 80 numbers of `{name}` are not finite"):
        load_author_weights(tmp_path / "theirs.npz", SHAPE, TOKENIZER, context=16)


@pytest.mark.parametrize("kind", ["I8", "I64", "BOOL", "F8_E4M3", "C64"])
def test_quantised_weights_are_not_imported_as_if_they_were_numbers(tmp_path, kind):
    size = {"I64": 8, "C64": 8}.get(kind, 1)
    header = json.dumps({"a": {"dtype": kind, "shape": [2], "data_offsets": [0, 2 * size]}}).encode()
    path = tmp_path / "theirs.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\x01" * 2 * size)
    with pytest.raises(ConfigError, match=rf"`a` is of type {kind}, and weights are floats of 16 bits or more"):
        tensor_files(path)[0].read("a")


def test_an_archive_of_integers_holds_no_weights(tensors, tmp_path):
    name = next(name for name in tensors if name.endswith("ff_in.bias"))
    np.savez(tmp_path / "theirs.npz", **{**tensors, name: tensors[name].astype(np.int8)})
    with pytest.raises(ConfigError, match=rf"`{name}` is of type int8"):
        load_author_weights(tmp_path / "theirs.npz", SHAPE, TOKENIZER, context=16)
