"""The two runtimes side by side: the same samples from the same seeds, in a batch, streamed, and in the engine."""

from dataclasses import replace

import numpy as np
import pytest

from common.errors import ConfigError
from model.decoding.engine import Engine
from model.decoding.requests import DecodeRequest
from model.decoding.sampling import Sampling
from model.runtimes.load import load_runtime
from tests.model.decoding.test_engine import Client
from tests.model.exports.onnx.conftest import exports, weights  # noqa: F401 - fixtures

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6] * 40, [3, 1, 4, 1, 5], [7]]
SEEDS = [(0, index) for index in range(len(PROMPTS))]
STOPS = (11, 12)
SAMPLING = Sampling(20, temperature=0.8, top_p=0.95, stop_ids=STOPS, think_end=13, thinking_budget=6)


@pytest.fixture(scope="module")
def runtimes(exports):  # noqa: F811
    return load_runtime("jax", exports["checkpoint"]), load_runtime("onnx", exports[32])


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [SAMPLING, replace(SAMPLING, temperature=0)], ids=["drawn", "greedy"])
def test_samples_are_the_same(runtimes, sampling):
    expected, samples = (runtime.sampler(sampling, 3, 60)(PROMPTS, SEEDS) for runtime in runtimes)
    for ours, theirs in zip(expected, samples, strict=True):
        np.testing.assert_array_equal(theirs.ids, ours.ids)
        assert theirs.truncated == ours.truncated
    *_, last = runtimes[1].sampler(sampling, 1, 60).stream(PROMPTS[2], SEEDS[2])
    np.testing.assert_array_equal(last.ids, samples[2].ids)
    assert runtimes[1].sampler(sampling, 3, 60)([], []) == []


@pytest.mark.slow
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
