"""A fake chat endpoint on a loopback socket: OpenAI's and Mistral's protocol, counters, and faults on request.

with FakeOpenAI(reply, faults=script("429", None, "cut")) as server:
    EndpointConfig(kind="openai", model="fake", url=server.url)

    python -m tests.support.servers.fake_openai '{"faults": {"429": 0.05}}'     the same in a process of its own, to its
                                                                         stdin's end; `own_process` starts it

With "stays" in the settings it serves until it is ended.
"""

import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from tests.support.servers.fake_batches import FakeBatches, text_of
from tests.support.servers.http_server import FakeServer, Request, Response, json_response

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
        passage = re.search(r"(?:Passage:|=== \w{8} passage\n)\s*(.+)", text_of(body["messages"][-1]))
        words = passage[1].split()[:12] if passage else ["Number", str(draw.randint(0, 10**6)), "was", "drawn", "here"]
        text = re.sub(r"[^\w)]+$", "", " ".join(words))
        return json.dumps({"reasoning": f"We need to say this: {text}.", "answer": f"{text}."})
    return f"The answer is {draw.randint(0, 99)}."


@dataclass
class FakeOpenAI(FakeServer):
    """The server; a context manager. `key`: the only bearer token accepted. `delay_s` before each answer.

    `bodies`: every chat request that arrived; `statuses`: how they ended; `answered`, `tokens_in`, `tokens_out`,
    `dollars`: of the complete answers that were sent, and `answers` how many each prompt got. `most_at_once`: requests
    in flight together. `limit`: requests a second accepted, and how many at once; the others get a 429. `states`: in
    whose headers the limit is stated ("openai", "mistral", "": it is not). `fault_message`: in the message of every
    fault. `batches`: the batch interfaces; their answers do not count above but in `batch_dollars`, at half the price.
    `port`: 0 for a free one.
    """

    base_path = "/v1"

    reply: Reply = useful
    faults: Faults = field(default_factory=lambda: always(None))
    models: Sequence[str] = ("fake",)
    card: dict[str, Any] = field(default_factory=dict)  # more of each entry of the list of models
    key: str | None = None
    delay_s: float = 0.0
    retry_after: str | None = "0.05"
    per_million: tuple[float, float] = (0.0, 0.0)
    limit: tuple[float, float] | None = None
    states: str = ""
    fault_message: str = "a requested fault"
    port: int = 0
    poison: Callable[[str], str | None] = lambda text: None  # the fault of a request by its text, whenever it arrives
    refuses: Sequence[str] = ()  # fields for which a request gets a 400 that names the field
    message: Callable[[dict[str, Any]], dict[str, Any]] = lambda body: {}  # more of the message of a completion
    usage: dict[str, Any] = field(default_factory=dict)  # more of the counts of a completion
    html: bool = False  # every answer is a web page
    reshape: Callable[[int, Any], Any] = lambda arrival, answer: answer  # the completion that is sent
    respond_as: Callable[[int, dict[str, Any]], Response | None] = lambda arrival, answer: None  # in its place, if any

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
        self._lock = threading.Lock()
        self._stopped = threading.Event()

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
            "seconds": self.answer_times[-1] - self.times[0] if self.answer_times else 0.0,
        }

    def _steady(self) -> float | None:
        """Complete answers a second, without the first five seconds, in which the burst of a limit is used up."""
        times = [time for time in self.answer_times if time >= self.answer_times[0] + 5]
        return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        super().__exit__(*exception)

    def respond(self, request: Request) -> Response | None:
        """Answer one request: the chat, the batch interfaces, the list of models, the counters."""
        if self.html:
            return Response(body=b"<!doctype html><title>Welcome</title>", content_type="text/html; charset=utf-8")
        token = request.headers.get("authorization", "")
        if self.key is not None and token != f"Bearer {self.key}":
            message = f"Incorrect API key provided: {token.removeprefix('Bearer ')}"
            return json_response({"error": {"message": message, "code": "bad_key"}}, 401)
        if request.method == "GET" and request.path == "/v1/models":
            models = [
                {"id": name, "object": "model", "created": 0, "owned_by": "fake", "capabilities": {}, **self.card}
                for name in self.models
            ]
            return json_response({"object": "list", "data": models}, headers=self._limit_headers())
        if request.method == "GET" and request.path == "/v1/counts":
            return json_response(self.counts())
        if request.method == "POST" and request.path.startswith("/v1/chat/completions"):
            return self._chat(request)
        with self._lock:
            if (routed := self.batches.route(request)) is None:
                return json_response({"error": {"message": f"no {request.path} here"}}, 404)
            step, answer = routed
            if self.batches.is_lost(step):
                return None
        answer = self.batches.reshape(step, answer)
        return Response(body=answer) if isinstance(answer, bytes) else json_response(answer)

    def _chat(self, request: Request) -> Response | None:
        body = request.json()
        with self._lock:
            arrival = len(self.bodies)
            self.bodies.append(body)
            self.headers.append({name.lower(): value for name, value in request.headers.items()})
            self.times.append(time.monotonic())
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            if refused := [name for name in self.refuses if name in body]:
                error = {
                    "message": f"Unsupported parameter: {refused[0]!r}",
                    "param": refused[0],
                    "code": "unsupported",
                }
                return json_response({"error": error}, 400)
            fault = self.faults(arrival) or self.poison(text_of(body["messages"][-1]))
            if fault is None and body["model"] not in self.models:
                fault = "404"
            if self.delay_s:
                time.sleep(self.delay_s)
            with self._lock:
                accepted, limit_headers = self._within_limit()
                fault = fault if accepted else "429"
                self.statuses[fault or "200"] += 1
            if fault == "hang":
                self._stopped.wait()
            if fault in ("hang", "close"):
                return None
            if fault is not None and fault.isdigit():
                extra = {"Retry-After": self.retry_after} if fault == "429" and self.retry_after is not None else {}
                error = {"error": {"message": f"{self.fault_message}: {fault}"}}
                return json_response(error, int(fault), extra | limit_headers)
            if fault == "invalid":
                return Response(body=b'{"id": "x", "choices": [', content_type="application/json")
            if fault == "not_chat":
                return json_response({"hello": "world"})
            answer = self._completion(body)
            if fault == "cut":
                text = json.dumps(answer).encode()
                return Response(body=text[: len(text) // 2], content_type="application/json", length=len(text))
            if (response := self.respond_as(arrival, answer)) is not None:
                return response
            if (reshaped := self.reshape(arrival, answer)) is not answer:
                return json_response(reshaped, headers=limit_headers)
            with self._lock:
                self._count(body, answer)
            return json_response(answer, headers=limit_headers)
        finally:
            with self._lock:
                self._at_once -= 1

    def _count(self, body: dict[str, Any], answer: dict[str, Any]) -> None:
        self.answered += 1
        self.answer_times.append(time.monotonic())
        self.answers[text_of(body["messages"][-1])] += 1
        self.tokens_in += answer["usage"]["prompt_tokens"]
        self.tokens_out += answer["usage"]["completion_tokens"]

    def _within_limit(self) -> tuple[bool, dict[str, str]]:
        """Whether one more request is accepted now, and the headers that state the limit."""
        if self.limit is None:
            return True, {}
        rate, burst = self.limit
        now = time.monotonic()
        self._level = min(burst, self._level + (now - self._level_at) * rate)
        self._level_at = now
        fits = self._level >= 1
        self._level -= fits
        return fits, self._limit_headers()

    def _limit_headers(self) -> dict[str, str]:
        if self.limit is None:
            return {}
        rate, burst = self.limit
        left, reset = int(self._level), (burst - self._level) / rate
        if self.states == "openai":
            names = ("x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests")
            return dict(zip(names, (f"{60 * rate:.0f}", str(left), f"{1000 * reset:.0f}ms"), strict=True))
        if self.states == "mistral":
            names = ("x-ratelimit-limit-req-minute", "x-ratelimit-remaining-req-minute")
            return dict(zip(names, (f"{60 * rate:.0f}", str(left)), strict=True))
        return {}

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        words = self.reply(body).split(" ")
        most = body.get("max_tokens") or body["max_completion_tokens"]
        finish = "length" if len(words) > most else "stop"
        words = words[:most]
        prompt = sum(len(text_of(message).split()) for message in body["messages"])
        return {
            "id": "chatcmpl-fake",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [
                {
                    "index": 0,
                    "finish_reason": finish,
                    "message": {"role": "assistant", "content": " ".join(words), **self.message(body)},
                }
            ],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": len(words),
                "total_tokens": prompt + len(words),
                **self.usage,
            },
        }

    def _batched(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = self._completion(body)
        self.batch_tokens[0] += answer["usage"]["prompt_tokens"]
        self.batch_tokens[1] += answer["usage"]["completion_tokens"]
        return answer


@dataclass
class OwnProcess:
    """A server in another process: its URL and its counts."""

    url: str

    def counts(self) -> dict[str, Any]:
        """`FakeOpenAI.counts` of the server now."""
        with urlopen(f"{self.url}/counts") as answer:
            return json.load(answer)


def openai(server: FakeOpenAI, **fields: Any) -> Any:
    """The section `[endpoints.NAME]` of a server."""
    from nautile.configs.endpoint import EndpointConfig  # not for the server alone, in a process of its own

    return EndpointConfig(kind="openai", model="fake", url=server.url, **{"timeout_s": 60.0, **fields})


@contextmanager
def own_process(**settings: Any) -> Iterator[OwnProcess]:
    """Serve in another process until the block ends: fields of `FakeOpenAI`, with `faults` as shares of requests."""
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "tests.support.servers.fake_openai", json.dumps(settings)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, env={**os.environ, "PYTHONPATH": str(root)}) as process:
        try:
            yield OwnProcess(process.stdout.readline().decode().strip())
        finally:
            process.stdin.close()
            process.wait()


def main() -> None:
    """Serve until the end of stdin, or for ever."""
    settings = json.loads(sys.argv[1])
    stays = settings.pop("stays", False)
    shares = {f"f{name}": share for name, share in settings.pop("faults", {}).items()}
    with FakeOpenAI(faults=mixed(**shares), **settings) as server:
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        if stays:
            threading.Event().wait()
        sys.stdin.read()


__all__ = [
    "FAULTS",
    "FakeOpenAI",
    "OwnProcess",
    "always",
    "mixed",
    "openai",
    "own_process",
    "script",
    "text_of",
    "useful",
]

if __name__ == "__main__":
    main()
