"""Continuous batching: samples equal to those of `model.decoding.generate` in any company; the queue; cancellation."""

import threading
from dataclasses import replace
from queue import SimpleQueue

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nautile.common.errors import ConfigError
from nautile.model.decoding.cache import length_buckets
from nautile.model.decoding.engine import Engine
from nautile.model.decoding.generate import Generator
from nautile.model.decoding.sampling import Sampling
from nautile.model.decoding.slots import DecodeRequest, EngineStopped, JaxSlots, PromptScores, QueueFull, RequestFailed
from nautile.model.loss import masked_logits, token_logprobs
from nautile.model.nautile import forward

pytestmark = pytest.mark.slow

STOPS, THINK_END = (3, 4), 9
SLOTS, QUEUE = 4, 24
REQUESTS = [
    DecodeRequest((5, 6, 7), 12, (1,), temperature=0.0),
    DecodeRequest((9,), 20, (2,)),
    DecodeRequest((11, 12, 13, 14, 15, 16), 7, (3,), temperature=0.7, top_k=5),
    DecodeRequest((8, 3), 30, (4,), temperature=1.3, top_p=0.8),
    DecodeRequest(tuple(range(10, 49)), 14, (5,), top_k=20, top_p=0.9),
    DecodeRequest((8, 3), 25, (6,), thinking_budget=5),
    DecodeRequest((5, 6, 7), 12, (7,), thinking_budget=0),
    DecodeRequest((70, 71), 62, (8,), temperature=2.0),
]


class Client:
    """Collects the events of an engine. While `open` is clear the engine waits at the end of its iteration."""

    def __init__(self, engine):
        self.engine, self.open = engine, threading.Event()
        self.open.set()
        self.events = {}

    def listen(self, events):
        assert self.open.wait(60)
        for handle, event in events:
            self.events.setdefault(handle, SimpleQueue()).put(event)

    def submit(self, requests):
        self.open.clear()  # so that no event comes before its queue exists
        try:
            handles = self.engine.submit(requests)
            self.events |= {handle: SimpleQueue() for handle in handles}
        finally:
            self.open.set()
        return handles

    def outcome(self, handle):
        """ids, log-probabilities, alternatives, the prompt's scores if any, and the finish reason."""
        ids, logprobs, best, scores = [], [], [], None
        while True:
            event = self.events[handle].get(timeout=60)
            if isinstance(event, RequestFailed):
                return event
            if isinstance(event, PromptScores):
                scores = event
                if not handle.request.max_tokens:
                    return ids, logprobs, best, scores, None
                continue
            ids, logprobs, best = ids + event.ids, logprobs + event.logprobs, best + event.alternatives
            if event.finish:
                return ids, logprobs, best, scores, event.finish

    def fill(self, requests):
        return [self.outcome(handle) for handle in self.submit(requests)]


def started(params, config):
    engine = Engine(JaxSlots(params, config, STOPS, THINK_END, SLOTS), QUEUE)
    client = Client(engine)
    engine.start(client.listen)
    return client


@pytest.fixture(scope="module")
def client(params, config):
    client = started(params, config)
    yield client
    client.engine.close()
    assert not client.engine._thread.is_alive()


@pytest.fixture(scope="module")
def alone(client):
    """Each request served with no other in the batch."""
    return [client.fill([request])[0] for request in REQUESTS]


@pytest.mark.parametrize("index", [0, 5], ids=["greedy", "drawn, with a thinking budget"])
def test_samples_are_those_of_the_generator(config, params, alone, index):
    """The same seeds give the same tokens."""
    request, (ids, logprobs, _, _, finish) = REQUESTS[index], alone[index]
    # One limit for all, because each compiles a program: a longer limit changes nothing before it.
    sampling = Sampling(
        25, request.temperature, request.top_k, request.top_p, STOPS, THINK_END, request.thinking_budget
    )
    [expected] = Generator(config, sampling, 1, 39)(params, [request.prompt], [request.seed])
    length = min(len(expected.ids), request.max_tokens)
    assert ids == expected.ids[:length].tolist()
    np.testing.assert_allclose(logprobs, expected.logprobs[:length], atol=1e-4)
    assert finish == ("stop" if ids[-1] in STOPS else "length")


def test_a_sample_does_not_depend_on_its_neighbours(client, alone):
    """All at once, twice as many as there are slots and in another order, so that some join a running batch."""
    order = [7, 3, 0, 5, 1, 6, 2, 4]
    together = client.fill([REQUESTS[index] for index in order])
    for index, (ids, logprobs, *_, finish) in zip(order, together, strict=True):
        assert ids == alone[index][0]
        assert finish == alone[index][4]
        np.testing.assert_allclose(logprobs, alone[index][1], atol=1e-5)


def test_samples_of_one_prompt_differ_by_their_seeds_alone(client):
    """More of them than are read or placed at once."""
    requests = [DecodeRequest((5, 6, 7), 10, (seed,)) for seed in (1, 2, 3, 4, 5, 6, 1)]
    results = [outcome[0] for outcome in client.fill(requests)]
    assert results[0] == results[6]
    assert len({tuple(ids) for ids in results}) == 6


def test_logprobs_are_those_of_the_trainer(config, params, client):
    """Of a prompt and of what follows it, and the alternatives to each."""
    request = DecodeRequest((5, 6, 7, 20, 21), 9, (1,), score_prompt=True, alternatives=5)
    ids, logprobs, best, scores, _ = client.fill([request])[0]
    row = jnp.asarray([[*request.prompt, *ids]])
    positions = jnp.arange(row.shape[1])[None]
    hidden_BLD = jax.jit(lambda: forward(params, config, row, jnp.ones_like(row), positions))()
    expected, _ = token_logprobs(params, config, hidden_BLD[:, :-1], row[:, 1:])
    np.testing.assert_allclose([*scores.logprobs, *logprobs], expected[0], atol=1e-4)
    every_LV = jax.nn.log_softmax(masked_logits(hidden_BLD[0, :-1], params["embedding"], config.vocabulary))
    for index, pairs in enumerate([*scores.alternatives, *best]):
        np.testing.assert_array_equal([token for token, _ in pairs], np.argsort(-every_LV[index])[:5])
        np.testing.assert_allclose([value for _, value in pairs], np.sort(every_LV[index])[::-1][:5], atol=1e-4)


def test_scoring_alone_needs_no_slot(client):
    """Equal prompts, long and short ones; the scores are the same as when tokens follow."""
    prompts = [(5, 6, 7), tuple(range(10, 74)), (9,), (5, 6, 7), (8, 3), (1, 2)]
    result = client.fill([DecodeRequest(prompt, 0, score_prompt=True) for prompt in prompts])
    assert [len(outcome[3].logprobs) for outcome in result] == [2, 63, 0, 2, 1, 1]
    assert result[0][3] == result[3][3]
    [again] = client.fill([DecodeRequest((5, 6, 7), 3, score_prompt=True, temperature=0.0)])
    np.testing.assert_allclose(again[3].logprobs, result[0][3].logprobs, atol=1e-5)
    assert len(again[0]) <= 3


def test_a_full_queue_says_when_to_retry(client):
    client.open.clear()
    try:
        first = client.engine.submit([DecodeRequest((5,), 40, temperature=0.0)] * QUEUE)
        client.events |= {handle: SimpleQueue() for handle in first}
        # At most one iteration is running, and it has admitted no more than there are slots.
        with pytest.raises(QueueFull) as full:
            client.engine.submit([DecodeRequest((5,), 40)] * (SLOTS + 1))
        assert 1 <= full.value.retry_after <= 60
    finally:
        client.open.set()
    assert len({tuple(client.outcome(handle)[0]) for handle in first}) == 1


def test_a_cancelled_request_leaves_its_slot_and_the_queue(client):
    handles = client.submit([DecodeRequest((5, 6), 60, temperature=0.0)] * (SLOTS + 3))
    before = client.engine.tokens
    client.engine.cancel(handles)
    assert len(client.fill([REQUESTS[1]])[0][0]) > 0
    assert client.engine.load() == (0, 0)
    assert client.engine.tokens - before < 60 * SLOTS


@pytest.mark.parametrize(
    ("invalid", "message"),
    [
        (DecodeRequest((), 5), "the prompt has 0 tokens"),
        (DecodeRequest((1,) * 60, 5), "60 tokens and 5 more are asked for; together they must be at most 64"),
        (DecodeRequest((150,), 5), "outside the vocabulary of 150"),
        (DecodeRequest((1,), 0), "max_tokens must be 1 or more"),
        (DecodeRequest((1,), -1, score_prompt=True), "max_tokens must be 1 or more"),
    ],
)
def test_requests_that_do_not_fit_are_refused(client, invalid, message):
    with pytest.raises(ConfigError, match=message):
        client.engine.submit([replace(REQUESTS[0]), invalid])
    assert client.engine.load() == (0, 0)


@pytest.mark.parametrize(("setting", "most"), [("top_k", 150), ("thinking_budget", 20)])
def test_a_setting_that_exceeds_every_number_of_tokens_is_as_the_largest(client, alone, setting, most):
    """A client may send any integer, and the engine serves others beside it."""
    [largest] = client.fill([replace(REQUESTS[1], **{setting: most})])
    [beyond, other] = client.fill([replace(REQUESTS[1], **{setting: 2**40}), REQUESTS[2]])
    assert beyond[0] == largest[0]
    assert other[0] == alone[2][0]


def test_the_whole_context_may_be_used(config, client):
    [(ids, *_, finish)] = client.fill([DecodeRequest((5, 6), config.context - 2, temperature=0.0)])
    assert len(ids) == config.context - 2 or finish == "stop"
    assert length_buckets(64) == [64]
    assert length_buckets(1000) == [64, 128, 256, 512, 1000]
    assert length_buckets(10) == [10]


def test_when_the_model_fails_every_request_gets_an_answer(config, params, monkeypatch):
    client = started(params, config)
    assert client.engine.ready.wait(120)

    def broken(*_):
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(client.engine._programs, "advance", broken)
    outcomes = client.fill([DecodeRequest((5,), 5)] * 6)
    assert all(
        isinstance(outcome, RequestFailed) and "RuntimeError: out of memory" in outcome.message for outcome in outcomes
    )
    with pytest.raises(EngineStopped, match="restart the server"):
        client.engine.submit([DecodeRequest((5,), 5)])
    client.engine.close()


def test_closing_answers_waiting_requests(config, params):
    client = started(params, config)
    client.open.clear()
    handles = client.engine.submit([DecodeRequest((5,), 60, temperature=0.0)] * QUEUE)
    client.events |= {handle: SimpleQueue() for handle in handles}
    closing = threading.Thread(target=client.engine.close)
    closing.start()
    client.open.set()
    closing.join(60)
    assert not closing.is_alive()
    assert client.outcome(handles[-1]) == RequestFailed("the server is stopping")
    with pytest.raises(EngineStopped, match="stopping"):
        client.engine.submit([DecodeRequest((5,), 5)])


def test_closing_waits_for_no_compilation(config, params, monkeypatch):
    client = Client(Engine(JaxSlots(params, config, STOPS, THINK_END, SLOTS), QUEUE))
    compiling, compiled, programs = threading.Event(), threading.Event(), []

    def prepare(*_):
        for _ in range(3):
            programs.append(compiling.set())
            compiled.wait(60)
            yield

    monkeypatch.setattr(client.engine._programs, "prepare", prepare)
    monkeypatch.setattr(client.engine._programs, "fill", lambda *_: None)
    client.engine.start(client.listen)
    assert compiling.wait(60)
    [handle] = client.submit([DecodeRequest((5,), 5)])
    assert client.engine.close() is False
    assert client.outcome(handle) == RequestFailed("the server is stopping")
    compiled.set()
    client.engine._thread.join(60)
    assert (len(programs), client.engine.ready.is_set()) == (1, False)  # no program after the one at work
    assert client.engine.close() is True


@pytest.mark.parametrize(("slots", "queue"), [(0, 5), (5, 0)])
def test_settings_out_of_range_are_refused(config, params, slots, queue):
    with pytest.raises(ConfigError, match="must be 1 or more"):
        Engine(JaxSlots(params, config, STOPS, THINK_END, slots), queue)
