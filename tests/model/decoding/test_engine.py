"""Continuous batching: samples as `model.decoding.generate` makes them, whoever sits beside; a bounded queue; slots
set free."""

import threading
from dataclasses import replace
from queue import SimpleQueue

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common.errors import ConfigError
from model.decoding import engine as engine_module
from model.decoding.engine import Engine, buckets
from model.decoding.generate import Generator
from model.decoding.requests import DecodeRequest, EngineStopped, PromptScores, QueueFull, RequestFailed
from model.decoding.sampling import Sampling
from model.loss import masked_logits, token_logprobs
from model.nautile import forward

STOPS, THINK_END = (3, 4), 9
SLOTS, QUEUE = 4, 24
ORDERS = [
    DecodeRequest((5, 6, 7), 12, (1,), temperature=0.0),
    DecodeRequest((9,), 20, (2,)),
    DecodeRequest((11, 12, 13, 14, 15, 16), 7, (3,), temperature=0.7, top_k=5),
    DecodeRequest((8, 3), 30, (4,), temperature=1.3, top_p=0.8),
    DecodeRequest(tuple(range(10, 49)), 14, (5,), top_k=20, top_p=0.9),
    DecodeRequest((8, 3), 25, (6,), thinking_budget=5),
    DecodeRequest((5, 6, 7), 12, (7,), thinking_budget=0),
    DecodeRequest((70, 71), 62, (8,), temperature=2.0),
]


class Desk:
    """Listens to an engine. While `open` is clear the engine stands still at the end of its turn."""

    def __init__(self, engine):
        self.engine, self.open = engine, threading.Event()
        self.open.set()
        self.boxes, self.others = {}, SimpleQueue()

    def listen(self, events):
        assert self.open.wait(60)
        for ticket, event in events:
            self.boxes.setdefault(ticket, SimpleQueue()).put(event)

    def submit(self, orders):
        self.open.clear()  # so that no event comes before its box
        try:
            tickets = self.engine.submit(orders)
            self.boxes |= {ticket: SimpleQueue() for ticket in tickets}
        finally:
            self.open.set()
        return tickets

    def outcome(self, ticket):
        """ids, log-probabilities, alternatives, the scores if any, and how it ended."""
        ids, logprobs, tops, scored = [], [], [], None
        while True:
            event = self.boxes[ticket].get(timeout=60)
            if isinstance(event, RequestFailed):
                return event
            if isinstance(event, PromptScores):
                scored = event
                if not ticket.request.max_tokens:
                    return ids, logprobs, tops, scored, None
                continue
            ids, logprobs, tops = ids + event.ids, logprobs + event.logprobs, tops + event.alternatives
            if event.finish:
                return ids, logprobs, tops, scored, event.finish

    def fill(self, orders):
        return [self.outcome(ticket) for ticket in self.submit(orders)]


def started(params, config):
    engine = Engine(params, config, STOPS, THINK_END, SLOTS, QUEUE)
    desk = Desk(engine)
    engine.start(desk.listen)
    return desk


@pytest.fixture(scope="module")
def desk(params, config):
    desk = started(params, config)
    yield desk
    desk.engine.close()
    assert not desk.engine._thread.is_alive()


@pytest.fixture(scope="module")
def alone(desk):
    """Each order filled with nobody beside it."""
    return [desk.fill([order])[0] for order in ORDERS]


@pytest.mark.parametrize("index", [0, 4, 5], ids=["greedy", "cut", "drawn, with a thinking budget"])
def test_samples_are_those_of_the_generator(config, params, alone, index):
    """The same seeds give the same tokens."""
    order, (ids, logprobs, _, _, finish) = ORDERS[index], alone[index]
    # One limit for all, for each compiles: a longer one changes nothing before it.
    sampling = Sampling(25, order.temperature, order.top_k, order.top_p, STOPS, THINK_END, order.thinking_budget)
    [expected] = Generator(config, sampling, 1, 39)(params, [order.prompt], [order.seed])
    length = min(len(expected.ids), order.max_tokens)
    assert ids == expected.ids[:length].tolist()
    np.testing.assert_allclose(logprobs, expected.logprobs[:length], atol=1e-4)
    assert finish == ("stop" if ids[-1] in STOPS else "length")


def test_a_sample_does_not_depend_on_its_neighbours(desk, alone):
    """All at once, twice as many as there are slots and in another order, so that all join a batch under way."""
    order = [7, 3, 0, 5, 1, 6, 2, 4]
    together = desk.fill([ORDERS[index] for index in order])
    for index, (ids, logprobs, *_, finish) in zip(order, together, strict=True):
        assert ids == alone[index][0]
        assert finish == alone[index][4]
        np.testing.assert_allclose(logprobs, alone[index][1], atol=1e-5)


def test_samples_of_one_prompt_differ_by_their_seeds_alone(desk):
    """More of them than are read or placed at once."""
    orders = [DecodeRequest((5, 6, 7), 10, (seed,)) for seed in (1, 2, 3, 4, 5, 6, 1)]
    found = [outcome[0] for outcome in desk.fill(orders)]
    assert found[0] == found[6]
    assert len({tuple(ids) for ids in found}) == 6


def test_logprobs_are_those_of_the_trainer(config, params, desk):
    """Of a prompt and of what follows it, and the alternatives to each."""
    order = DecodeRequest((5, 6, 7, 20, 21), 9, (1,), score_prompt=True, alternatives=5)
    ids, logprobs, tops, scored, _ = desk.fill([order])[0]
    row = jnp.asarray([[*order.prompt, *ids]])
    positions = jnp.arange(row.shape[1])[None]
    hidden_BLD = jax.jit(lambda: forward(params, config, row, jnp.ones_like(row), positions))()
    expected, _ = token_logprobs(params, config, hidden_BLD[:, :-1], row[:, 1:])
    np.testing.assert_allclose([*scored.logprobs, *logprobs], expected[0], atol=1e-4)
    every_LV = jax.nn.log_softmax(masked_logits(hidden_BLD[0, :-1], params["embedding"], config.vocabulary))
    for place, best in enumerate([*scored.alternatives, *tops]):
        np.testing.assert_array_equal([one for one, _ in best], np.argsort(-every_LV[place])[:5])
        np.testing.assert_allclose([value for _, value in best], np.sort(every_LV[place])[::-1][:5], atol=1e-4)


def test_scores_alone_need_no_slot(desk):
    """Equal prompts, long and short ones; the scores are the same as when tokens follow."""
    prompts = [(5, 6, 7), tuple(range(10, 74)), (9,), (5, 6, 7), (8, 3), (1, 2)]
    found = desk.fill([DecodeRequest(prompt, 0, score_prompt=True) for prompt in prompts])
    assert [len(outcome[3].logprobs) for outcome in found] == [2, 63, 0, 2, 1, 1]
    assert found[0][3] == found[3][3]
    [again] = desk.fill([DecodeRequest((5, 6, 7), 3, score_prompt=True, temperature=0.0)])
    np.testing.assert_allclose(again[3].logprobs, found[0][3].logprobs, atol=1e-5)
    assert len(again[0]) <= 3


def test_a_full_queue_says_when_to_come_again(desk):
    desk.open.clear()
    try:
        first = desk.engine.submit([DecodeRequest((5,), 40, temperature=0.0)] * QUEUE)
        desk.boxes |= {ticket: SimpleQueue() for ticket in first}
        # At most one turn is under way, which has taken no more than there are slots.
        with pytest.raises(QueueFull) as full:
            desk.engine.submit([DecodeRequest((5,), 40)] * (SLOTS + 1))
        assert 1 <= full.value.retry_after <= 60
    finally:
        desk.open.set()
    assert len({tuple(desk.outcome(ticket)[0]) for ticket in first}) == 1


def test_who_is_cancelled_leaves_its_slot_and_the_queue(desk):
    tickets = desk.submit([DecodeRequest((5, 6), 60, temperature=0.0)] * (SLOTS + 3))
    before = desk.engine.tokens
    desk.engine.cancel(tickets)
    assert len(desk.fill([ORDERS[1]])[0][0]) > 0
    assert desk.engine.load() == (0, 0)
    assert desk.engine.tokens - before < 60 * SLOTS


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (DecodeRequest((), 5), "the prompt has 0 tokens"),
        (DecodeRequest((1,) * 60, 5), "60 tokens and 5 more are asked for; together they must be at most 64"),
        (DecodeRequest((150,), 5), "outside the vocabulary of 150"),
        (DecodeRequest((1,), 0), "max_tokens must be 1 or more"),
        (DecodeRequest((1,), -1, score_prompt=True), "max_tokens must be 1 or more"),
    ],
)
def test_orders_that_do_not_fit_are_refused(desk, order, message):
    with pytest.raises(ConfigError, match=message):
        desk.engine.submit([replace(ORDERS[0]), order])
    assert desk.engine.load() == (0, 0)


def test_the_whole_context_may_be_used(config, desk):
    [(ids, *_, finish)] = desk.fill([DecodeRequest((5, 6), config.context - 2, temperature=0.0)])
    assert len(ids) == config.context - 2 or finish == "stop"
    assert buckets(64) == [64]
    assert buckets(1000) == [64, 128, 256, 512, 1000]
    assert buckets(10) == [10]


def test_when_the_model_fails_all_who_wait_hear_of_it(config, params, monkeypatch):
    desk = started(params, config)
    assert desk.engine.ready.wait(120)

    def broken(*_):
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(engine_module, "advance", broken)
    outcomes = desk.fill([DecodeRequest((5,), 5)] * 6)
    assert all(
        isinstance(outcome, RequestFailed) and "RuntimeError: out of memory" in outcome.message for outcome in outcomes
    )
    with pytest.raises(EngineStopped, match="start the server again"):
        desk.engine.submit([DecodeRequest((5,), 5)])
    desk.engine.close()


def test_closing_tells_those_who_wait(config, params):
    desk = started(params, config)
    desk.open.clear()
    tickets = desk.engine.submit([DecodeRequest((5,), 60, temperature=0.0)] * QUEUE)
    desk.boxes |= {ticket: SimpleQueue() for ticket in tickets}
    closing = threading.Thread(target=desk.engine.close)
    closing.start()
    desk.open.set()
    closing.join(60)
    assert not closing.is_alive()
    assert desk.outcome(tickets[-1]) == RequestFailed("the server is stopping")
    with pytest.raises(EngineStopped, match="stopping"):
        desk.engine.submit([DecodeRequest((5,), 5)])


@pytest.mark.parametrize(("slots", "queue"), [(0, 5), (5, 0)])
def test_settings_out_of_range_are_refused(config, params, slots, queue):
    with pytest.raises(ConfigError, match="must be 1 or more"):
        Engine(params, config, STOPS, THINK_END, slots, queue)
