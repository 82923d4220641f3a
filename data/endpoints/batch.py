"""The queue of an endpoint in batch mode: half the price, replies within a day, and no request sent twice.

Requests are collected into jobs. Before anything is sent, the budget is reserved and the job is on disk; its id is
saved as soon as it is known. A process resumes the jobs of an earlier one: it polls a job that was created, searches
the vendor's jobs for one whose id was lost, and sends only what was never sent. Replies are cached in small groups, so
that a killed process loses little.
"""

import asyncio
import json
import logging
import random
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from nautile.common.errors import ConfigError
from nautile.common.files import write_atomically
from nautile.common.retry import retry_async
from nautile.data.endpoints import circuit_breaker
from nautile.data.endpoints.budget import NO_USAGE, Usage
from nautile.data.endpoints.chat_types import (
    CallError,
    ChatFailure,
    ChatReply,
    ChatRequest,
    FailureReason,
    actual_usage,
    call_row,
    limits_of,
    max_usage,
    reply_cost,
)
from nautile.data.endpoints.clients import BatchJob, Client, without_key
from nautile.data.endpoints.completions import parse_completion, parse_result_line
from nautile.data.endpoints.endpoint import Endpoint, client_for, reply_of
from nautile.data.endpoints.keys import check_key, safe_message
from nautile.data.endpoints.reply_cache import BATCHES

REQUESTS, STATE = ".requests.jsonl", ".job.json"
Phase = Literal["written", "creating", "created"]

logger = logging.getLogger(__name__)

LINGER_S = 1.0  # time without a new request after which the queue becomes a job
GIVE_UP_S = 900.0  # time after which a vendor that does not answer counts as an outage; the job itself continues
SLOWEST_POLL = 20  # longest pause between polls, as a multiple of the first
LONGEST_REST_S = 600.0  # longest pause before requests that the vendor had no capacity for are sent again
FILE_TIMEOUT_FACTOR, FILE_CONNECTIONS = 5, 8  # times the timeout of a chat request, for uploads and downloads
LOOKS_FOR_FILES = 3  # of a job that has ended
LARGEST_JOB = 100 * 2**20  # bytes; OpenAI accepts 200 MB per file
GROUP = 256  # replies recorded together


@dataclass
class PendingJob:
    """A batch job of one endpoint: its requests by digest, and the budget that is reserved for them.

    `spent` and `unknown`: the cost of the replies that this process has recorded. `attempts`: by digest, which attempt
    at the request this job is.
    """

    folder: Path
    endpoint: str
    label: str  # unique, and in the vendor's metadata
    requests: dict[str, ChatRequest] = field(repr=False)
    reserved: Usage
    written_at: float  # seconds since the epoch
    attempts: dict[str, int] = field(default_factory=dict)
    phase: Phase = "written"
    file: str | None = None
    id: str | None = None
    spent: Usage = NO_USAGE
    unknown: Usage = NO_USAGE

    @classmethod
    def write(
        cls,
        folder: Path,
        endpoint: str,
        requests: dict[str, ChatRequest],
        reserved: Usage,
        attempts: dict[str, int],
        acquire: Callable[[str], bool],
    ) -> "PendingJob":
        """Create a job and write it to disk. `acquire` takes the lock of its label. Raises `OSError`."""
        job = cls(folder, endpoint, uuid.uuid4().hex, requests, reserved, time.time(), attempts)
        rows = (
            {"digest": digest, "attempt": attempts.get(digest, 1), "request": asdict(request)}
            for digest, request in requests.items()
        )
        write_atomically(job._path(REQUESTS), b"".join(json.dumps(row).encode() + b"\n" for row in rows))
        # Locked before it exists: a process that starts now would take it for a dead one's, and both would send it.
        acquire(job.label)
        job.save()
        return job

    def save(self) -> None:
        state = {
            "endpoint": self.endpoint,
            "label": self.label,
            "reserved": [self.reserved.dollars, self.reserved.tokens],
            "written": self.written_at,
            "phase": self.phase,
            "file": self.file,
            "id": self.id,
        }
        write_atomically(self._path(STATE), json.dumps(state).encode())

    def remove(self) -> None:
        """Delete the files, once all replies are cached. The state is deleted first: it is what makes the job exist."""
        self._path(STATE).unlink(missing_ok=True)
        self._path(REQUESTS).unlink(missing_ok=True)

    def _path(self, suffix: str) -> Path:
        return self.folder / f"{self.label}{suffix}"


def pending_jobs(folder: Path, endpoint: str, acquire: Callable[[str], bool]) -> list[PendingJob]:
    """Load the jobs of earlier processes, oldest first, except those whose lock another process holds.

    `acquire(label)` takes the lock of a job, or returns False. Raises `ConfigError` for an unreadable job.
    """
    jobs = []
    for path in sorted(folder.glob(f"*{STATE}")):
        label = path.name.removesuffix(STATE)
        state = _read_state(path)
        # Read the state again under the lock: the process that held it may have finished the job.
        if state is None or state["endpoint"] != endpoint or not acquire(label) or (state := _read_state(path)) is None:
            continue
        try:
            rows = [json.loads(line) for line in path.with_name(f"{label}{REQUESTS}").read_bytes().splitlines()]
            requests = {
                row["digest"]: ChatRequest(**{**row["request"], "messages": tuple(row["request"]["messages"])})
                for row in rows
            }
            attempts = {row["digest"]: row["attempt"] for row in rows}
            reserved = Usage(*state["reserved"])
            job = PendingJob(folder, endpoint, label, requests, reserved, state["written"], attempts)
            job.phase, job.file, job.id = state["phase"], state["file"], state["id"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(_unreadable(path, error)) from None
        jobs.append(job)
    return sorted(jobs, key=lambda job: job.written_at)


def check_no_pending_jobs(folder: Path, endpoint: str) -> None:
    """Raise `ConfigError` if an endpoint that is no longer in batch mode has a job in progress, which is paid for."""
    for path in sorted(folder.glob(f"*{STATE}")):
        if (state := _read_state(path)) is not None and state["endpoint"] == endpoint:
            job = state["id"] or path.name.removesuffix(STATE)
            raise ConfigError(
                f"endpoint {endpoint!r} has batch job {job} in progress, but its mode is no longer 'batch': "
                f"set it back until the job has ended, or cancel the job at the vendor's and delete {path}"
            )


def _read_state(path: Path) -> dict[str, Any] | None:
    """Read the state of a job; None if the job has ended. Raises `ConfigError` if it is unreadable."""
    try:
        state = json.loads(path.read_bytes())
        return {name: state[name] for name in ("endpoint", "reserved", "written", "phase", "file", "id")}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(_unreadable(path, error)) from None


def _unreadable(path: Path, error: Exception) -> str:
    return f"{path}: its batch job cannot be resumed ({error}); cancel the job at the vendor's and delete the file"


Value = TypeVar("Value")
JobResult = ChatReply | ChatFailure | CallError  # of one request; after a `CallError` it may go into another job


class BatchQueue:
    """Answers requests of one endpoint by batch jobs. Used in the pool's event loop.

    `ask` puts a request into `_queue` with a future in `_results`; `_collect_jobs` makes `PendingJob`s of the queue;
    `_finish_job` sends a job, polls it, records its replies and sets the futures. The constructor raises `ConfigError`
    for unreadable job files.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint, self._folder, self._cache = endpoint, endpoint.cache.folder / BATCHES, endpoint.cache
        self._config, self._batch = endpoint.config, endpoint.config.batch
        assert self._config.vendor.batch is not None, "checked by the section"
        self._interface = self._config.vendor.batch
        self._opened_client: Client | None = None
        self._results: dict[str, asyncio.Future[JobResult]] = {}  # by digest, of requests in progress
        self._queue: deque[tuple[str, ChatRequest, int]] = deque()  # digest, request, attempt
        self._arrival = asyncio.Event()
        self.more_follow = False  # whether the session is about to submit more requests
        self._job_slots = asyncio.Semaphore(self._batch.jobs_at_once)
        self._collector: asyncio.Task[None] | None = None
        self._jobs: dict[str, PendingJob] = {}  # by label
        self._digests_in_jobs: set[str] = set()
        self._asked: set[str] = set()  # digests of the requests whose `ask` has not returned
        self._job_tasks: dict[str, asyncio.Task[None]] = {}  # by label
        self._take_over_jobs()

    @property
    def capacity(self) -> int:
        """Requests that may be in progress at once: those in jobs, and those of the next job, which waits."""
        return self._batch.requests_per_job * (self._batch.jobs_at_once + 1)

    async def ask(self, digest: str, request: ChatRequest) -> ChatReply | ChatFailure:
        """Answer a request; it is put into up to `attempts` jobs."""
        attempts = self._config.attempts
        self._asked.add(digest)
        try:
            for attempt in range(1, attempts + 1):
                # Everybody who waits for this digest shares the future: cancelling one must not cancel it for all.
                result = await asyncio.shield(self._submit(digest, request, attempt))
                if not isinstance(result, CallError):
                    return result
                if not result.retryable or attempt == attempts:
                    break
                if result.reason == "rate_limited":
                    await asyncio.sleep(min(LONGEST_REST_S, self._batch.poll_s * 2**attempt))
        finally:
            self._asked.discard(digest)
        assert isinstance(result, CallError)  # any other result was returned above
        # A row that failed in a job whose others were answered is no outage.
        own = (self._endpoint.has_answered and result.reason in ("server_error", "invalid_reply")) or None
        return ChatFailure(result.reason, f"endpoint {self._endpoint.name!r}: {result.message}", attempt, own)

    def has_in_job(self, digest: str) -> bool:
        """Whether a job in progress has the request; its lock is then released when the job has ended.

        Not before `ask` has returned, though: a request that failed in a job may go into another one.
        """
        return digest in self._digests_in_jobs

    def drop_queued(self) -> None:
        """Fail the requests that are not in a job yet."""
        for digest, *_ in self._queue:
            self._set_result(digest, ChatFailure("outage", "no more requests are sent", 0))
        self._queue.clear()

    def resume(self) -> None:
        """Continue every job without a running task (left by an earlier process, or after an outage)."""
        for job in list(self._jobs.values()):
            self._start(job)

    async def close(self) -> None:
        """Close the client. The vendor continues the jobs, and their files stay on disk for the next process."""
        if self._opened_client is not None:
            await self._opened_client.close()

    @property
    def _client(self) -> Client:
        if self._opened_client is None:
            timeout_s = FILE_TIMEOUT_FACTOR * self._config.timeout_s
            config = self._config.model_copy(update={"timeout_s": timeout_s, "concurrency": FILE_CONNECTIONS})
            self._opened_client = client_for(config, self._endpoint.rate_limiter.on_headers)
        return self._opened_client

    def _submit(self, digest: str, request: ChatRequest, attempt: int) -> asyncio.Future[JobResult]:
        """The future result of a request; it is queued for the next job unless a job has it already."""
        if digest not in self._results:
            self._results[digest] = asyncio.get_running_loop().create_future()
            if digest in self._digests_in_jobs:
                self.resume()
            else:
                self._queue.append((digest, request, attempt))
                self._arrival.set()
                if self._collector is None or self._collector.done():
                    self._collector = asyncio.create_task(self._collect_jobs())
        return self._results[digest]

    def _set_result(self, digest: str, result: JobResult | Exception) -> None:
        future = self._results.pop(digest, None)
        if future is None or future.done():
            return
        if isinstance(result, Exception) and not isinstance(result, CallError):
            future.set_exception(result)
        else:
            future.set_result(result)

    async def _collect_jobs(self) -> None:
        """Make jobs of the queue until it is empty; at most `jobs_at_once` are in progress."""
        while self._queue:
            # The slot comes first: while all slots are in use, requests go on collecting for the next job.
            await self._job_slots.acquire()
            await self._wait_for_full_job()
            job = None
            try:
                job = await self._next_job()
            except Exception as error:
                self._log_error(error, "no batch job could be made")
                for digest, *_ in self._queue:
                    self._set_result(digest, error)
                self._queue.clear()
            finally:
                if job is None:
                    self._job_slots.release()
            if job is not None:
                self._register(job)
                self._start(job).add_done_callback(lambda _: self._job_slots.release())

    async def _wait_for_full_job(self) -> None:
        """Wait until the queue fills a job, or until no request has come for `LINGER_S` and no more will follow."""
        while len(self._queue) < self._batch.requests_per_job:
            self._arrival.clear()
            try:
                async with asyncio.timeout(LINGER_S):
                    await self._arrival.wait()
            except TimeoutError:
                if not self.more_follow:
                    return

    async def _next_job(self) -> PendingJob | None:
        """Write a job of the first requests in the queue: as many as a job may hold and the budget allows.

        Returns None if the budget allows none of the requests in the queue.
        """
        # A process that shared the replies may have died with requests of this queue in a job. Its vendor answers them,
        # and charges for them, so they are not sent again: `_finish_job` passes its results to those who wait.
        if self._take_over_jobs():
            self._queue = deque(entry for entry in self._queue if entry[0] not in self._digests_in_jobs)
            self.resume()
        budget, entries, size, reserved = self._endpoint.budget, list[tuple[str, ChatRequest, int]](), 0, NO_USAGE
        while self._queue and len(entries) < self._batch.requests_per_job:
            digest, request, _ = self._queue[0]
            size += len(self._input_line(digest, request))
            amount = self._endpoint.reservation(request)
            if entries and (size > LARGEST_JOB or not budget.fits(reserved + amount)):
                break
            if not entries and not budget.fits(amount):
                # Not even one request fits now. `reserve` waits, because jobs in progress may cost less than was
                # reserved for them. If it fits then, release it and start over; else this request fails.
                if (spent_limit := await budget.reserve(amount)) is None:
                    await budget.settle(amount, NO_USAGE)
                elif self._queue and self._queue[0][0] == digest:  # not if it was dropped meanwhile
                    self._queue.popleft()
                    self._set_result(digest, self._endpoint.budget_failure(spent_limit, 0))
                size = 0
                continue
            reserved += amount
            entries.append(self._queue.popleft())
        if not entries:
            return None
        # Nothing was awaited since `fits` agreed, so no other request can have taken this money. From here on it is
        # reserved, and only then is the job written.
        budget.hold(reserved)
        requests = {digest: request for digest, request, _ in entries}
        attempts = {digest: attempt for digest, _, attempt in entries}
        # From here on they keep their locks, even if the session that asked ends while the job is being written.
        self._digests_in_jobs |= requests.keys()
        try:
            return await asyncio.to_thread(
                PendingJob.write,
                *(self._folder, self._endpoint.name, requests, reserved, attempts, self._cache.locks.acquire),
            )
        except Exception as error:
            self._digests_in_jobs -= requests.keys()
            for digest in requests.keys() - self._asked:
                self._cache.locks.release(digest)
            await budget.settle(reserved, NO_USAGE)
            for digest in requests:
                self._set_result(digest, error)
            raise

    def _take_over_jobs(self) -> bool:
        """Register the jobs of processes that have died, before this one began or since.

        Their reservations may exceed the limit, as they have been sent. Returns whether there were any.
        """
        name, locks = self._endpoint.name, self._cache.locks
        # This process has the locks of its own jobs, and would get them again.
        jobs = pending_jobs(self._folder, name, lambda label: label not in self._jobs and locks.acquire(label))
        if jobs:
            self._cache.refresh()  # what their processes have recorded until they died is not recorded again
        for job in jobs:
            self._register(job)
            self._endpoint.budget.hold(job.reserved)
            logger.info("endpoint %r: resuming batch job %s", name, job.id or job.label)
        return bool(jobs)

    def _register(self, job: PendingJob) -> None:
        for name in (job.label, *job.requests):
            self._cache.locks.acquire(name)
        self._jobs[job.label] = job
        self._digests_in_jobs |= job.requests.keys()

    def _start(self, job: PendingJob) -> asyncio.Task[None]:
        task = self._job_tasks.get(job.label)
        if task is None or task.done():
            if task is not None:  # it failed and parked the job's reservation
                self._endpoint.budget.unpark()
            task = self._job_tasks[job.label] = asyncio.create_task(self._finish_job(job))
        return task

    async def _finish_job(self, job: PendingJob) -> None:
        """Bring a job to its end from its current phase.

        After an error, here or at the vendor, the job stays on disk, and all its requests fail: without a task that
        polls the job they would wait forever.
        """
        try:
            results: dict[str, JobResult]
            if job.phase != "created" and (refusal := await self._send(job)) is not None:
                results = dict.fromkeys(job.requests, refusal)
            else:
                results = await self._record_results(job, await self._poll(job))
            # Only now that all replies are on disk may the job be deleted.
            await asyncio.to_thread(job.remove)
        except Exception as error:
            failure: ChatFailure | Exception = error
            if isinstance(error, CallError):
                failure = ChatFailure(error.reason, f"endpoint {self._endpoint.name!r}: {error.message}", 1)
            else:
                self._log_error(error, f"batch job {job.id or job.label} is left for the next attempt")
            await self._endpoint.budget.park()
            for digest in job.requests:
                self._set_result(digest, failure)
            return
        # The callers come last: when they wake, the budget has what was not spent. They release the locks of their
        # requests themselves: between two jobs of a request, another process may not take it and send it too.
        del self._jobs[job.label]
        self._digests_in_jobs -= job.requests.keys()
        for name in (job.label, *(job.requests.keys() - self._asked)):
            self._cache.locks.release(name)
        await self._endpoint.budget.settle(job.reserved, job.spent, job.unknown)
        for digest, result in results.items():
            self._set_result(digest, result)

    def _log_error(self, error: Exception, message: str) -> None:
        # A full disk needs no traceback; anything else is a bug, or an unexpected answer of the vendor.
        is_bug = not isinstance(error, OSError)
        logger.error("endpoint %r: %s: %s", self._endpoint.name, message, error, exc_info=is_bug)

    async def _send(self, job: PendingJob) -> CallError | None:
        """Upload and create a job, exactly once. Returns the vendor's refusal, or None.

        If it is uncertain whether the vendor has created the job (an earlier process died, or an answer was lost), the
        vendor's jobs are searched for its label first.
        """
        may_exist = job.phase == "creating"

        async def create() -> str:
            nonlocal may_exist
            if may_exist and (job_id := await self._client.find(job.label, job.written_at)) is not None:
                return job_id
            may_exist = True
            try:
                return await self._client.create(str(job.file), job.label)
            except CallError as error:
                # After a refusal, also one for the rate, it is certain that the job was not created.
                may_exist = error.retryable and error.reason != "rate_limited"
                raise

        try:
            if job.phase == "written":
                lines = b"".join(self._input_line(digest, request) for digest, request in job.requests.items())
                job.file = await self._call(lambda: self._client.upload(f"{job.label}.jsonl", lines))
                job.phase = "creating"
                await asyncio.to_thread(job.save)
            job.id = await self._call(create)
        except CallError as error:
            # A refusal ends the job, except while the vendor may have it, and charge for it: a wrong key must not make
            # us forget that.
            if error.reason in ("refused", "misconfigured") and not may_exist:
                return error
            raise
        job.phase = "created"
        await asyncio.to_thread(job.save)
        count, name = len(job.requests), self._endpoint.name
        logger.info("endpoint %r: batch job %s of %d requests was created", name, job.id, count)
        return None

    async def _poll(self, job: PendingJob) -> BatchJob:
        pause, looks = self._batch.poll_s, 0
        while True:
            status = await self._call(lambda: self._client.status(str(job.id)))
            state = status.state.lower()
            if state in self._interface.ended:
                # A vendor may name the files a moment later: without them all requests would be sent, and paid, again.
                if status.files or state == self._interface.failed or looks >= LOOKS_FOR_FILES:
                    return status
                looks += 1
            if time.time() - job.written_at > self._batch.give_up_hours * 3600:
                hours = self._batch.give_up_hours
                raise CallError("outage", f"batch job {job.id} is still {status.state!r} after {hours:g} hours")
            await asyncio.sleep(pause * random.uniform(0.8, 1.0))
            pause = min(pause * 2, self._batch.poll_s * SLOWEST_POLL)

    async def _record_results(self, job: PendingJob, status: BatchJob) -> dict[str, JobResult]:
        bodies: dict[str, dict[str, Any] | CallError] = {}
        for file in status.files:
            content = await self._call(lambda: self._client.download(file))  # noqa: B023 (awaited in this iteration)
            for line in content.splitlines():
                try:
                    digest, body = parse_result_line(line, self._interface)
                except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                    logger.warning("batch job %s: skipping a line of %d bytes that is not a result", job.id, len(line))
                    continue
                # A vendor may repeat a row; whatever the order, a reply is kept and not an error beside it.
                if digest in job.requests and (digest not in bodies or isinstance(bodies[digest], CallError)):
                    bodies[digest] = body
        # The error of requests without a result line: the whole job failed, or it ended before it reached them.
        default_error = CallError("expired", f"batch job {job.id} ended as {status.state!r} without it", status.state)
        # With files, the rows themselves say what became of each request.
        if status.state.lower() == self._interface.failed and not status.files:
            # `token_limit_exceeded`: too much is queued at the vendor's for now. Another job may be accepted later,
            # while a file that was refused will be refused again.
            reason: FailureReason = "rate_limited" if self._interface.full in status.message else "refused"
            default_error = CallError(reason, f"batch job {job.id}: {status.message}", status.state)
        results = dict[str, JobResult]()
        digests = list(job.requests)
        for start in range(0, len(digests), GROUP):
            group = digests[start : start + GROUP]
            recorded = await asyncio.gather(
                *(self._record_result(job, digest, bodies.get(digest, default_error)) for digest in group)
            )
            results |= zip(group, recorded, strict=True)
        return results

    async def _record_result(self, job: PendingJob, digest: str, body: dict[str, Any] | CallError) -> JobResult:
        request, name, config = job.requests[digest], self._endpoint.name, self._config
        attempt = job.attempts.get(digest, 1)
        if (cached := self._cache.reply(digest)) is not None:
            return cached  # recorded and counted by an earlier process, or before a failure
        try:
            if isinstance(body, CallError):
                raise body
            raw = parse_completion(body, config)
        except (CallError, AttributeError, TypeError, LookupError) as caught:
            error = caught if isinstance(caught, CallError) else CallError("invalid_reply", "no chat completion in it")
            error = self._endpoint.judge_error(without_key(error, config), digest)
            unknown = max_usage(config, request) if error.may_cost else NO_USAGE
            await self._cache.record(
                call_row(
                    request, digest, name, config, error, attempt=attempt, latency_s=None, unknown=unknown, job=job.id
                ),
                spent=unknown,
            )
            job.unknown += unknown
            return error
        self._endpoint.on_answered()
        reply = reply_of(raw, digest, name, None)
        cost = reply_cost(config, raw.tokens_in, raw.tokens_out)
        spent = actual_usage(reply, cost, max_usage(config, request))
        self._endpoint.learn_cost(request, reply)
        row = call_row(request, digest, name, config, reply, attempt=attempt, latency_s=None, cost=cost, job=job.id)
        await self._cache.record(row, reply, spent, limits_of(request, config))
        job.spent += spent
        return reply

    async def _call(self, call: Callable[[], Awaitable[Value]]) -> Value:
        """Call the vendor, with retries. Raises `CallError` for its refusal, or for an outage after `GIVE_UP_S`."""
        name = self._endpoint.name

        async def call_with_key() -> Value:
            try:
                check_key(name, self._config)
            except ConfigError as error:
                raise CallError("misconfigured", str(error), "no key") from None
            try:
                return await call()
            # The SDKs hardly validate these answers, so one of another shape first shows as an error of our own code.
            except (AttributeError, TypeError, LookupError, ValueError) as error:
                message = f"an answer of its batch interface is none that is known ({type(error).__name__}: {error})"
                raise CallError("invalid_reply", safe_message(message, self._config)) from error

        def log_pause(error: Exception, attempt: int, pause_s: float) -> None:
            message = error.message if isinstance(error, CallError) else error
            logger.warning("endpoint %r: batch interface: %s; trying again in %.1f s", name, message, pause_s)

        try:
            return await retry_async(
                call_with_key,
                replace(circuit_breaker.BACKOFF, give_up_s=GIVE_UP_S),
                should_retry=lambda error: isinstance(error, CallError) and error.retryable,
                retry_after_s=lambda error: error.retry_after if isinstance(error, CallError) else None,
                before_pause=log_pause,
            )
        except CallError as error:
            if not error.retryable:
                raise
            raise CallError("outage", f"its batch interface has stopped answering: {error.message}") from None

    def _input_line(self, digest: str, request: ChatRequest) -> bytes:
        return json.dumps(self._client.input_line(digest, request)).encode() + b"\n"
