"""The endpoint pool with a server in another process: capacity under faults, a kill -9, rate limits, a large ledger.

    PYTHONPATH=. python bench/corpus/endpoints.py [capacity kill limits ledger] [--requests 10000] [--rounds 3]
        [--json FILE]

capacity: 256 requests in flight, 50 ms an answer, and 5 % 429, 2 % 500, 1 % that hang, 1 % cut, 1 % invalid JSON;
alternating with a plain loop over the openai client (a semaphore of 256, the client's own retries); then both without
faults. Events go to a real event file. kill: the same requests by a process that is killed half-way and started again,
in both forms. limits: a server that accepts 50 requests a second. ledger: a million replies.
"""

import asyncio
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import openai

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.measure import argument_parser, write_results
from nautile.common.events import Emit, silent
from nautile.configs.endpoint import EndpointConfig
from nautile.data.endpoints.chat_types import ChatReply, ChatRequest
from nautile.data.endpoints.pool import EndpointPool
from nautile.data.endpoints.reply_cache import ReplyCache
from nautile.data.endpoints.reply_source import ReplySource
from nautile.store.events import EventWriter
from tests.support.samples.replies import reply_rows
from tests.support.servers.fake_openai import OwnProcess, own_process

FAULTS = {"429": 0.05, "500": 0.02, "hang": 0.01, "cut": 0.01, "invalid": 0.01}
# A timeout of 3 s ends a request that hangs; eight attempts are enough that no prompt fails for good at these rates of
# faults.
AT_ONCE, TIMEOUT_S, ATTEMPTS, DELAY_S = 256, 3.0, 8, 0.05
PRICES = (0.5, 1.5)
WORDS = " ".join(f"word{i}" for i in range(200))


def prompts(count: int) -> list[str]:
    return [f"Say something of the number {i}. {WORDS}" for i in range(count)]


def endpoint_config(url: str, **fields: Any) -> EndpointConfig:
    settings: dict[str, Any] = {"concurrency": AT_ONCE, "timeout_s": TIMEOUT_S, "attempts": ATTEMPTS}
    settings |= {"dollars_per_million_in": PRICES[0], "dollars_per_million_out": PRICES[1]}
    return EndpointConfig(kind="openai", model="fake", url=url, **{**settings, **fields})


def requests(count: int) -> list[ChatRequest]:
    return [ChatRequest("fake", ({"role": "user", "content": text},), 64) for text in prompts(count)]


def ask_pool(server: OwnProcess, count: int, folder: Path, emit: Emit | None = None, **fields: Any) -> dict[str, Any]:
    """Send all requests through a pool, with replies and events in `folder`; `fields` of its endpoint."""
    writer = EventWriter(folder / "events.jsonl", "bench")
    # The whole way of a request is timed: cache, rate limit, ledger, event file. That is what a plain loop does not
    # have.
    with EndpointPool({"fake": endpoint_config(server.url, **fields)}, folder / "replies", emit or writer) as pool:
        start, cpu = time.monotonic(), time.process_time()
        outcomes = pool.ask(requests(count))
        seconds, cpu_seconds = time.monotonic() - start, time.process_time() - cpu
        dollars = pool.spent
    writer.close()
    answered = sum(isinstance(outcome, ChatReply) for outcome in outcomes)
    return {"per_s": count / seconds, "answered": answered, "cpu_ms": 1000 * cpu_seconds / count, "dollars": dollars}


def ask_in_plain_loop(
    server: OwnProcess, count: int, retries: int = ATTEMPTS, at_once: int = AT_ONCE, timeout_s: float = TIMEOUT_S
) -> dict[str, Any]:
    """Send the same requests by a loop over the openai client, without cache, rate limit or ledger."""

    async def run() -> int:
        # The client's own retries, as a careful user would set them: the baseline is not made weak.
        client = openai.AsyncOpenAI(base_url=server.url, api_key="none", timeout=timeout_s, max_retries=retries)
        semaphore = asyncio.Semaphore(at_once)

        async def ask(text: str) -> bool:
            async with semaphore:
                try:
                    reply = await client.chat.completions.create(
                        model="fake", messages=[{"role": "user", "content": text}], max_tokens=64, temperature=0.0
                    )
                    return bool(reply.choices[0].message.content)
                except (openai.OpenAIError, ValueError):
                    return False

        answered_flags = await asyncio.gather(*(ask(text) for text in prompts(count)))
        await client.close()
        return sum(answered_flags)

    start, cpu = time.monotonic(), time.process_time()
    answered = asyncio.run(run())
    seconds = time.monotonic() - start
    return {"per_s": count / seconds, "answered": answered, "cpu_ms": 1000 * (time.process_time() - cpu) / count}


def capacity(count: int, rounds: int) -> list[dict[str, Any]]:
    rows = []
    for faults in (FAULTS, {}):
        by_name: dict[str, list[dict[str, Any]]] = {"pool": [], "plain openai loop": []}
        for _ in range(rounds):
            for name in by_name:
                with (
                    # A new server for each turn, so that neither inherits the other's connections or counts.
                    own_process(faults=faults, delay_s=DELAY_S, per_million=PRICES) as server,
                    tempfile.TemporaryDirectory() as folder,
                ):
                    entry = ask(name, server, count, Path(folder))
                    entry["server"] = server.counts()
                by_name[name].append(entry)
        # The pool's speed relative to the plain loop, paired by round.
        ratio = statistics.median(
            a["per_s"] / b["per_s"] for a, b in zip(by_name["pool"], by_name["plain openai loop"], strict=True)
        )
        for name, runs in by_name.items():
            counts = runs[-1]["server"]
            rows.append(
                {
                    "what": f"{name}, {'with' if faults else 'no'} faults",
                    "per_s": statistics.median(run["per_s"] for run in runs),
                    "cpu_ms": statistics.median(run["cpu_ms"] for run in runs),
                    "answered": [run["answered"] for run in runs],
                    "answered_twice": counts["answered"] - counts["prompts"],
                }
            )
            if name == "pool":
                same = [abs(run["dollars"] - run["server"]["dollars"]) < 1e-9 for run in runs]
                rows[-1] |= {"ratio": ratio, "cost_is_the_servers": all(same)}
    return rows


def kill(count: int) -> list[dict[str, Any]]:
    """Kill a process half-way through its requests, and let another one send the same requests."""
    rows = []
    for form in ("pool", "plain openai loop"):
        with (
            own_process(faults=FAULTS, delay_s=DELAY_S, per_million=PRICES) as server,
            tempfile.TemporaryDirectory() as folder,
        ):
            command = [sys.executable, __file__, "ask", form, server.url, folder, "--requests", str(count)]
            with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}) as process:
                while server.counts()["answered"] < count // 2 and process.poll() is None:
                    time.sleep(0.1)
                process.kill()
            at_kill = server.counts()
            report = ask(form, server, count, Path(folder))
            at_end = server.counts()
            row = {
                "what": f"{form}, kill -9 after {at_kill['answered']} of {count}",
                "answered": report["answered"],
                "paid_again": at_end["answered"] - at_end["prompts"],
            }
            if form == "pool":
                row |= _ledger_of(Path(folder), report["dollars"], at_end, count)
        rows.append(row)
    return rows


def ask(form: str, server: OwnProcess, count: int, folder: Path) -> dict[str, Any]:
    """Send all requests in one of the two forms; the plain loop keeps nothing in `folder`."""
    return ask_pool(server, count, folder) if form == "pool" else ask_in_plain_loop(server, count)


def _ledger_of(folder: Path, dollars: float, at_end: dict[str, Any], count: int) -> dict[str, Any]:
    """Whether each reply is on disk once, and what the server's answers cost that no ledger has."""
    rows = reply_rows(folder / "replies")
    digests = len({row["digest"] for row in rows})
    lost_replies = at_end["answered"] - digests  # answered, but not on disk when the process was killed
    lost_dollars = lost_replies * at_end["dollars"] / at_end["answered"]
    figures = [round(value, 6) for value in (dollars, at_end["dollars"], lost_dollars)]
    return {"kept_once": digests == len(rows) == count, "ledger_dollars_and_lost": figures}


def limits(seconds: int) -> list[dict[str, Any]]:
    rows = []
    for states, retry_after in (("openai", "1"), ("mistral", "1"), ("", "1"), ("", None)):
        # With and without headers that state the limit: without them the pool must find the rate from refusals alone.
        settings = {"limit": [50, 50], "states": states, "retry_after": retry_after, "delay_s": DELAY_S}
        with own_process(**settings) as server, tempfile.TemporaryDirectory() as folder:
            ask_pool(server, 50 * seconds, Path(folder), silent)
            rows.append(
                _limit_row(f"pool, limit stated: {states or 'no'}, Retry-After: {retry_after}", server.counts())
            )
    with own_process(limit=[50, 50], states="openai", retry_after="1", delay_s=DELAY_S) as server:
        ask_in_plain_loop(server, 50 * seconds, retries=20)
        rows.append(_limit_row("plain openai loop, 20 retries", server.counts()))
    return rows


def _limit_row(what: str, counts: dict) -> dict[str, Any]:
    refused = counts["statuses"].get("429", 0) / counts["arrived"]
    return {"what": what, "held": counts["steady_per_s"] / 50, "refused_share": refused}


def ledger(count: int) -> list[dict[str, Any]]:
    """Open a file of `count` replies of 1 kB; then parse it line by line, whose memory is measured in addition."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fake" / "host-0.jsonl"
        path.parent.mkdir()
        with path.open("w") as file:
            for i in range(count):
                head = {"digest": hashlib.sha256(str(i).encode()).hexdigest(), "endpoint": "fake", "dollars": 0.001}
                counts = {"tokens": 500, "tokens_in": 300, "tokens_out": 200, "finish": "stop", "latency_s": 1.5}
                file.write(json.dumps({**head, **counts, "text": "said " * 200}) + "\n")
        # The file was just written, so its pages are cached for both forms; processor time is compared.
        memory_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.process_time()
        cache = ReplyCache(ReplySource(Path(folder)), "fake", silent)
        open_seconds = time.process_time() - start
        assert len(cache) == count
        memory_open = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.monotonic()
        # Look up some 10,000 replies by digest.
        for i in range(0, count, max(1, count // 10_000)):
            assert cache.reply(hashlib.sha256(str(i).encode()).hexdigest()) is not None
        look_up_seconds = (time.monotonic() - start) / min(count, 10_000)
        cache.close()
        size = path.stat().st_size
        # The baseline: parse every line into a dict of offsets.
        start, offset, offsets = time.process_time(), 0, {}
        with path.open("rb") as file:
            for line in file:
                offsets[bytes.fromhex(json.loads(line)["digest"])] = offset
                offset += len(line)
        plain_seconds = time.process_time() - start
    plain_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_open) / 1024
    row = {
        "what": f"ledger of {count:,} replies",
        "open_cpu_s": open_seconds,
        "more_mb": (memory_open - memory_before) / 1024,
    }
    row |= {"file_mb": size / 2**20, "look_up_us": 1e6 * look_up_seconds}
    return [row, {"what": "every line parsed, into a dict", "open_cpu_s": plain_seconds, "more_mb": plain_mb}]


def main() -> None:
    # `seconds`: of each rate limit; `replies`: in the ledger.
    parser = argument_parser(__doc__, requests=10_000, rounds=3, seconds=60, replies=1_000_000)
    parser.add_argument("parts", nargs="*", default=["capacity", "kill", "limits", "ledger"])
    arguments = parser.parse_args()
    if arguments.parts[0] == "ask":  # the worker of `kill`
        form, url, folder = arguments.parts[1:]
        ask(form, OwnProcess(url), arguments.requests, Path(folder))
        return
    runs = {
        "ledger": lambda: ledger(arguments.replies),
        "capacity": lambda: capacity(arguments.requests, arguments.rounds),
        "kill": lambda: kill(arguments.requests),
        "limits": lambda: limits(arguments.seconds),
    }
    rows = []
    for part, run in runs.items():
        if part in arguments.parts:
            rows += run()
            for row in rows[-8:] if part != "ledger" else rows:
                print({name: round(v, 4) if isinstance(v, float) else v for name, v in row.items()}, flush=True)
    write_results(rows, arguments.json)


if __name__ == "__main__":
    main()
