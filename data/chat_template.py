"""The chat and think template: the only place that renders or parses it.

    <|im_start|>user\n{query}\n<|im_end|><|im_start|>assistant\n<|think_start|>{reasoning}<|think_end|>\n{answer}\n<|im_end|>

The markers are ids, never text: a query that spells `<|im_end|>` stays a query. A prompt ends in `<|think_start|>`, so
what the model writes begins with its reasoning.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from data.records import SynthRecord
from data.tokenizer import Tokenizer

THINK_END = re.compile(r"<\|think_end\|>|</think>")
THINK_START = re.compile(r"\A\s*(?:<\|think_start\|>|<think>)")
END = re.compile(r"<\|im_end\|>|<\|endoftext\|>")


@dataclass(frozen=True)
class ChatTurn:
    """One exchange: what is asked, what is thought, what is answered."""

    query: str
    reasoning: str
    answer: str


@dataclass(frozen=True)
class ParsedReply:
    """A completion taken apart. `answer` is None when the reasoning never ended; `finished`: the turn was closed."""

    reasoning: str
    answer: str | None
    finished_thinking: bool
    finished: bool


def turn_of(record: SynthRecord) -> ChatTurn:
    """The turn of a SYNTH record; in the exercise "rag" the constraints (the passages) follow the query."""
    query = user_message(record.query, record.exercise, record.constraints)
    return ChatTurn(query=query, reasoning=record.synthetic_reasoning, answer=record.synthetic_answer)


def user_message(query: str, exercise: str | None, constraints: str | None) -> str:
    """What the user of a SYNTH record says."""
    return f"{query}\n\n{constraints}" if exercise == "rag" and constraints else query


def encode_prompt(tokenizer: Tokenizer, query: str) -> list[int]:
    """Ids up to and with `<|think_start|>`."""
    return [
        tokenizer.im_start,
        *tokenizer.encode(f"user\n{query}\n"),
        tokenizer.im_end,
        tokenizer.im_start,
        *tokenizer.encode("assistant\n"),
        tokenizer.think_start,
    ]


def encode_turn(tokenizer: Tokenizer, turn: ChatTurn) -> tuple[list[int], int]:
    """Ids of the whole turn, and the index of the first id after the prompt: what the model itself has to write."""
    prompt = encode_prompt(tokenizer, turn.query)
    reply = [
        *tokenizer.encode(turn.reasoning),
        tokenizer.think_end,
        *tokenizer.encode(f"\n{turn.answer}\n"),
        tokenizer.im_end,
    ]
    return prompt + reply, len(prompt)


def encode_turns(
    tokenizer: Tokenizer, turns: Iterable[tuple[str, str, str]], threads: int = 1
) -> tuple[list[np.ndarray], list[int], list[int]]:
    """`encode_turn` of many (query, reasoning, answer), on `threads` threads, as pieces that follow one another.

    Returns the pieces, the ids of each turn, and how many of them are its prompt.
    """
    texts = [text for query, thought, answer in turns for text in (f"user\n{query}\n", thought, f"\n{answer}\n")]
    encoded = tokenizer.encode_arrays(texts, threads)
    start = np.array([tokenizer.im_start], np.uint32)
    between = np.array(
        [tokenizer.im_end, tokenizer.im_start, *tokenizer.encode("assistant\n"), tokenizer.think_start], np.uint32
    )
    thought, end = np.array([tokenizer.think_end], np.uint32), np.array([tokenizer.im_end], np.uint32)
    pieces: list[np.ndarray] = []
    lengths: list[int] = []
    prompts: list[int] = []
    for query, reasoning, answer in zip(encoded[::3], encoded[1::3], encoded[2::3], strict=True):
        pieces += (start, query, between, reasoning, thought, answer, end)
        prompts.append(1 + len(query) + len(between))
        lengths.append(prompts[-1] + len(reasoning) + len(answer) + 2)
    return pieces, lengths, prompts


def parse_completion(tokenizer: Tokenizer, ids: Sequence[int]) -> ParsedReply:
    """Take apart ids sampled after a prompt. Only real marker ids count; text that looks like one stays text."""
    ids = [int(one) for one in ids]
    ends = [i for i, one in enumerate(ids) if one in (tokenizer.im_end, tokenizer.end_of_text)]
    finished = bool(ends)
    if finished:
        ids = ids[: ends[0]]
    if tokenizer.think_end not in ids:
        return ParsedReply(tokenizer.decode(ids).strip(), None, finished_thinking=False, finished=finished)
    cut = ids.index(tokenizer.think_end)
    reasoning, answer = tokenizer.decode(ids[:cut]), tokenizer.decode(ids[cut + 1 :])
    return ParsedReply(reasoning.strip(), answer.strip(), finished_thinking=True, finished=finished)


def parse_text(text: str) -> ParsedReply:
    """Take apart a reply had as text, from this model or from one that writes `<think>…</think>`.

    Text without any marker of thought is all answer. `finished` is taken as given unless thought was left open, for
    endpoints strip the end marker and report a cut by their finish reason.
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
