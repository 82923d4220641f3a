"""Render and parse the chat and think template; no other module does.

    <|im_start|>user\n{query}\n<|im_end|><|im_start|>assistant\n<|think_start|>{reasoning}<|think_end|>\n{answer}\n<|im_end|>

The markers are ids, never text: a query that spells `<|im_end|>` stays a query. A prompt ends with `<|think_start|>`,
so the model's completion begins with its reasoning.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from data.tokenizer import Tokenizer

THINK_END = re.compile(r"<\|think_end\|>|</think>")
THINK_START = re.compile(r"\A\s*(?:<\|think_start\|>|<think>)")
END = re.compile(r"<\|im_end\|>|<\|endoftext\|>")


@dataclass(frozen=True)
class ParsedReply:
    """The parts of a completion. `answer` is None if the reasoning never ended; `finished`: it has an end marker."""

    reasoning: str
    answer: str | None
    finished_thinking: bool
    finished: bool


def encode_prompt(tokenizer: Tokenizer, query: str) -> list[int]:
    """Ids of the template up to `<|think_start|>`, which is the last of them."""
    return [
        tokenizer.im_start,
        *tokenizer.encode(f"user\n{query}\n"),
        tokenizer.im_end,
        tokenizer.im_start,
        *tokenizer.encode("assistant\n"),
        tokenizer.think_start,
    ]


def encode_prompt_start(tokenizer: Tokenizer, shared: str) -> list[int]:
    """Ids that prompts begin with whose queries all begin with `shared`, which is empty or ends in a line break."""
    return [tokenizer.im_start, *tokenizer.encode(f"user\n{shared}")]


def encode_prompt_end(tokenizer: Tokenizer, rest: str) -> list[int]:
    """Ids of the rest of a query and of an empty reasoning: after `encode_prompt_start`, all but the answer."""
    return [
        *tokenizer.encode(f"{rest}\n"),
        tokenizer.im_end,
        tokenizer.im_start,
        *tokenizer.encode("assistant\n"),
        tokenizer.think_start,
        tokenizer.think_end,
    ]


def encode_direct_reply(tokenizer: Tokenizer, answer: str) -> list[int]:
    """Ids of an answer after `encode_prompt_end`, with the end marker."""
    return [*tokenizer.encode(f"\n{answer}\n"), tokenizer.im_end]


def encode_turns(
    tokenizer: Tokenizer, turns: Iterable[tuple[str, str, str]], threads: int = 1
) -> tuple[list[np.ndarray], list[int], list[int]]:
    """Ids of whole turns (query, reasoning, answer), encoded on `threads` threads.

    Returns arrays that concatenate to the ids of all turns, then for each turn its number of ids and how many of these
    belong to the prompt, which the model does not learn to write.
    """
    texts = [text for query, reasoning, answer in turns for text in (f"user\n{query}\n", reasoning, f"\n{answer}\n")]
    encoded = tokenizer.encode_arrays(texts, threads)
    start = np.array([tokenizer.im_start], np.uint32)
    between = np.array(
        [tokenizer.im_end, tokenizer.im_start, *tokenizer.encode("assistant\n"), tokenizer.think_start], np.uint32
    )
    think_end, end = np.array([tokenizer.think_end], np.uint32), np.array([tokenizer.im_end], np.uint32)
    pieces: list[np.ndarray] = []
    lengths: list[int] = []
    prompts: list[int] = []
    for query, reasoning, answer in zip(encoded[::3], encoded[1::3], encoded[2::3], strict=True):
        pieces += (start, query, between, reasoning, think_end, answer, end)
        prompts.append(1 + len(query) + len(between))
        lengths.append(prompts[-1] + len(reasoning) + len(answer) + 2)
    return pieces, lengths, prompts


def parse_completion(tokenizer: Tokenizer, ids: Sequence[int]) -> ParsedReply:
    """Split ids sampled after a prompt into reasoning and answer. Only marker ids count, not text that spells one.

    A marker id in another place is left out of both: its name would be a marker again where the text is sent on.
    """
    ids = [int(token) for token in ids]
    ends = [i for i, token in enumerate(ids) if token in (tokenizer.im_end, tokenizer.end_of_text)]
    finished = bool(ends)
    if finished:
        ids = ids[: ends[0]]
    if tokenizer.think_end not in ids:
        reasoning = tokenizer.decode(ids, specials=False)
        return ParsedReply(reasoning.strip(), None, finished_thinking=False, finished=finished)
    cut = ids.index(tokenizer.think_end)
    reasoning, answer = (tokenizer.decode(part, specials=False) for part in (ids[:cut], ids[cut + 1 :]))
    return ParsedReply(reasoning.strip(), answer.strip(), finished_thinking=True, finished=finished)


def parse_text(text: str) -> ParsedReply:
    """Split a reply that came as text, from this model or from one that writes `<think>…</think>`.

    Text without any think marker is all answer. `finished` is assumed unless the reasoning was left open: endpoints
    strip the end marker, and report a cut reply by their finish reason.
    """
    text = END.split(text, maxsplit=1)[0]
    opened = THINK_START.match(text)
    body = text[opened.end() :] if opened else text
    closed = THINK_END.search(body)
    if closed:
        reasoning, answer = body[: closed.start()], body[closed.end() :]
        return ParsedReply(reasoning.strip(), answer.strip(), finished_thinking=True, finished=True)
    if opened:
        return ParsedReply(body.strip(), None, finished_thinking=False, finished=False)
    return ParsedReply("", body.strip(), finished_thinking=True, finished=True)
