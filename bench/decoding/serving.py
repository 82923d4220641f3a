"""`nautile serve` under 1, 8 and 32 clients: tokens/s, time to the first token and to the last, on this machine.

    python bench/decoding/serving.py [CHECKPOINT] [--requests 64] [--tokens 128] [--slots 32] [--repeats 3]

A real server process on loopback and real streams of the `openai` client, all greedy over one set of questions. One
client asks one after another: that is what the other rows are compared with. The rounds of 1, 8 and 32 clients are
interleaved; medians over the repeats. Without CHECKPOINT, one of `configs/local.toml`'s shape with random weights.
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

from bench.measure import options
from configs.load import load
from model.nautile import initialise
from model.weights.files import load_weights, save_weights
from tests.support.processes.serving import NAME, serving

CLIENTS = (1, 8, 32)


async def ask(client, question, tokens):
    """Seconds to the first and to the last piece, and tokens."""
    began, first, usage = time.perf_counter(), None, None
    stream = await client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=tokens,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        # The chunk that names the role comes at once, and is no token.
        if first is None and chunk.choices and chunk.choices[0].delta.role is None:
            first = time.perf_counter() - began
        usage = chunk.usage or usage
    return first, time.perf_counter() - began, usage.completion_tokens


async def round_of(url, clients, questions, tokens):
    """All questions by so many clients, each asking as soon as it has its answer: figures and tokens/s."""
    left, figures = iter(questions), []
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as client:
        await client.models.list()  # the first connection is not what is measured

        async def ask():
            for question in left:
                figures.append(await ask(client, question, tokens))

        began = time.perf_counter()
        await asyncio.gather(*(ask() for _ in range(clients)))
        return figures, sum(count for *_, count in figures) / (time.perf_counter() - began)


def quantile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main():
    parser = options(__doc__, requests=64, tokens=128, slots=32, repeats=3)
    parser.add_argument("checkpoint", type=Path, nargs="?")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = asked.checkpoint
        if checkpoint is None:
            shape, checkpoint = load("local"), Path(folder) / "checkpoint"
            params = jax.jit(initialise, static_argnums=0)(shape.model, 0)
            save_weights(checkpoint, params, shape.model, shape.tokenizer)
        _, model, _ = load_weights(checkpoint)
        questions = [f"State the final answer: {i} + {3 * i + 1} - {i % 7} =" for i in range(asked.requests)]
        rounds = {clients: [] for clients in CLIENTS}
        with serving(checkpoint, Path(folder) / "store", slots=asked.slots, queue=256) as server:
            asyncio.run(round_of(server.root, 8, questions, 8))
            for _ in range(asked.repeats):
                for clients in CLIENTS:
                    rounds[clients].append(asyncio.run(round_of(server.root, clients, questions, asked.tokens)))
            written = httpx.get(f"{server.root}/health").json()["tokens"]
    lengths = [count for figures, _ in rounds[1] for *_, count in figures]
    print(f"width {model.width}, {model.blocks} blocks, context {model.context}; {asked.slots} slots")
    print(f"{asked.requests} requests a round; a reply has {min(lengths)} to {max(lengths)} tokens; {written} in all")
    print("clients  tokens/s  times one client  first token p50, p95 ms  whole p50, p95 ms")
    for clients, entry in rounds.items():
        rate = statistics.median(rate for _, rate in entry)
        ratio = statistics.median(rate / alone for (_, rate), (_, alone) in zip(entry, rounds[1], strict=True))
        figures = [figure for some, _ in entry for figure in some]
        first, whole = (
            ", ".join(f"{1e3 * quantile([figure[kind] for figure in figures], share):8.0f}" for share in (0.5, 0.95))
            for kind in (0, 1)
        )
        print(f"{clients:7d}  {rate:8.0f}  {ratio:16.1f}  {first:>23}  {whole:>17}")


if __name__ == "__main__":
    main()
