"""`nautile serve` under 1, 8 and 32 clients: tokens/s, time to the first token and to the last, on this machine.

    python bench/decoding/serving.py [CHECKPOINT] [--requests 64] [--tokens 128] [--slots 32] [--repeats 3]
    python bench/decoding/serving.py FOLDER --shape nautile_370m      only writes a checkpoint, for `nautile bench`

A real server process on loopback and real streams of the `openai` client, greedy, over one set of questions. The
baseline is one client that asks one question after another. The rounds of 1, 8 and 32 clients are interleaved; medians
over the repeats. Without CHECKPOINT, a checkpoint of `configs/local.toml`'s shape with random weights.
"""

import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx
import jax

sys.path.insert(0, str(Path(__file__).parents[2]))

from openai import AsyncOpenAI

from bench.measure import argument_parser
from nautile.configs.load import load
from nautile.model.nautile import initialise
from nautile.model.weights.files import save_weights
from tests.support.processes.serving import NAME, serving

CLIENTS = (1, 8, 32)


async def ask(client, question, tokens):
    """Ask one question; returns seconds to the first token and to the end, and the number of tokens."""
    start, first_token, usage = time.perf_counter(), None, None
    stream = await client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=tokens,
        stream=True,
        # The server counts tokens exactly; chunks may hold several.
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        # The first chunk names the role, and contains no token.
        if first_token is None and chunk.choices and chunk.choices[0].delta.role is None:
            first_token = time.perf_counter() - start
        usage = chunk.usage or usage
    return first_token, time.perf_counter() - start, usage.completion_tokens


async def round_of(url, clients, questions, tokens):
    """Ask all questions by `clients` clients, one question each at a time; returns figures of `ask` and tokens/s."""
    remaining, figures = iter(questions), []
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as client:
        await client.models.list()  # connects before timing

        async def work_off():
            # All clients take from one iterator, so a slow reply delays its client and not the round.
            for question in remaining:
                figures.append(await ask(client, question, tokens))

        start = time.perf_counter()
        await asyncio.gather(*(work_off() for _ in range(clients)))
        return figures, sum(count for *_, count in figures) / (time.perf_counter() - start)


def write_random(checkpoint, name):
    """A checkpoint of a configuration's shape with random weights: speed does not depend on their values."""
    shape = load(name)
    save_weights(checkpoint, jax.jit(initialise, static_argnums=0)(shape.model, 0), shape.model, shape.tokenizer)
    return checkpoint


def quantile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main():
    parser = argument_parser(__doc__, requests=64, tokens=128, slots=32, repeats=3)
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("--shape", help="only write a checkpoint of this configuration's shape, with random weights")
    arguments = parser.parse_args()
    if arguments.shape:
        write_random(arguments.checkpoint, arguments.shape)
        return
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = arguments.checkpoint or write_random(Path(folder) / "checkpoint", "local")
        questions = [f"State the final answer: {i} + {3 * i + 1} - {i % 7} =" for i in range(arguments.requests)]
        rounds = {clients: [] for clients in CLIENTS}
        with serving(checkpoint, Path(folder) / "store", slots=arguments.slots, queue=256) as server:
            # A first round compiles the server's programs and is not counted.
            asyncio.run(round_of(server.root, 8, questions, 8))
            for _ in range(arguments.repeats):
                for clients in CLIENTS:
                    rounds[clients].append(asyncio.run(round_of(server.root, clients, questions, arguments.tokens)))
            total_tokens = httpx.get(f"{server.root}/health").json()["tokens"]
    lengths = [count for figures, _ in rounds[1] for *_, count in figures]
    print(
        f"{arguments.requests} requests a round; {min(lengths)} to {max(lengths)} tokens a reply; {total_tokens} in all"
    )
    print("clients  tokens/s  times one client  first token p50, p95 ms  whole p50, p95 ms")
    for clients, client_rounds in rounds.items():
        # Medians over the repeats; the ratio is paired with the round of one client.
        rate = statistics.median(rate for _, rate in client_rounds)
        ratio = statistics.median(rate / alone for (_, rate), (_, alone) in zip(client_rounds, rounds[1], strict=True))
        figures = [figure for round_figures, _ in client_rounds for figure in round_figures]
        first, whole = (
            ", ".join(f"{1e3 * quantile([figure[kind] for figure in figures], share):8.0f}" for share in (0.5, 0.95))
            for kind in (0, 1)
        )
        print(f"{clients:7d}  {rate:8.0f}  {ratio:16.1f}  {first:>23}  {whole:>17}")


if __name__ == "__main__":
    main()
