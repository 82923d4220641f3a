"""Continuous batching: a thread that fills free slots from a bounded queue and decodes all slots together.

Each iteration prefills the prompts of the next requests, a few at a time, then decodes up to `STRIDE` tokens in every
slot. A request that is complete or cancelled frees its slot at once for the next one. A sample depends only on its
prompt, its seed and its settings, never on other requests: it equals the sample of `model.decoding.generate`, which
uses the same uniform numbers.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import Array

from nautile.common.errors import ConfigError
from nautile.model.decoding.constrained import EVERY_TOKEN, MaskFailed, mask_words
from nautile.model.decoding.slots import (
    Chunk,
    DecodeRequest,
    EngineEvent,
    EngineStopped,
    FinishReason,
    Handle,
    PrefillScores,
    PromptScores,
    QueueFull,
    RequestFailed,
    SlotPrograms,
    slot_settings,
)

logger = logging.getLogger(__name__)

STRIDE = 4  # tokens per program; the queue is read in between. Starting one costs 0.2 ms, a small model's token 1 ms
ROWS = 4  # prompts prefilled by one program, and slots filled by one program


Listener = Callable[[list[tuple[Handle, EngineEvent]]], object]


class Engine:
    """Decodes as many samples at once as there are slots; up to `queue` more may wait.

    The listener runs in the engine's thread. `_changed` guards the state that callers change: the queue, the stop flag
    and cancellations. Only the engine's thread writes to `_active` and calls the programs.
    """

    def __init__(self, programs: SlotPrograms, queue: int) -> None:
        if programs.count < 1 or queue < 1:
            raise ConfigError(f"--slots {programs.count} and --queue {queue} must be 1 or more")
        self.config, self.capacity, self.queue = programs.config, programs.count, queue
        self._programs = programs
        self._active: list[Handle | None] = [None] * programs.count  # the request in each slot
        self._waiting: deque[Handle] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._mean_seconds = 1.0  # moving average of the time from a request's submission to its end
        self.ready = threading.Event()
        self.failure: str | None = None
        self.tokens = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._listener: Listener = lambda events: None

    def start(self, listener: Listener) -> None:
        """Start the thread, which compiles the programs, sets `ready` and then serves requests."""
        self._listener = listener
        self._thread.start()

    def close(self) -> bool:
        """Reject new requests, fail the present ones, and stop the thread. Returns whether it has stopped.

        Compilation cannot be interrupted: then this returns False, and the thread ends after the current program.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive() and not self.ready.is_set():
            self._fail_all("the server is stopping")
            return False
        if self._thread.ident is not None:
            self._thread.join()
        return True

    def submit(self, requests: Sequence[DecodeRequest]) -> list[Handle]:
        """Queue all requests or none. Raises `QueueFull`, `EngineStopped`, or `ConfigError` if one does not fit."""
        for request in requests:
            self._check(request)
        handles = [Handle(request) for request in requests]
        with self._changed:
            if self._stopping or self.failure:
                raise EngineStopped(self.failure or "the server is stopping")
            waiting = sum(not handle.cancelled for handle in self._waiting)
            if waiting + len(handles) > self.queue:
                seconds = math.ceil(self._mean_seconds * waiting / self.capacity)
                raise QueueFull(waiting, retry_after=min(60, max(1, seconds)))
            self._waiting.extend(handles)
            self._changed.notify()
        return handles

    def cancel(self, handles: Sequence[Handle]) -> None:
        """Cancel requests: their slots are free in the next iteration."""
        with self._changed:
            for handle in handles:
                handle.cancelled = True
            self._changed.notify()

    def load(self) -> tuple[int, int]:
        """The number of samples in slots, and of those waiting."""
        with self._changed:
            active = sum(handle is not None and not handle.cancelled for handle in self._active)
            return active, sum(not handle.cancelled for handle in self._waiting)

    def _check(self, request: DecodeRequest) -> None:
        length, context = len(request.prompt), self.config.context
        if not 1 <= length <= context - request.max_tokens:
            raise ConfigError(
                f"the prompt has {length} tokens and {request.max_tokens} more are asked for; together they must be at "
                f"most {context}, and the prompt not empty"
            )
        if request.max_tokens < 0 or (request.max_tokens == 0 and not request.score_prompt):
            raise ConfigError("max_tokens must be 1 or more, unless the prompt is only to be scored")
        if request.constraint and request.max_tokens < request.constraint.least_tokens:
            raise ConfigError(
                f"max_tokens {request.max_tokens}: a reply that meets the schema takes at least "
                f"{request.constraint.least_tokens} tokens"
            )
        if not 0 <= min(request.prompt) <= max(request.prompt) < self.config.vocabulary:
            raise ConfigError(
                f"the prompt has ids {min(request.prompt)} to {max(request.prompt)}, outside the vocabulary of "
                f"{self.config.vocabulary}"
            )

    def _run(self) -> None:
        """The main function of the engine's thread."""
        try:
            self._programs.start()
            self._compile()
            if not self._stopping:
                self.ready.set()
            while self._wait_for_work():
                self._iterate()
            self._fail_all("the server is stopping")
        except Exception as error:  # any error: every waiting client must get an answer
            logger.exception("the engine failed")
            cause = f"{type(error).__name__}: {error}".splitlines()[0]
            self._fail_all(f"the engine has failed ({cause}); restart the server")

    def _compile(self) -> None:
        """Compile the programs, except the rarely used ones that score prompts.

        Before the engine is ready: compilation takes seconds, for which no request should wait.
        """
        for empty in self._programs.prepare((1, ROWS)):
            if self._stopping:
                return
            self._fill(empty, [], [], [])
        self._programs.advance(np.zeros(self.capacity, bool), STRIDE)

    def _wait_for_work(self) -> bool:
        """Wait for a request; return False when the engine must stop."""
        with self._changed:
            while not (self._stopping or self._waiting or any(self._active)):
                self._changed.wait()
            return not self._stopping

    def _iterate(self) -> None:
        """Free the slots of cancelled requests, admit waiting requests, decode a stride, and report the events."""
        events: list[tuple[Handle, EngineEvent]] = []
        with self._changed:
            # Under the lock: from here on a request that is cancelled keeps its slot until the next iteration.
            self._active = [None if handle and handle.cancelled else handle for handle in self._active]
            groups = self._admit()
        for group in groups:
            events += self._start_group(group)
        if any(self._active):
            events += self._decode()
        self._listener(events)

    def _admit(self) -> list[list[Handle]]:
        """Take the next requests from the queue, in order, in groups that one program can prefill.

        A group has at most `ROWS` distinct prompts, either all scored or none. The number of groups is limited, so that
        a long queue does not delay the samples being decoded.
        """
        free = self._active.count(None)
        groups: list[list[Handle]] = []
        # As many as fill all slots once.
        limit = max(1, self.capacity // ROWS)
        while self._waiting and len(groups) < limit:
            group: list[Handle] = []
            while self._waiting:
                handle = self._waiting[0]
                if handle.cancelled:
                    self._waiting.popleft()
                    continue
                prompts = {other.request.prompt for other in [*group, handle]}
                if len(prompts) > ROWS or (group and handle.request.score_prompt != group[0].request.score_prompt):
                    break
                # A request that only scores its prompt needs no slot.
                if handle.request.max_tokens:
                    if not free:
                        break
                    free -= 1
                group.append(self._waiting.popleft())
            if not group:
                break
            groups.append(group)
        return groups

    def _start_group(self, group: list[Handle]) -> list[tuple[Handle, EngineEvent]]:
        """Prefill the distinct prompts of a group, and put the requests that generate tokens into slots."""
        rows = {prompt: row for row, prompt in enumerate(dict.fromkeys(handle.request.prompt for handle in group))}
        longest = max(map(len, rows))
        length = next((size for size in self._programs.lengths if size >= longest), longest)
        prefilled, scores = self._prefill(rows, length, group[0].request.score_prompt)
        decoding = [handle for handle in group if handle.request.max_tokens]
        free = [slot for slot, handle in enumerate(self._active) if handle is None]
        for first in range(0, len(decoding), ROWS):
            batch = decoding[first : first + ROWS]
            slots = free[first : first + len(batch)]
            requests = [handle.request for handle in batch]
            self._fill(prefilled, requests, [rows[request.prompt] for request in requests], slots)
            for slot, handle in zip(slots, batch, strict=True):
                self._active[slot] = handle
                handle.mask = handle.request.constraint.begin() if handle.request.constraint else None
        if scores is None:
            return []
        arrays = PrefillScores(*map(np.asarray, scores))
        return [(handle, _prompt_scores(handle.request, arrays, rows[handle.request.prompt])) for handle in group]

    def _prefill(self, rows: dict[tuple[int, ...], int], length: int, score: bool) -> tuple[Any, PrefillScores | None]:
        """Prefill prompts in their `rows`, right-aligned in `length` columns.

        A runtime that compiles per shape (one with `lengths`) gets 1 or `ROWS` rows.
        """
        count = len(rows) if not self._programs.lengths else 1 if len(rows) == 1 else ROWS
        tokens_BP, lengths_B = np.zeros((count, length), np.int32), np.ones(count, np.int32)
        for prompt, row in rows.items():
            tokens_BP[row, length - len(prompt) :] = prompt
            lengths_B[row] = len(prompt)
        return self._programs.prefill(tokens_BP, lengths_B, score)

    def _fill(self, prefilled: Any, requests: list[DecodeRequest], source: list[int], slots: list[int]) -> None:
        """Start `requests[r]` in slot `slots[r]` from prompt row `source[r]`; padding rows get no slot."""
        unused = ROWS - len(requests)
        source_R = np.array(source + [0] * unused, np.int32)
        slots_R = np.array(slots + [self.capacity] * unused, np.int32)
        self._programs.fill(prefilled, source_R, slots_R, slot_settings(requests, unused))

    def _decode(self) -> list[tuple[Handle, EngineEvent]]:
        """Decode up to `STRIDE` tokens in every slot, and free the slots of completed samples.

        With a constrained sample in any slot it is one token, because the next mask depends on it.
        """
        events, allowed_BW = self._masks()
        occupied_B = np.array([handle is not None for handle in self._active])
        output = self._programs.advance(occupied_B, STRIDE if allowed_BW is None else 1, allowed_BW)
        # Here the host waits for the device.
        counts, active, ids_TB, logprobs_TB = map(np.asarray, output[:4])
        # The alternatives are large: copy them from the device only if a request asks for them.
        has_alternatives = any(handle and handle.request.alternatives for handle in self._active)
        alternatives = tuple(map(np.asarray, output[4:])) if has_alternatives else ()
        for slot, handle in enumerate(self._active):
            if handle is None:
                continue
            ids = ids_TB[: counts[slot], slot].tolist()
            finish: FinishReason | None = None
            # A slot that is no longer active has written its last token, and is free.
            if not active[slot]:
                finish = "stop" if ids[-1] in self._programs.stops else "length"
                self._active[slot] = None
                self._mean_seconds += 0.1 * (time.monotonic() - handle.submitted_at - self._mean_seconds)
            elif handle.mask:  # constrained: one token per call, so `ids` has one
                handle.mask.accept(ids[-1])
            self.tokens += len(ids)
            number = handle.request.alternatives
            likeliest = _pairs(*(part[: counts[slot], slot, :number] for part in alternatives)) if number else []
            events.append((handle, Chunk(ids, logprobs_TB[: counts[slot], slot].tolist(), likeliest, finish)))
        return events

    def _masks(self) -> tuple[list[tuple[Handle, EngineEvent]], np.ndarray | None]:
        """The failures of constrained samples, whose slots are then free, and the masks of all slots [B, W].

        The masks are None if no sample is constrained.
        """
        if not any(handle and handle.mask for handle in self._active):
            return [], None
        failures: list[tuple[Handle, EngineEvent]] = []
        allowed_BW = np.full((self.capacity, mask_words(self.config.vocabulary)), EVERY_TOKEN, np.uint32)
        for slot, handle in enumerate(self._active):
            if handle and handle.mask:
                try:
                    handle.mask.write(allowed_BW[slot])
                except MaskFailed as error:
                    failures.append((handle, RequestFailed(str(error))))
                    self._active[slot], allowed_BW[slot] = None, EVERY_TOKEN
        return failures, allowed_BW

    def _fail_all(self, reason: str) -> None:
        """Report `RequestFailed` for every request in a slot or in the queue."""
        with self._changed:
            self.failure = reason
            handles = [handle for handle in [*self._active, *self._waiting] if handle and not handle.cancelled]
            self._waiting.clear()
            self._active = [None] * self.capacity
        if handles:
            self._listener([(handle, RequestFailed(reason)) for handle in handles])


def _prompt_scores(request: DecodeRequest, scores: PrefillScores, row: int) -> PromptScores:
    """The scores of one prompt, from its right-aligned row."""
    first = scores.logprobs.shape[1] - (len(request.prompt) - 1)
    number = request.alternatives
    likeliest = (
        _pairs(scores.top_ids[row, first:, :number], scores.top_logprobs[row, first:, :number]) if number else []
    )
    return PromptScores(scores.logprobs[row, first:].tolist(), likeliest)


def _pairs(ids_TN: Array | np.ndarray, logprobs_TN: Array | np.ndarray) -> list[list[tuple[int, float]]]:
    """(id, log p) of the alternatives at each position, without those excluded by a mask."""
    rows = zip(ids_TN.tolist(), logprobs_TN.tolist(), strict=True)
    return [[(token, value) for token, value in zip(*row, strict=True) if value > -math.inf] for row in rows]
