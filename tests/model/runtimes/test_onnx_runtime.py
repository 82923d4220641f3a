"""The two runtimes side by side: the same samples from the same seeds, in a batch, streamed, and in the engine."""

from dataclasses import replace

import numpy as np
import pytest

from nautile.common.errors import ConfigError
from nautile.model.decoding.engine import Engine
from nautile.model.decoding.sampling import Sampling
from nautile.model.decoding.slots import DecodeRequest
from nautile.model.exports.onnx.folder import export_onnx
from nautile.model.runtimes.load import load_runtime
from nautile.model.weights.files import save_weights
from tests.model.conftest import tiny_config
from tests.model.decoding.test_engine import Client
from tests.model.decoding.test_unused_ids import preferring_unused
from tests.model.exports.onnx.conftest import TOKENIZER, exports, weights  # noqa: F401 - fixtures

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6] * 40, [3, 1, 4, 1, 5], [7]]
SEEDS = [(0, index) for index in range(len(PROMPTS))]
STOPS = (11, 12)
SAMPLING = Sampling(20, temperature=0.8, top_p=0.95, stop_ids=STOPS, think_end=13, thinking_budget=6)


@pytest.fixture(scope="module")
def runtimes(exports):  # noqa: F811
    return load_runtime("jax", exports["checkpoint"]), load_runtime("onnx", exports[32])


@pytest.mark.heavy
def test_samples_are_the_same(runtimes):
    expected, samples = (runtime.sampler(SAMPLING, 3, 60)(PROMPTS, SEEDS) for runtime in runtimes)
    for ours, theirs in zip(expected, samples, strict=True):
        np.testing.assert_array_equal(theirs.ids, ours.ids)
        assert theirs.truncated == ours.truncated
    *_, last = runtimes[1].sampler(SAMPLING, 1, 60).stream(PROMPTS[2], SEEDS[2])
    np.testing.assert_array_equal(last.ids, samples[2].ids)
    assert runtimes[1].sampler(SAMPLING, 3, 60)([], []) == []


@pytest.mark.heavy
def test_the_engine_gives_the_same_events(runtimes):
    requests = [
        DecodeRequest(tuple(prompt), 12, seed, alternatives=2, score_prompt=index != 1)
        for index, (prompt, seed) in enumerate(zip(PROMPTS, SEEDS, strict=True))
    ]
    outcomes = []
    for runtime in runtimes:
        engine = Engine(runtime.slots(STOPS, 13, 2), 8)
        client = Client(engine)
        engine.start(client.listen)
        outcomes.append(client.fill(requests))
        engine.close()
    for ours, theirs in zip(*outcomes, strict=True):
        assert (theirs[0], theirs[4]) == (ours[0], ours[4])
        np.testing.assert_allclose(theirs[1], ours[1], atol=1e-3)
        assert [[token for token, _ in row] for row in theirs[2]] == [[token for token, _ in row] for row in ours[2]]
        if ours[3] is None:
            assert theirs[3] is None
        else:
            np.testing.assert_allclose(theirs[3].logprobs, ours[3].logprobs, atol=1e-3)
            assert len(theirs[3].alternatives) == len(ours[3].alternatives)


@pytest.mark.slow
def test_what_is_no_export_is_refused(exports, runtimes):  # noqa: F811
    with pytest.raises(ConfigError, match="is no ONNX export; `nautile export CHECKPOINT FOLDER --format onnx`"):
        load_runtime("onnx", exports["checkpoint"])
    with pytest.raises(ConfigError, match="is an ONNX export: add `--runtime onnx`"):
        load_runtime("jax", exports[8])
    with pytest.raises(ConfigError, match="--runtime torch: is not one of jax, onnx"):
        load_runtime("torch", exports[32])
    with pytest.raises(ConfigError, match="over the model's context"):
        runtimes[1].sampler(SAMPLING, 1, 250)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [32, 8, 4])
def test_ids_without_a_token_get_no_probability(tmp_path, bits):
    """The graphs themselves mask them, so that other programs cannot draw them either; the model prefers them."""
    model = tiny_config(vocabulary=TOKENIZER.vocabulary + 20, width=64, context=64, blocks=1)
    params = preferring_unused(model.with_tokenizer(TOKENIZER))
    save_weights(tmp_path / "checkpoint", params, model, TOKENIZER)
    export_onnx(tmp_path / "checkpoint", tmp_path / "export", bits)
    runtime = load_runtime("onnx", tmp_path / "export")
    logits_RWV, _ = runtime.read_prompts(np.array([[1, 2, 3]]), np.array([3]), np.array([[0, 1, 2]]))
    assert np.all(logits_RWV[..., TOKENIZER.vocabulary :] == np.float32(-1e30))
    assert np.all(logits_RWV[..., : TOKENIZER.vocabulary] > -1e4)
    greedy = replace(SAMPLING, temperature=0)
    samples = runtime.sampler(greedy, 3, 40)(PROMPTS, SEEDS)
    assert max(sample.ids.max() for sample in samples) < TOKENIZER.vocabulary
    if bits == 32:
        expected = load_runtime("jax", tmp_path / "checkpoint").sampler(greedy, 3, 40)(PROMPTS, SEEDS)
        for ours, theirs in zip(expected, samples, strict=True):
            np.testing.assert_array_equal(theirs.ids, ours.ids)
