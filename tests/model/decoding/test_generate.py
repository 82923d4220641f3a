"""Sampling: the same completion at every batch size, budgets, stops, and the trainer's log-probabilities."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nautile.common.errors import ConfigError
from nautile.model.decoding import lane
from nautile.model.decoding.cache import length_buckets
from nautile.model.decoding.generate import Generator
from nautile.model.decoding.sampling import Sampling
from nautile.model.decoding.slots import DecodeRequest, JaxSlots, slot_settings
from nautile.model.loss import masked_logits
from nautile.model.nautile import forward, initialise
from tests.model.conftest import tiny_config

pytestmark = pytest.mark.slow

PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16], [8, 3]]
SEEDS = [(0, index, 0) for index in range(len(PROMPTS))]
SAMPLING = Sampling(max_tokens=12, top_p=1.0)
LONGEST = 6


@pytest.fixture(scope="module")
def four(config, params):
    """The four prompts in one batch of four rows."""
    completions = Generator(config, SAMPLING, rows=4, prompt_length=LONGEST)(params, PROMPTS, SEEDS)
    assert all(completion.truncated for completion in completions)
    return completions


@pytest.fixture(scope="module")
def stopping(four):
    """A longer limit, and ids that stop a completion."""
    return replace(SAMPLING, max_tokens=15, stop_ids=tuple(int(completion.ids[4]) for completion in four))


@pytest.fixture(scope="module")
def alone(config, params, stopping):
    """Fourteen samples one after the other in one slot, the first four of them those of `four`."""
    return Generator(config, stopping, 1, LONGEST)(params, *fourteen())


def fourteen():
    return [*PROMPTS * 3, *PROMPTS[:2]], [*SEEDS, *((9, index) for index in range(10))]


def same(item, other):
    np.testing.assert_array_equal(item.ids, other.ids)
    np.testing.assert_allclose(item.logprobs, other.logprobs, atol=1e-4)
    assert (item.truncated, item.forced) == (other.truncated, other.forced)


def test_a_stream_grows_into_the_same_sample(config, params, stopping, alone):
    longest = max(range(len(PROMPTS)), key=lambda index: len(alone[index].ids))
    stream = Generator(config, stopping, rows=1, prompt_length=LONGEST).stream
    parts = list(stream(params, PROMPTS[longest], SEEDS[longest], every=2))
    length = len(alone[longest].ids)
    assert [len(part.ids) for part in parts] == [*range(2, length, 2), length]
    for part in parts:
        np.testing.assert_array_equal(part.ids, alone[longest].ids[: len(part.ids)])
        np.testing.assert_allclose(part.logprobs, alone[longest].logprobs[: len(part.ids)], atol=1e-4)
    assert parts[-1].truncated == alone[longest].truncated


def test_other_seeds_give_other_samples(config, params, four):
    generator = Generator(config, SAMPLING, rows=4, prompt_length=LONGEST)
    again = generator(params, PROMPTS, [(1, *seed[1:]) for seed in SEEDS])
    assert not any(np.array_equal(item.ids, other.ids) for item, other in zip(four, again, strict=True))


def gaps_to_trainer(config, params, completions, temperature=1.0):
    """log p of the sampler less that of the trainer at that temperature (in float64), by token of each completion."""
    ids_BL = np.zeros((4, LONGEST + 12), np.int32)
    for row, (prompt, made) in enumerate(zip(PROMPTS, completions, strict=True)):
        ids_BL[row, : len(prompt) + 12] = [*prompt, *made.ids]
    positions_BL = jnp.broadcast_to(jnp.arange(LONGEST + 12), ids_BL.shape)
    hidden_BLD = jax.jit(lambda: forward(params, config, ids_BL, jnp.ones_like(positions_BL), positions_BL))()
    gaps = []
    for prompt, made, hidden_LD in zip(PROMPTS, completions, hidden_BLD, strict=True):
        hidden_TD = hidden_LD[len(prompt) - 1 : len(prompt) + 11]
        logits_TV = (
            np.asarray(masked_logits(hidden_TD, params["embedding"], config.vocabulary), np.float64) / temperature
        )
        gaps.append(made.logprobs - logits_TV[range(12), made.ids] + np.log(np.exp(logits_TV).sum(axis=1)))
    return np.stack(gaps)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_are_those_of_the_trainer_at_the_sampling_temperature(config, params, temperature):
    completions = Generator(config, replace(SAMPLING, temperature=temperature), 4, LONGEST)(params, PROMPTS, SEEDS)
    np.testing.assert_allclose(gaps_to_trainer(config, params, completions, temperature), 0, atol=1e-4)


def test_in_bfloat16_sampler_and_trainer_differ_little(params):
    config = tiny_config(compute_dtype="bfloat16")
    completions = Generator(config, SAMPLING, rows=4, prompt_length=LONGEST)(params, PROMPTS, SEEDS)
    assert np.abs(gaps_to_trainer(config, params, completions)).mean() < 0.01


@pytest.mark.parametrize("pattern", ["S", "ASA"])
def test_other_patterns_decode_in_lanes_and_slots(pattern):
    """No keys and values at all, and two layers with them a block: two rows filled again, then two slots."""
    config = tiny_config(pattern=pattern, blocks=1, grid="free", integration="free")
    params = initialise(config, 0)
    greedy = replace(SAMPLING, temperature=0)
    completions = Generator(config, greedy, rows=2, prompt_length=LONGEST)(params, PROMPTS, SEEDS)
    np.testing.assert_allclose(gaps_to_trainer(config, params, completions), 0, atol=1e-4)
    slots = JaxSlots(params, config, (), 0, 2)
    slots.start()
    lengths_B = np.array([len(prompt) for prompt in PROMPTS[:2]], np.int32)
    tokens_BP = np.array([[0] * (16 - len(prompt)) + prompt for prompt in PROMPTS[:2]], np.int32)
    prefilled, _ = slots.prefill(tokens_BP, lengths_B, score=False)
    settings = slot_settings([DecodeRequest(tuple(prompt), 12, temperature=0.0) for prompt in PROMPTS[:2]], 0)
    slots.fill(prefilled, np.arange(2), np.arange(2), settings)
    output = slots.advance(np.ones(2, bool), 12)
    for slot, made in enumerate(completions[:2]):
        np.testing.assert_array_equal(output.ids_TB[:, slot], made.ids)
        np.testing.assert_allclose(output.logprobs_TB[:, slot], made.logprobs, atol=1e-4)


def test_a_stop_id_ends_a_completion_and_is_kept(four, stopping, alone):
    """And a longer limit changes nothing before it, nor does a batch of one row."""
    for item, other in zip(four, alone, strict=False):
        ends = [index for index, token in enumerate(item.ids) if token in stopping.stop_ids]
        length = ends[0] + 1 if ends else 12
        np.testing.assert_array_equal(other.ids[:length], item.ids[:length])
        np.testing.assert_allclose(other.logprobs[:length], item.logprobs[:length], atol=1e-4)
        assert len(other.ids) == len(other.logprobs)
        if ends:
            assert (len(other.ids), other.truncated) == (length, False)
        else:
            assert len(other.ids) > length
    assert not alone[0].truncated


def test_slots_filled_again_and_lanes_that_shrink_change_nothing(config, params, stopping, alone, monkeypatch):
    """In another order, in two lanes of four slots that are filled again as samples end, then shrink to one slot, on
    rings of columns that grow and come round."""
    prompts, seeds = fourteen()
    lengths = {len(completion.ids) for completion in alone}
    assert len(lengths) > 2
    assert 15 in lengths
    monkeypatch.setattr(lane, "SMALLEST_LANE", 1)
    monkeypatch.setattr(lane, "FIRST_GROWTH", 5)
    assert length_buckets(15, 5) == [5, 10, 15]
    sizes = []
    advance = lane.advance

    def counted(weights, state, *arguments):
        sizes.append((len(state.active_B), state.cache.columns))
        return advance(weights, state, *arguments)

    monkeypatch.setattr(lane, "advance", counted)
    order = np.random.default_rng(0).permutation(len(prompts))
    together = Generator(config, stopping, 8, LONGEST)
    again = together(params, [prompts[i] for i in order], [seeds[i] for i in order])
    for item, index in zip(again, order, strict=True):
        same(item, alone[index])
    assert {size for size, _ in sizes} == {4, 1}
    assert len({columns for _, columns in sizes}) > 1


def test_a_spent_thinking_budget_inserts_the_end(config, params, four):
    """It is inserted after exactly 5 tokens; thinking that ended earlier is left unchanged. (In a batch of one row: the
    tests of the engine.)"""
    end = int(four[0].ids[2])
    sampling = replace(SAMPLING, think_end=end, thinking_budget=5)
    budgeted = Generator(config, sampling, 4, LONGEST)(params, PROMPTS, SEEDS)
    for item, other in zip(four, budgeted, strict=True):
        if end in item.ids[:6]:
            same(item, other)
            continue
        np.testing.assert_array_equal(other.ids[:5], item.ids[:5])
        assert other.ids[5] == end
        assert other.forced == 5
        assert np.isfinite(other.logprobs[5])
    assert budgeted[0].forced is None


def test_no_prompts_no_completions(config, params):
    assert Generator(config, SAMPLING, 4, LONGEST)(params, [], []) == []


@pytest.mark.parametrize(
    ("prompts", "seeds", "message"),
    [
        ([[1] * 7], [(0,)], "prompt 0 has 7 tokens, and must have 1 to 6"),
        ([[1], []], [(0,), (1,)], "prompt 1 has 0 tokens"),
        ([[150]], [(0,)], "ids 150 to 150, outside the vocabulary of 150"),
        ([[1]], [], "1 prompts but 0 seeds"),
    ],
)
def test_prompts_that_do_not_fit_are_refused(config, params, prompts, seeds, message):
    with pytest.raises(ConfigError, match=message):
        Generator(config, SAMPLING, 4, LONGEST)(params, prompts, seeds)


def test_a_length_over_the_context_is_refused_with_the_numbers(config):
    with pytest.raises(ConfigError, match=r"prompt_length 60 \+ max_tokens 12 = 72 is over the model's context of 64"):
        Generator(config, SAMPLING, 4, 60)


@pytest.mark.parametrize(
    "wrong",
    [{"max_tokens": 0}, {"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}, {"thinking_budget": 3}],
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sampling(**{"max_tokens": 5, **wrong})
