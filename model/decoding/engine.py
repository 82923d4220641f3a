"""Many requests through one model: a thread that fills free slots from a bounded queue and steps them all together.

Every turn reads the prompts of those who can be seated, a few at a time, then writes `STRIDE` tokens in every slot. Who
is done or no longer wanted leaves at once, and the next one takes the slot. A sample is fixed by its prompt, its seed
and its wishes, whoever sits beside it: they are those of `model.decoding.generate` (the same uniform numbers decide).
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import jax
import numpy as np

from common.errors import ConfigError
from configs.model import ModelConfig
from model.decoding.cache import decode_weights
from model.decoding.requests import (
    Chunk,
    DecodeRequest,
    EngineEvent,
    EngineStopped,
    FinishReason,
    Handle,
    PromptScores,
    QueueFull,
    RequestFailed,
)
from model.decoding.sampling import sample_keys
from model.decoding.slots import (
    PrefilledPrompts,
    PrefillScores,
    SlotOutput,
    SlotSettings,
    advance,
    empty_slots,
    place,
    read_prompts,
)
from model.layers.common import Params

logger = logging.getLogger(__name__)

STRIDE = 4  # tokens between two looks at the queue: a program's start costs 0.2 ms, a small model's token 1 ms
ROWS = 4  # prompts that are read, and slots that are filled, by one program
SMALLEST_BUCKET = 64


Listener = Callable[[list[tuple[Handle, EngineEvent]]], None]


class Engine:
    """`slots` samples at once, `queue` more waiting. `listener` gets what happened, in the engine's thread."""

    def __init__(
        self, params: Params, config: ModelConfig, stops: tuple[int, ...], think_end: int, slots: int, queue: int
    ) -> None:
        if slots < 1 or queue < 1:
            raise ConfigError(f"--slots {slots} and --queue {queue} must be 1 or more")
        self.config, self.capacity, self.queue = config, slots, queue
        self._params, self._stops, self._think_end = params, stops, think_end
        self._seats: list[Handle | None] = [None] * slots
        self._waiting: deque[Handle] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._seconds = 1.0  # a sample's time from its order to its end, the later ones weighing more
        self.ready = threading.Event()
        self.failure: str | None = None
        self.tokens = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._listener: Listener = lambda events: None

    def start(self, listener: Listener) -> None:
        """Begin: first the programs are compiled (`ready` says when), then orders are filled."""
        self._listener = listener
        self._thread.start()

    def close(self) -> None:
        """Take no more orders, drop those there are, and end the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def submit(self, orders: Sequence[DecodeRequest]) -> list[Handle]:
        """Queue all of them or none. Raises `QueueFull`, `EngineStopped`, or `ConfigError` where one does not fit."""
        for order in orders:
            self._check(order)
        tickets = [Handle(order) for order in orders]
        with self._changed:
            if self._stopping or self.failure:
                raise EngineStopped(self.failure or "the server is stopping")
            waiting = sum(not ticket.cancelled for ticket in self._waiting)
            if waiting + len(tickets) > self.queue:
                raise QueueFull(waiting, self._until_room(waiting))
            self._waiting.extend(tickets)
            self._changed.notify()
        return tickets

    def cancel(self, tickets: Sequence[Handle]) -> None:
        """Nothing more is wanted of these: their slots are free at the next turn."""
        with self._changed:
            for ticket in tickets:
                ticket.cancelled = True
            self._changed.notify()

    def load(self) -> tuple[int, int]:
        """Samples in slots, and samples waiting."""
        with self._changed:
            seated = sum(ticket is not None and not ticket.cancelled for ticket in self._seats)
            return seated, sum(not ticket.cancelled for ticket in self._waiting)

    def _check(self, order: DecodeRequest) -> None:
        length, context = len(order.prompt), self.config.context
        if not 1 <= length <= context - order.max_tokens:
            raise ConfigError(
                f"the prompt has {length} tokens and {order.max_tokens} more are asked for; together they must be at "
                f"most {context}, and the prompt not empty"
            )
        if order.max_tokens < 0 or (order.max_tokens == 0 and not order.scored):
            raise ConfigError("max_tokens must be 1 or more, unless the prompt is only to be scored")
        if not 0 <= min(order.prompt) <= max(order.prompt) < self.config.vocabulary:
            raise ConfigError(
                f"the prompt has ids {min(order.prompt)} to {max(order.prompt)}, outside the vocabulary of "
                f"{self.config.vocabulary}"
            )

    def _until_room(self, waiting: int) -> int:
        return min(60, max(1, math.ceil(self._seconds * waiting / self.capacity)))

    def _run(self) -> None:
        try:
            self._weights = jax.jit(decode_weights, static_argnums=1)(self._params, self.config)
            self._slots = empty_slots(self.config, self.capacity)
            self._warm()
            self.ready.set()
            while self._wait():
                self._turn()
            self._end("the server is stopping")
        except Exception as error:  # whatever it is, those who wait must hear of it
            logger.exception("the engine failed")
            cause = f"{type(error).__name__}: {error}".splitlines()[0]
            self._end(f"the model cannot go on ({cause}); start the server again")

    def _warm(self) -> None:
        """Compile every program but those that score, which many servers never need."""
        for length in buckets(self.config.context):
            for rows in (1, ROWS):
                prompted, _ = self._read({(row,): row for row in range(rows)}, length, scored=False)
                self._put(prompted, [], [], [])
        self._write(np.zeros(self.capacity, bool))

    def _wait(self) -> bool:
        """Until there is something to do; False: stop."""
        with self._changed:
            while not (self._stopping or self._waiting or any(self._seats)):
                self._changed.wait()
            return not self._stopping

    def _turn(self) -> None:
        events: list[tuple[Handle, EngineEvent]] = []
        with self._changed:
            self._seats = [None if ticket and ticket.cancelled else ticket for ticket in self._seats]
            groups = self._called()
        for group in groups:
            events += self._begin(group)
        if any(self._seats):
            events += self._step()
        self._listener(events)

    def _called(self) -> list[list[Handle]]:
        """Who is next, first come first served, in groups whose prompts are read together."""
        free, groups = self._seats.count(None), []
        most = max(1, self.capacity // ROWS)
        while self._waiting and len(groups) < most:
            group: list[Handle] = []
            while self._waiting:
                ticket = self._waiting[0]
                if ticket.cancelled:
                    self._waiting.popleft()
                    continue
                distinct = {one.request.prompt for one in [*group, ticket]}
                if len(distinct) > ROWS or (group and ticket.request.score_prompt != group[0].request.score_prompt):
                    break
                if ticket.request.max_tokens:
                    if not free:
                        break
                    free -= 1
                group.append(self._waiting.popleft())
            if not group:
                break
            groups.append(group)
        return groups

    def _begin(self, group: list[Handle]) -> list[tuple[Handle, EngineEvent]]:
        """Read the prompts of a group, each once, and seat those who want more than scores."""
        prompts = {prompt: row for row, prompt in enumerate(dict.fromkeys(one.request.prompt for one in group))}
        longest = max(map(len, prompts))
        length = next(size for size in buckets(self.config.context) if size >= longest)
        prompted, scores = self._read(prompts, length, group[0].request.score_prompt)
        self._seat(prompted, [ticket for ticket in group if ticket.request.max_tokens], prompts)
        if scores is None:
            return []
        arrays = PrefillScores(*map(np.asarray, scores))
        return [(ticket, _scored(ticket.request, arrays, prompts[ticket.request.prompt])) for ticket in group]

    def _read(
        self, prompts: dict[tuple[int, ...], int], length: int, scored: bool
    ) -> tuple[PrefilledPrompts, PrefillScores | None]:
        rows = 1 if len(prompts) == 1 else ROWS
        tokens_BP, lengths_B = np.zeros((rows, length), np.int32), np.ones(rows, np.int32)
        for prompt, row in prompts.items():
            tokens_BP[row, length - len(prompt) :] = prompt
            lengths_B[row] = len(prompt)
        return read_prompts(self._params, tokens_BP, lengths_B, self.config, scored)

    def _seat(self, prompted: PrefilledPrompts, tickets: list[Handle], rows: dict[tuple[int, ...], int]) -> None:
        free = [slot for slot, ticket in enumerate(self._seats) if ticket is None]
        for first in range(0, len(tickets), ROWS):
            some, into = tickets[first : first + ROWS], free[first : first + ROWS][: len(tickets) - first]
            self._put(prompted, [ticket.request for ticket in some], [rows[one.request.prompt] for one in some], into)
            for slot, ticket in zip(into, some, strict=True):
                self._seats[slot] = ticket

    def _put(self, prompted: PrefilledPrompts, orders: list[DecodeRequest], source: list[int], into: list[int]) -> None:
        """Some slots begin their completions; the rows that are left over go nowhere."""
        idle = ROWS - len(orders)
        source_R = np.array(source + [0] * idle, np.int32)
        into_R = np.array(into + [self.capacity] * idle, np.int32)
        self._slots = place(self._slots, prompted, source_R, into_R, _wishes(orders, idle))

    def _step(self) -> list[tuple[Handle, EngineEvent]]:
        """Write some tokens; those who are done leave."""
        written = self._write(np.array([ticket is not None for ticket in self._seats]))
        counts, active, ids_TB, logprobs_TB = map(np.asarray, written[:4])
        tops = any(ticket and ticket.request.alternatives for ticket in self._seats)
        alternatives = tuple(map(np.asarray, written[4:])) if tops else ()
        events: list[tuple[Handle, EngineEvent]] = []
        for slot, ticket in enumerate(self._seats):
            if ticket is None:
                continue
            ids = ids_TB[: counts[slot], slot].tolist()
            finish: FinishReason | None = None
            if not active[slot]:
                finish = "stop" if ids[-1] in self._stops else "length"
                self._seats[slot] = None
                self._seconds += 0.1 * (time.monotonic() - ticket.submitted_at - self._seconds)
            self.tokens += len(ids)
            wanted = ticket.request.alternatives
            best = _tops(*(part[: counts[slot], slot, :wanted] for part in alternatives)) if wanted else []
            events.append((ticket, Chunk(ids, logprobs_TB[: counts[slot], slot].tolist(), best, finish)))
        return events

    def _write(self, kept_B: np.ndarray) -> SlotOutput:
        self._slots, written = advance(
            self._weights, self._slots, kept_B, self.config, self._stops, self._think_end, STRIDE
        )
        return written

    def _end(self, why: str) -> None:
        """Those who still wait for something hear why nothing comes."""
        with self._changed:
            self.failure = why
            left = [ticket for ticket in [*self._seats, *self._waiting] if ticket and not ticket.cancelled]
            self._waiting.clear()
            self._seats = [None] * self.capacity
        self._listener([(ticket, RequestFailed(why)) for ticket in left])


def buckets(context: int) -> list[int]:
    """The prompt lengths that programs are compiled for: 64, 128, 256, … and the context itself."""
    lengths = []
    size = SMALLEST_BUCKET
    while size < context:
        lengths.append(size)
        size *= 2
    return [*lengths, context]


def _wishes(orders: list[DecodeRequest], idle: int) -> SlotSettings:
    """Those of the orders, then of so many rows that nobody sits in."""
    rows = [*orders, *[DecodeRequest((0,), 1)] * idle]
    budgets = [-1 if order.thinking_budget is None else order.thinking_budget for order in rows]
    return SlotSettings(
        sample_keys([order.seed for order in rows]),
        np.array([order.temperature for order in rows], np.float32),
        np.array([order.top_k for order in rows], np.int32),
        np.array([order.top_p for order in rows], np.float32),
        np.array([order.max_tokens for order in rows], np.int32),
        np.array(budgets, np.int32),
        np.array([order.alternatives > 0 for order in rows]),
    )


def _scored(order: DecodeRequest, scores: PrefillScores, row: int) -> PromptScores:
    count = len(order.prompt) - 1
    first = scores.logprobs.shape[1] - count
    tops = _tops(
        scores.top_ids[row, first:, : order.alternatives], scores.top_logprobs[row, first:, : order.alternatives]
    )
    return PromptScores(scores.logprobs[row, first:].tolist(), tops if order.alternatives else [])


def _tops(ids_TN: np.ndarray, logprobs_TN: np.ndarray) -> list[list[tuple[int, float]]]:
    return [list(zip(*row, strict=True)) for row in zip(ids_TN.tolist(), logprobs_TN.tolist(), strict=True)]
