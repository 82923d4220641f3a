"""Run a reward in processes of its own: a time limit, several calls at once, retries, and a cache of its results.

A reward that is late, raises, ends its process or returns no number gives None for the completions of that call, with
the reason in the ledger of calls and in the log. It can neither end nor stall the stage: its process, and all that it
has started, is killed, and another one takes its place. Results are kept beside the replies of endpoints, in
`replies/reward-NAME`, by the digest of the reward's version, the problem and the completion: a resumed or repeated run
asks for nothing twice. A call without a result is not repeated in the same execution, so that a resumed run trains on
the same numbers; another execution asks again.
"""

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, NoReturn

from nautile.common.errors import ConfigError, Retryable
from nautile.common.events import Emit, silent
from nautile.common.processes import module_command, script_command
from nautile.common.retry import Backoff, retry_async
from nautile.common.text import most_common_reasons
from nautile.configs.base import fingerprint
from nautile.configs.rewards import REWARDS
from nautile.data.endpoints import run_command
from nautile.data.endpoints.chat_types import ChatReply
from nautile.data.endpoints.reply_cache import ReplyCache
from nautile.data.endpoints.reply_source import ReplySource
from nautile.data.sources.reasoning_gym import Problem
from nautile.rl.rewards import Reward, SampledReply, graded_item, reward_named

logger = logging.getLogger(__name__)
START_S = 120.0  # of a process: half a second on an idle machine, and what the reward's module imports
QUICK_S = 0.05  # the next call need not wait until the results of one that took less are on disk
LONGEST_LINE = 64 * 2**20  # bytes of an answer of the process
Graded = tuple[Problem, SampledReply]


@dataclass
class NoReward(Exception):
    """A call that gave no numbers, and why."""

    reason: Literal["late", "raised", "process_ended", "no_number", "given_up"]
    message: str

    def __str__(self) -> str:
        return self.message


class RewardRunner:
    """The reward of that name for batches of completions. A context manager; its processes start when first needed.

    For one thread, without an event loop of its own. `missing`: reasons of the completions without a reward so far; a
    reward that returns None counts as "none". Raises `ConfigError` if the reward cannot be imported.
    """

    def __init__(self, name: str, replies: ReplySource, emit: Emit = silent) -> None:
        self.name, self.reward, self.version = name, reward_named(name), REWARDS.version(name)
        self.missing: Counter[str] = Counter()
        self._emit, self._source = emit, replies
        self._runner = asyncio.Runner()
        self._cache: ReplyCache | None = None
        self._workers: list[_Worker] = []
        self._writing: list[asyncio.Future[list[None]]] = []  # results of quick calls

    def __enter__(self) -> "RewardRunner":
        self._cache = ReplyCache(self._source, f"reward-{self.name}", self._emit)
        self._workers = [_Worker(self.name) for _ in range(self.reward.workers)]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.kill()
        self._runner.close()
        if self._cache is not None:
            self._cache.close()

    def score(self, completions: Sequence[Graded]) -> list[float | None]:
        """The reward of each completion, None where there is none. Equal completions of a problem are asked once.

        Raises the `Retryable` or `ConfigError` that the reward raises, and `OSError` where results cannot be written.
        """
        return self._runner.run(self._score(completions))

    async def _score(self, completions: Sequence[Graded]) -> list[float | None]:
        assert self._cache is not None, "a context manager"
        digests = [self._digest(*completion) for completion in completions]
        distinct = dict(zip(digests, completions, strict=True))
        results: dict[str, float | NoReward | None] = {}
        self._cache.refresh()
        for digest in distinct:
            if digest in self._cache.given_up:
                results[digest] = NoReward("given_up", "an earlier call of this execution gave none")
            elif (reply := self._cache.reply(digest)) is not None:
                results[digest] = json.loads(reply.text)
                await self._cache.record(self._event(digest, "ok", cached=True))
        unknown, size = [digest for digest in distinct if digest not in results], self.reward.batch or 1
        calls = deque(unknown[first : first + size] for first in range(0, len(unknown), size))

        async def work(worker: _Worker) -> None:
            while calls:
                batch = calls.popleft()
                try:
                    results.update(await self._call(worker, {digest: distinct[digest] for digest in batch}))
                except BaseException:
                    calls.clear()  # the other workers end with the call that they are at
                    raise

        self._writing.clear()
        ended = await asyncio.gather(*map(work, self._workers[: len(calls)]), return_exceptions=True)
        written = await asyncio.gather(*self._writing, return_exceptions=True)
        for error in (*ended, *written):
            if isinstance(error, BaseException):
                raise error
        given = [results[digest] for digest in digests]
        self._report(given)
        return [None if isinstance(value, NoReward) else value for value in given]

    async def _call(self, worker: "_Worker", batch: dict[str, Graded]) -> dict[str, float | NoReward | None]:
        """The results of one call by digest: the rewards, or why there are none; those of a slow one are on disk."""
        assert self._cache is not None
        await worker.start()
        attempt, began = 0, time.monotonic()

        async def ask() -> list[float | None]:
            nonlocal attempt
            attempt += 1
            return await worker.ask(self.reward, list(batch.values()))

        backoff = Backoff(attempts=self.reward.attempts)
        try:
            values = await retry_async(ask, backoff, should_retry=lambda error: isinstance(error, NoReward))
        except NoReward as error:
            for digest in batch:
                await self._cache.give_up(digest, self.name, error.reason, attempt)
                event = self._event(digest, error.reason, attempt, time.monotonic() - began)
                self._emit("call", **event, error=error.message)
            return dict.fromkeys(batch, error)
        seconds = time.monotonic() - began
        written = asyncio.gather(
            *(
                self._cache.record(
                    self._event(digest, "ok", attempt, seconds),
                    ChatReply(json.dumps(value), "stop", None, None, seconds, False, digest, self.name),
                )
                for digest, value in zip(batch, values, strict=True)
            )
        )
        if seconds < QUICK_S:
            self._writing.append(written)
        else:
            await written
        return dict(zip(batch, values, strict=True))

    def _digest(self, problem: Problem, reply: SampledReply) -> str:
        return fingerprint(["reward", self.name, self.version, graded_item(problem, reply)])

    def _event(
        self, digest: str, status: str, attempt: int = 0, latency_s: float = 0.0, *, cached: bool = False
    ) -> dict[str, Any]:
        """The ledger's row of a completion; those of one call have its time."""
        return {
            "endpoint": self.name, "model": f"reward-{self.name}", "purpose": "reward", "tag": str(self.version),
            "digest": digest, "attempt": attempt, "cached": cached, "latency_s": latency_s, "dollars": 0.0,
            "status": status,
        }  # fmt: skip

    def _report(self, given: Sequence[float | NoReward | None]) -> None:
        """Count the completions without a reward by reason; those that failed are a line of the log."""
        failed = [value for value in given if isinstance(value, NoReward)]
        reasons = Counter("none" if value is None else value.reason for value in given if not isinstance(value, float))
        self.missing.update(reasons)
        if failed:
            logger.warning(
                "reward %r: none for %d of %d completions (%s); the first: %s",
                self.name, reasons.total(), len(given), most_common_reasons(reasons), failed[0],
            )  # fmt: skip


class _Worker:
    """A process that runs the reward, and is started anew after it was killed.

    It runs under `run_command`, which leads a session: with this process, or with `kill`, all that the reward has
    started ends too.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, reward: Reward, batch: Sequence[Graded]) -> list[float | None]:
        """The rewards of a batch in one call. Raises `NoReward`, and what the reward raises of our own errors."""
        await self.start()
        assert self._reader is not None
        assert self._writer is not None
        line = json.dumps([graded_item(*completion) for completion in batch]) + "\n"

        async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
            writer.write(line.encode())
            await writer.drain()
            return await reader.readline()

        try:
            async with asyncio.timeout(reward.time_limit_s):
                answer = await exchange(self._reader, self._writer)
        except TimeoutError:
            self.kill()
            raise NoReward("late", f"no result within {reward.time_limit_s:g} s") from None
        except (OSError, ValueError):  # the connection is gone, or the line too long
            answer = b""
        except BaseException:
            self.kill()
            raise
        if not answer.endswith(b"\n"):
            raise NoReward("process_ended", f"its process ended (exit code {self.kill()})")
        return self._result(json.loads(answer), len(batch))

    def _result(self, answer: dict[str, Any], size: int) -> list[float | None]:
        match answer:
            case {"rewards": [*rewards]} if len(rewards) == size:
                return rewards
            case {"error": "ConfigError", "message": message}:
                raise ConfigError(f"reward {self._name!r}: {message}")
            case {"error": "Retryable", "message": message}:
                raise Retryable(f"reward {self._name!r}: {message}")
            case {"error": "no_number", "message": message}:
                raise NoReward("no_number", message)
        raise NoReward("raised", str(answer.get("message")))

    async def start(self) -> None:
        """Start the process, unless it runs, and wait until it has imported the reward; `ConfigError` if it cannot."""
        if self._process is not None:
            return
        own, other = socket.socketpair()
        with other:
            words = module_command("nautile.rl.reward_process", self._name, str(other.fileno()))
            # It must find this package and the plug-in in the same place as this process.
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
            environment["JAX_PLATFORMS"] = "cpu"  # the accelerator is the stage's
            self._process = subprocess.Popen(
                script_command(run_command.__file__, *words),
                stdin=subprocess.PIPE,
                stdout=sys.__stderr__.fileno() if sys.__stderr__ else subprocess.DEVNULL,
                env=environment,
                pass_fds=[other.fileno()],
                start_new_session=True,
            )
        self._reader, self._writer = await asyncio.open_connection(sock=own, limit=LONGEST_LINE)
        try:
            async with asyncio.timeout(START_S):
                ready = await self._reader.readline()
        except TimeoutError:
            ready = b""
        except BaseException:
            self.kill()
            raise
        if not ready.endswith(b"\n"):
            self._refuse_start(f"within {START_S:g} s" if self._process.poll() is None else "it ended")
        if fault := json.loads(ready).get("fault"):
            self._refuse_start(fault)

    def _refuse_start(self, why: str) -> NoReturn:
        self.kill()
        raise ConfigError(f"reward {self._name!r}: its process did not start ({why}); the stage's log has its output")

    def kill(self) -> int | None:
        """End the process and all that it has started; returns its exit code."""
        if self._writer is not None:
            self._writer.transport.abort()
        process, self._process, self._reader, self._writer = self._process, None, None, None
        if process is None:
            return None
        # Before the process is waited for: until then no other group can have its number.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        assert process.stdin is not None
        process.stdin.close()
        return process.wait()
