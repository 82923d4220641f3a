"""An endpoint asked through its vendor's batch interface: half the price, an answer within a day, no request twice.

Requests are gathered into jobs. Money is set aside and a job is on disk before anything is sent, and its id is kept as
soon as there is one. A process that finds jobs of an earlier one goes on with them: it polls what was created, looks
among the vendor's jobs for one whose id was lost, and sends only what was never sent. Replies go into the ledger one by
one, so a process killed amid them goes on where it was.
"""

import asyncio
import json
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from common.errors import ConfigError
from data.endpoints.batch.jobs import PendingJob, pending_jobs
from data.endpoints.batch.vendors import BatchClient, BatchJob, batch_client, read_line
from data.endpoints.budget import NO_USAGE, Usage
from data.endpoints.chat_types import (
    CallError,
    ChatFailure,
    ChatReply,
    ChatRequest,
    actual_usage,
    call_row,
    max_usage,
    reply_cost,
)
from data.endpoints.circuit_breaker import backoff
from data.endpoints.clients import LONGEST_MESSAGE, check_key, parse_completion, redact_key
from data.endpoints.endpoint import Endpoint
from data.endpoints.reply_cache import ReplyCache

logger = logging.getLogger(__name__)

LINGER_S = 1.0  # without a new request, after which what there is becomes a job
PATIENCE_S = 900.0  # with a vendor that does not answer; the job goes on meanwhile
SLOWEST_POLL = 20  # times the first
LONGEST_REST_S = 600.0  # before a job that the vendor had no room for is tried again
GROUP = 256  # replies recorded together
Value = TypeVar("Value")
Result = ChatReply | ChatFailure | CallError  # the last: the request may be put into another job


def jobs_folder(cache: Path) -> Path:
    """Where the jobs of a file of replies are kept."""
    return cache.with_name(f"{cache.name}.batches")


class BatchQueue:
    """The batch interface of one endpoint. Lives in the pool's loop. Raises `ConfigError` for unreadable job files."""

    def __init__(self, endpoint: Endpoint, folder: Path, ledger: ReplyCache) -> None:
        self._endpoint, self._folder, self._ledger = endpoint, folder, ledger
        self._config, self._batch = endpoint.config, endpoint.config.batch
        self._made: BatchClient | None = None
        self._waiting: dict[str, asyncio.Future[Result]] = {}
        self._queue: deque[tuple[str, ChatRequest, int]] = deque()
        self._arrived = asyncio.Event()
        self._slots = asyncio.Semaphore(self._batch.jobs_at_once)
        self._gathering: asyncio.Task[None] | None = None
        self._jobs: dict[str, PendingJob] = {}  # by label
        self._under_way: set[str] = set()  # digests of the requests in them
        self._tasks: dict[str, asyncio.Task[None]] = {}
        for job in pending_jobs(folder, endpoint.name):
            self._take_up(job)
            endpoint.purse.hold(job.reserved)
            logger.info("endpoint %r: batch job %s is taken up again", endpoint.name, job.id or job.label)

    @property
    def capacity(self) -> int:
        """Requests that may be under way together."""
        return self._batch.requests_per_job * self._batch.jobs_at_once

    async def ask(self, digest: str, request: ChatRequest) -> ChatReply | ChatFailure:
        """The reply, or why there is none after as many jobs as the endpoint has `attempts`."""
        attempts = self._config.attempts
        for attempt in range(1, attempts + 1):
            outcome = await asyncio.shield(self._submit(digest, request, attempt))
            if not isinstance(outcome, CallError):
                return outcome
            if not outcome.worth_another or attempt == attempts:
                break
            if outcome.reason == "rate_limited":
                await asyncio.sleep(min(LONGEST_REST_S, self._batch.poll_s * 2**attempt))
        return ChatFailure(outcome.reason, f"endpoint {self._endpoint.name!r}: {outcome.message}", attempt)

    def resume(self) -> None:
        """Go on with every job that nobody sees to: an earlier process left it, or the vendor did not answer."""
        for job in list(self._jobs.values()):
            self._see_to(job)

    async def close(self) -> None:
        """The jobs go on at the vendor's, and stay on disk for the next process."""
        if self._made is not None:
            await self._made.close()

    @property
    def _client(self) -> BatchClient:
        if self._made is None:
            self._made = batch_client(self._config, self._endpoint.pace.told)
        return self._made

    def _submit(self, digest: str, request: ChatRequest, attempt: int) -> asyncio.Future[Result]:
        """Wait for the job that has the request; put it into the next one if none has."""
        if digest not in self._waiting:
            self._waiting[digest] = asyncio.get_running_loop().create_future()
            if digest in self._under_way:
                self.resume()
            else:
                self._queue.append((digest, request, attempt))
                self._arrived.set()
                if self._gathering is None or self._gathering.done():
                    self._gathering = asyncio.create_task(self._gather())
        return self._waiting[digest]

    def _tell(self, digest: str, result: Result | Exception) -> None:
        future = self._waiting.pop(digest, None)
        if future is None or future.done():
            return
        if isinstance(result, Exception) and not isinstance(result, CallError):
            future.set_exception(result)
        else:
            future.set_result(result)

    async def _gather(self) -> None:
        """Make jobs of what is asked, as many at once as are allowed."""
        while self._queue:
            await self._quiet()
            await self._slots.acquire()
            job = None
            try:
                job = await self._next_job()
            except OSError as error:
                for digest, *_ in self._queue:
                    self._tell(digest, error)
                self._queue.clear()
            finally:
                if job is None:
                    self._slots.release()
            if job is not None:
                self._take_up(job)
                self._see_to(job).add_done_callback(lambda _: self._slots.release())

    async def _quiet(self) -> None:
        """Until a job is full, or nothing has come for a while."""
        while len(self._queue) < self._batch.requests_per_job:
            self._arrived.clear()
            try:
                async with asyncio.timeout(LINGER_S):
                    await self._arrived.wait()
            except TimeoutError:
                return

    async def _next_job(self) -> PendingJob | None:
        """The first requests of the queue as a job on disk, as many as it may hold and as there is money for."""
        purse, taken, size, reserved = self._endpoint.purse, list[tuple[str, ChatRequest, int]](), 0, NO_USAGE
        while self._queue and len(taken) < self._batch.requests_per_job:
            digest, request, _ = self._queue[0]
            size += len(self._line(digest, request))
            amount = max_usage(self._config, request)
            if taken and (size > self._batch.bytes_per_job or not purse.fits(reserved + amount)):
                break
            if not taken and not purse.fits(amount):
                spent_up = await purse.reserve(amount)  # waits for the jobs under way: they may cost less
                if spent_up is None:
                    await purse.settle(amount, NO_USAGE)
                else:
                    self._queue.popleft()
                    self._tell(digest, ChatFailure("budget", str(spent_up), 0))
                size = 0
                continue
            reserved += amount
            taken.append(self._queue.popleft())
        if not taken:
            return None
        purse.hold(reserved)
        requests = {digest: request for digest, request, _ in taken}
        attempts = {digest: attempt for digest, _, attempt in taken}
        try:
            return await asyncio.to_thread(
                PendingJob.write, self._folder, self._endpoint.name, requests, reserved, attempts
            )
        except OSError as error:
            for digest in requests:
                self._tell(digest, error)
            raise

    def _take_up(self, job: PendingJob) -> None:
        self._jobs[job.label] = job
        self._under_way |= job.requests.keys()

    def _see_to(self, job: PendingJob) -> asyncio.Task[None]:
        task = self._tasks.get(job.label)
        if task is None or task.done():
            task = self._tasks[job.label] = asyncio.create_task(self._see_through(job))
        return task

    async def _see_through(self, job: PendingJob) -> None:
        """From wherever the job is to its end. A failure of ours or the vendor's leaves it for the next time."""
        try:
            if job.phase != "created" and (refusal := await self._send(job)) is not None:
                results, spent = dict.fromkeys(job.requests, refusal), NO_USAGE
            else:
                results, spent = await self._collect(job, await self._poll(job))
        except CallError as error:
            told = ChatFailure(error.reason, f"endpoint {self._endpoint.name!r}: {error.message}", 1)
            for digest in job.requests:
                self._tell(digest, told)
            return
        except OSError as error:
            for digest in job.requests:
                self._tell(digest, error)
            return
        await asyncio.to_thread(job.remove)
        del self._jobs[job.label]
        self._under_way -= job.requests.keys()
        await self._endpoint.purse.settle(job.reserved, spent)
        for digest, result in results.items():
            self._tell(digest, result)

    async def _send(self, job: PendingJob) -> CallError | None:
        """Have the vendor make the job, once. What it says if it will not."""
        unsure = job.phase == "creating"

        async def create() -> str:
            nonlocal unsure
            if unsure and (found := await self._client.find(job.label, job.written)) is not None:
                return found
            unsure = True
            try:
                return await self._client.create(str(job.file), job.label)
            except CallError as error:
                unsure = error.worth_another and error.reason != "rate_limited"
                raise

        try:
            if job.phase == "written":
                lines = b"".join(self._line(digest, request) for digest, request in job.requests.items())
                job.file = await self._patiently(lambda: self._client.upload(f"{job.label}.jsonl", lines))
                job.phase = "creating"
                await asyncio.to_thread(job.save)
            job.id = await self._patiently(create)
        except CallError as error:
            if error.reason in ("refused", "misconfigured"):
                return error
            raise
        job.phase = "created"
        await asyncio.to_thread(job.save)
        count, name = len(job.requests), self._endpoint.name
        logger.info("endpoint %r: batch job %s of %d requests is under way", name, job.id, count)
        return None

    async def _poll(self, job: PendingJob) -> BatchJob:
        wait = self._batch.poll_s
        while True:
            seen = await self._patiently(lambda: self._client.look(str(job.id)))
            if seen.ended:
                return seen
            if time.time() - job.written > self._batch.give_up_hours * 3600:
                hours = self._batch.give_up_hours
                raise CallError("outage", f"batch job {job.id} is still {seen.state!r} after {hours:g} hours")
            await asyncio.sleep(wait * random.uniform(0.8, 1.0))
            wait = min(wait * 2, self._batch.poll_s * SLOWEST_POLL)

    async def _collect(self, job: PendingJob, seen: BatchJob) -> tuple[dict[str, Result], Usage]:
        """The results of a job that has ended, all of them in the ledger, and what they used up."""
        bodies: dict[str, dict[str, Any] | CallError] = {}
        for file in seen.files:
            for line in (await self._patiently(lambda file=file: self._client.read(file))).splitlines():
                try:
                    digest, body = read_line(line)
                except (ValueError, LookupError, TypeError, AttributeError):
                    logger.warning("batch job %s: a line of %d bytes is no result: passed over", job.id, len(line))
                    continue
                if digest in job.requests:
                    bodies[digest] = body
        why = CallError("expired", f"batch job {job.id} ended as {seen.state!r} without it", seen.state)
        if seen.failed:
            full = "limit" in seen.message
            why = CallError("rate_limited" if full else "refused", f"batch job {job.id}: {seen.message}", seen.state)
        results, spent = dict[str, Result](), NO_USAGE
        digests = list(job.requests)
        for start in range(0, len(digests), GROUP):
            group = digests[start : start + GROUP]
            recorded = await asyncio.gather(*(self._record(job, one, bodies.get(one, why)) for one in group))
            for digest, (result, amount) in zip(group, recorded, strict=True):
                results[digest] = result
                spent += amount
        return results, spent

    async def _record(self, job: PendingJob, digest: str, body: dict[str, Any] | CallError) -> tuple[Result, Usage]:
        request, name, config = job.requests[digest], self._endpoint.name, self._config
        row = {"attempt": job.attempts.get(digest, 1), "latency_s": None, "job": job.id}
        if (known := self._ledger.reply(digest)) is not None:
            return known, NO_USAGE  # by an earlier process, which counted it
        try:
            if isinstance(body, CallError):
                raise body
            said = parse_completion(body, config)
        except (CallError, AttributeError, TypeError, LookupError) as caught:
            error = caught if isinstance(caught, CallError) else CallError("invalid_reply", "no chat completion in it")
            message = " ".join(redact_key(error.message, config).split())[:LONGEST_MESSAGE]
            error = CallError(error.reason, message, error.status)
            await self._ledger.record(call_row(request, digest, name, config, error, **row))
            return error, NO_USAGE
        reply = ChatReply(said.text, said.finish, said.tokens_in, said.tokens_out, None, False, digest, name)
        cost = reply_cost(config, said.tokens_in, said.tokens_out)
        spent = actual_usage(reply, cost, max_usage(config, request))
        await self._ledger.record(call_row(request, digest, name, config, reply, cost=cost, **row), reply, spent)
        return reply, spent

    async def _patiently(self, call: Callable[[], Awaitable[Value]]) -> Value:
        """Call until the vendor answers. Raises `CallError`: its own refusal, or an outage."""
        until, attempt = time.monotonic() + PATIENCE_S, 0
        while True:
            attempt += 1
            try:
                check_key(self._endpoint.name, self._config)
                return await call()
            except ConfigError as error:
                raise CallError("misconfigured", str(error), "no key") from None
            except CallError as error:
                if not error.worth_another:
                    raise
                if time.monotonic() > until:
                    raise CallError("outage", f"its batch interface has stopped answering: {error.message}") from None
                logger.warning("endpoint %r: batch interface: %s; asked again", self._endpoint.name, error.message)
                await asyncio.sleep(error.retry_after if error.retry_after is not None else backoff(attempt))

    def _line(self, digest: str, request: ChatRequest) -> bytes:
        return json.dumps(self._client.line(digest, request)).encode() + b"\n"
