"""A fake chat endpoint on a loopback socket: OpenAI's and Mistral's protocol, counters, and faults on request.

with FakeOpenAI(reply, faults=script("429", None, "cut")) as server:
    EndpointConfig(kind="openai", model="fake", url=server.url)

    python -m tests.support.fake_openai '{"faults": {"429": 0.05}}'     the same in a process of its own, to its stdin's
                                                                         end; `own_process` starts it
"""

import asyncio
import json
import os
import random
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from tests.support.fake_batches import FakeBatches

Reply = Callable[[dict[str, Any]], str]
Faults = Callable[[int], str | None]
FAULTS = ["429", "500", "hang", "cut", "close", "invalid", "not_chat", "400", "401", "404"]


def script(*faults: str | None) -> Faults:
    """The faults of the first requests, in order of arrival (None: no fault); later requests have none."""
    return lambda arrival: faults[arrival] if arrival < len(faults) else None


def always(fault: str | None) -> Faults:
    """The same fault for every request."""
    return lambda arrival: fault


def mixed(seed: int = 0, **shares: float) -> Faults:
    """Random faults, the same each time: `mixed(f429=0.05, hang=0.01)`."""
    names, weights = [name.lstrip("f") for name in shares], list(shares.values())

    def fault(arrival: int) -> str | None:
        return random.Random(f"{seed}/{arrival}").choices([*names, None], [*weights, 1 - sum(weights)])[0]

    return fault


def useful(body: dict[str, Any]) -> str:
    """A valid reply to a judge's, a teacher's or any other request, determined by the request alone."""
    constraint = json.dumps([body.get("response_format"), body.get("grammar")])
    draw = random.Random(json.dumps(body["messages"]))
    if "overall" in constraint:
        scores = {name: draw.randint(1, 5) for name in ("reason", "answer", "follow")}
        return json.dumps({**scores, "overall": draw.randint(0, 100)})
    if "reasoning" in constraint:
        passage = re.search(r"(?:Passage:|will not see:)\s*(.+)", body["messages"][-1]["content"])
        words = passage[1].split()[:12] if passage else ["Number", str(draw.randint(0, 10**6)), "was", "drawn", "here"]
        text = re.sub(r"[^\w)]+$", "", " ".join(words))
        return json.dumps({"reasoning": f"We need to say this: {text}.", "answer": f"{text}."})
    return f"The answer is {draw.randint(0, 99)}."


@dataclass
class FakeOpenAI:
    """The server; a context manager. `key`: the only bearer token accepted. `delay_s` before each answer.

    `bodies`: every chat request that arrived; `statuses`: how they ended; `answered`, `tokens_in`, `tokens_out`,
    `dollars`: of the complete answers that were sent, and `answers` how many each prompt got. `most_at_once`: requests
    in flight together. `limit`: requests a second accepted, and how many at once; the others get a 429. `states`: in
    whose headers the limit is stated ("openai", "mistral", "": it is not). `fault_message`: in the message of every
    fault. `batches`: the batch interfaces; their answers do not count above but in `batch_dollars`, at half the price.
    `port`: 0 for a free one.
    """

    reply: Reply = useful
    faults: Faults = field(default_factory=lambda: always(None))
    models: Sequence[str] = ("fake",)
    key: str | None = None
    delay_s: float = 0.0
    retry_after: str | None = "0.05"
    per_million: tuple[float, float] = (0.0, 0.0)
    limit: tuple[float, float] | None = None
    states: str = ""
    fault_message: str = "a requested fault"
    port: int = 0

    def __post_init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.answer_times: list[float] = []
        self.statuses: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        self.batches = FakeBatches(self._batched, fault_message=self.fault_message)
        self.batch_tokens = [0, 0]
        self._level, self._level_at = (self.limit[1] if self.limit else 0.0), 0.0
        self.answered = self.tokens_in = self.tokens_out = 0
        self.most_at_once = self._at_once = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()

    @property
    def dollars(self) -> float:
        """What the answers cost."""
        return (self.tokens_in * self.per_million[0] + self.tokens_out * self.per_million[1]) / 1e6

    @property
    def batch_dollars(self) -> float:
        """What the batch interfaces' answers cost."""
        return sum(count * price for count, price in zip(self.batch_tokens, self.per_million, strict=True)) / 2e6

    def counts(self) -> dict[str, Any]:
        """The counters, as `GET /v1/counts` answers them."""
        return {
            "arrived": sum(self.statuses.values()),
            "answered": self.answered,
            "prompts": len(self.answers),
            "most_for_a_prompt": max(self.answers.values(), default=0),
            "statuses": self.statuses,
            "dollars": self.dollars,
            "steady_per_s": self._steady(),
        }

    def _steady(self) -> float | None:
        """Complete answers a second, without the first five seconds, in which the burst of a limit is used up."""
        times = [time for time in self.answer_times if time >= self.answer_times[0] + 5]
        return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None

    def __enter__(self) -> "FakeOpenAI":
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", self.port, limit=2**24)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        self._ready.set()
        await self._stop.wait()
        server.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                method, path, _ = line.decode().split(" ", 2)
                headers = {name.lower(): value async for name, value in _headers(reader)}
                content = await reader.readexactly(int(headers.get("content-length", 0)))
                if not await self._answer(writer, method, path, headers, content):
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            return  # cancelled only when the server ends
        finally:
            writer.close()

    async def _answer(
        self, writer: asyncio.StreamWriter, method: str, path: str, headers: dict[str, str], content: bytes
    ) -> bool:
        """Answer one request; False: the connection must be closed."""
        if self.key is not None and headers.get("authorization") != f"Bearer {self.key}":
            token = headers.get("authorization", "").removeprefix("Bearer ")
            await _send(writer, 401, {"error": {"message": f"Incorrect API key provided: {token}", "code": "bad_key"}})
            return True
        if method == "GET" and path == "/v1/models":
            listed = [
                {"id": name, "object": "model", "created": 0, "owned_by": "fake", "capabilities": {}}
                for name in self.models
            ]
            await _send(writer, 200, {"object": "list", "data": listed})
            return True
        if method == "GET" and path == "/v1/counts":
            await _send(writer, 200, self.counts())
            return True
        if (routed := self.batches.route(method, path, headers, content)) is not None:
            step, answer = routed
            if self.batches.is_lost(step):
                return False
            kind = "application/octet-stream" if isinstance(answer, bytes) else "application/json"
            await _send_bytes(writer, 200, answer if isinstance(answer, bytes) else json.dumps(answer).encode(), kind)
            return True
        if method != "POST" or not path.startswith("/v1/chat/completions"):
            await _send(writer, 404, {"error": {"message": f"no {path} here"}})
            return True
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            return await self._chat(writer, json.loads(content), headers)
        finally:
            self._at_once -= 1

    async def _chat(self, writer: asyncio.StreamWriter, body: dict[str, Any], headers: dict[str, str]) -> bool:
        arrival = len(self.bodies)
        self.bodies.append(body)
        self.headers.append(headers)
        self.times.append(self._loop.time())
        fault = self.faults(arrival)
        if fault is None and body["model"] not in self.models:
            fault = "404"
        await asyncio.sleep(self.delay_s)
        accepted, limit_headers = self._within_limit()
        fault = fault if accepted else "429"
        self.statuses[fault or "200"] += 1
        if fault == "hang":
            await self._stop.wait()
        if fault in ("hang", "close"):
            return False
        if fault is not None and fault.isdigit():
            extra = {"Retry-After": self.retry_after} if fault == "429" and self.retry_after is not None else {}
            error = {"error": {"message": f"{self.fault_message}: {fault}"}}
            await _send(writer, int(fault), error, extra | limit_headers)
            return True
        if fault == "invalid":
            await _send_text(writer, 200, '{"id": "x", "choices": [', {})
            return True
        if fault == "not_chat":
            await _send(writer, 200, {"hello": "world"})
            return True
        return await self._complete(writer, body, limit_headers, cut=fault == "cut")

    def _within_limit(self) -> tuple[bool, dict[str, str]]:
        """Whether one more request is accepted now, and the headers that state the limit."""
        if self.limit is None:
            return True, {}
        rate, burst = self.limit
        now = self._loop.time()
        self._level = min(burst, self._level + (now - self._level_at) * rate)
        self._level_at = now
        fits = self._level >= 1
        self._level -= fits
        left, reset = int(self._level), (burst - self._level) / rate
        if self.states == "openai":
            names = ("x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests")
            return fits, dict(zip(names, (f"{60 * rate:.0f}", str(left), f"{1000 * reset:.0f}ms"), strict=True))
        if self.states == "mistral":
            names = ("x-ratelimit-limit-req-minute", "x-ratelimit-remaining-req-minute")
            return fits, dict(zip(names, (f"{60 * rate:.0f}", str(left)), strict=True))
        return fits, {}

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        words = self.reply(body).split(" ")
        finish = "length" if len(words) > body["max_tokens"] else "stop"
        words = words[: body["max_tokens"]]
        prompt = sum(len(message["content"].split()) for message in body["messages"])
        return {
            "id": "chatcmpl-fake",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [
                {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": " ".join(words)}}
            ],
            "usage": {"prompt_tokens": prompt, "completion_tokens": len(words), "total_tokens": prompt + len(words)},
        }

    def _batched(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = self._completion(body)
        self.batch_tokens[0] += answer["usage"]["prompt_tokens"]
        self.batch_tokens[1] += answer["usage"]["completion_tokens"]
        return answer

    async def _complete(
        self, writer: asyncio.StreamWriter, body: dict[str, Any], limit_headers: dict[str, str], cut: bool
    ) -> bool:
        answer = self._completion(body)
        if cut:
            text = json.dumps(answer)
            head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
            writer.write(head.encode() + text[: len(text) // 2].encode())
            await writer.drain()
            return False
        self.answered += 1
        self.answer_times.append(self._loop.time())
        self.answers[body["messages"][-1]["content"]] += 1
        self.tokens_in += answer["usage"]["prompt_tokens"]
        self.tokens_out += answer["usage"]["completion_tokens"]
        await _send(writer, 200, answer, limit_headers)
        return True


async def _headers(reader: asyncio.StreamReader) -> AsyncIterator[tuple[str, str]]:
    while line := (await reader.readline()).decode().strip():
        name, _, value = line.partition(":")
        yield name.strip(), value.strip()


async def _send(
    writer: asyncio.StreamWriter, status: int, value: dict[str, Any], headers: dict[str, str] | None = None
) -> None:
    await _send_text(writer, status, json.dumps(value), headers or {})


async def _send_text(writer: asyncio.StreamWriter, status: int, text: str, headers: dict[str, str]) -> None:
    await _send_bytes(writer, status, text.encode(), "application/json", headers)


async def _send_bytes(
    writer: asyncio.StreamWriter, status: int, content: bytes, kind: str, headers: dict[str, str] | None = None
) -> None:
    lines = [f"HTTP/1.1 {status} Fake", f"Content-Type: {kind}", f"Content-Length: {len(content)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    writer.write("\r\n".join([*lines, "", ""]).encode() + content)
    await writer.drain()


@dataclass
class OwnProcess:
    """A server in another process: its URL and its counts."""

    url: str

    def counts(self) -> dict[str, Any]:
        """`FakeOpenAI.counts` of the server now."""
        with urlopen(f"{self.url}/counts") as answer:
            return json.load(answer)


@contextmanager
def own_process(**settings: Any) -> Iterator[OwnProcess]:
    """Serve in another process until the block ends: fields of `FakeOpenAI`, with `faults` as shares of requests."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.support.fake_openai", json.dumps(settings)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, env={**os.environ, "PYTHONPATH": str(root)}) as process:
        try:
            yield OwnProcess(process.stdout.readline().decode().strip())
        finally:
            process.stdin.close()
            process.wait()


def main() -> None:
    """Serve until the end of stdin."""
    settings = json.loads(sys.argv[1])
    shares = {f"f{name}": share for name, share in settings.pop("faults", {}).items()}
    with FakeOpenAI(faults=mixed(**shares), **settings) as server:
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        sys.stdin.read()


__all__ = ["FAULTS", "FakeOpenAI", "OwnProcess", "always", "mixed", "own_process", "script", "useful"]

if __name__ == "__main__":
    main()
