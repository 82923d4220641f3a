"""The chat template with reasoning: encode prompts and turns, parse completions. No other module writes its markers.

    <|im_start|>user\n{query}\n<|im_end|><|im_start|>assistant\n<|think_start|>{reasoning}<|think_end|>\n{answer}\n<|im_end|>

The markers are token ids, never text: a query that contains the string `<|im_end|>` is encoded as ordinary text. A
prompt ends with `<|think_start|>`, so the model's completion begins with its reasoning.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from nautile.data.tokenizer import Tokenizer

# The markers in the text of a reply: ours, and those of the families whose servers pass them on as text (DeepSeek and
# Qwen, Mistral, Seed, Kimi, Cohere, Gemma). Some begin inside their reasoning, so an opening marker may be missing.
THINK_END = re.compile(
    r"<\|think_end\|>|</(?:think|thinking|thought|seed:think)>|\[/THINK\]|◁/think▷|<\|END_THINKING\|>"
    r"|<\|end_of_thought\|>|<channel\|>"
)
THINK_START = re.compile(
    r"\A\s*(?:<\|think_start\|>|<(?:think|thinking|thought|seed:think)>|\[THINK\]|◁think▷|<\|START_THINKING\|>"
    r"|<\|begin_of_thought\|>|<\|channel>thought\b)"
)
END = re.compile(r"<\|im_end\|>|<\|endoftext\|>")
# The "harmony" format of gpt-oss: messages in channels, of which the last one in "final" is the reply.
_CHANNEL = re.compile(
    r"<\|channel\|>\s*(?P<name>\w+)[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>(?P<text>.*?)(?:<\|(?:end|return|call)\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)
# The same after a server has removed the markers and kept the names between them.
_BARE_CHANNELS = re.compile(r"\A\s*analysis(?=[A-Z\s])(?P<thought>.*)assistant\s*final(?P<text>.*)\Z", re.DOTALL)
# Around the reply that follows a thought.
_REPLY_MARKER = re.compile(
    r"\A\s*<\|(?:START_RESPONSE|begin_of_solution)\|>|<\|(?:END_RESPONSE|end_of_solution)\|>\s*\Z"
    r"|<\|(?:begin|end)_of_box\|>"
)


@dataclass(frozen=True)
class ParsedReply:
    """The parts of a completion.

    `answer` is None, and `finished_thinking` False, if the reasoning never ended; `finished`: an end marker was there.
    """

    reasoning: str
    answer: str | None
    finished_thinking: bool
    finished: bool


def encode_prompt(tokenizer: Tokenizer, query: str) -> list[int]:
    """Token ids of the template with a query, up to and including `<|think_start|>`."""
    return [
        tokenizer.im_start,
        *tokenizer.encode(f"user\n{query}\n"),
        tokenizer.im_end,
        tokenizer.im_start,
        *tokenizer.encode("assistant\n"),
        tokenizer.think_start,
    ]


def encode_prompt_start(tokenizer: Tokenizer, shared: str) -> list[int]:
    """Token ids of the common beginning of prompts whose queries begin with `shared`.

    `shared` is empty or ends in a line break, so that the tokenizer does not merge across its end.
    """
    return [tokenizer.im_start, *tokenizer.encode(f"user\n{shared}")]


def encode_prompt_end(tokenizer: Tokenizer, query_end: str) -> list[int]:
    """Token ids of the end of a query and an empty reasoning; they follow `encode_prompt_start`, the answer follows."""
    return [
        *tokenizer.encode(f"{query_end}\n"),
        tokenizer.im_end,
        tokenizer.im_start,
        *tokenizer.encode("assistant\n"),
        tokenizer.think_start,
        tokenizer.think_end,
    ]


def encode_direct_reply(tokenizer: Tokenizer, answer: str) -> list[int]:
    """Token ids of an answer that follows `encode_prompt_end`, with the end marker."""
    return [*tokenizer.encode(f"\n{answer}\n"), tokenizer.im_end]


def encode_turns(
    tokenizer: Tokenizer, turns: Iterable[tuple[str, str, str]], threads: int = 1
) -> tuple[list[np.ndarray], list[int], list[int]]:
    """Encode whole turns (query, reasoning, answer) on `threads` threads.

    Returns (pieces, lengths, prompts): uint32 arrays that concatenate to the ids of all turns; the number of ids of
    each turn; how many of these belong to its prompt, up to and including `<|think_start|>`. Whether prompts are
    trained on is a setting of their source (`train_on`), which `data.tokens.loader` applies.
    """
    # All texts go through the tokenizer in one call, three per turn.
    texts = [text for query, reasoning, answer in turns for text in (f"user\n{query}\n", reasoning, f"\n{answer}\n")]
    encoded = tokenizer.encode_arrays(texts, threads)
    # The same few arrays stand between the texts of every turn; only the caller concatenates, once for all turns.
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


def parse_completion(tokenizer: Tokenizer, ids: Iterable[int]) -> ParsedReply:
    """Split ids sampled after a prompt into reasoning and answer. Only marker ids count, not text that spells one.

    Other marker ids are dropped from both parts: decoded to text, they could be read as markers by another model.
    """
    ids = [int(token) for token in ids]
    ends = [i for i, token in enumerate(ids) if token in (tokenizer.im_end, tokenizer.end_of_text)]
    finished = bool(ends)
    # A sampler may run on after the end marker; the reply ends there.
    if finished:
        ids = ids[: ends[0]]
    if tokenizer.think_end not in ids:
        reasoning = tokenizer.decode(ids, specials=False)
        return ParsedReply(reasoning.strip(), None, finished_thinking=False, finished=finished)
    split = ids.index(tokenizer.think_end)
    reasoning, answer = (tokenizer.decode(part, specials=False) for part in (ids[:split], ids[split + 1 :]))
    return ParsedReply(reasoning.strip(), answer.strip(), finished_thinking=True, finished=finished)


def parse_text(text: str) -> ParsedReply:
    """Split a reply given as text into reasoning and answer; the thoughts of other models' families are understood too.

    Text without think markers is all answer. `finished` is True unless the reasoning has no end: endpoints strip the
    end marker, and report a truncated reply by their finish reason.
    """
    text = END.split(text, maxsplit=1)[0]
    if channels := list(_CHANNEL.finditer(text)):
        thought = "\n".join(match["text"].strip() for match in channels if match["name"] == "analysis")
        finals = [match["text"].strip() for match in channels if match["name"] == "final"]
        return ParsedReply(thought, finals[-1] if finals else None, bool(finals), bool(finals))
    if bare := _BARE_CHANNELS.match(text):
        return ParsedReply(bare["thought"].strip(), bare["text"].strip(), finished_thinking=True, finished=True)
    opening = THINK_START.match(text)
    body = text[opening.end() :] if opening else text
    closing = THINK_END.search(body)
    if closing:
        reasoning, answer = body[: closing.start()], _REPLY_MARKER.sub("", body[closing.end() :])
        return ParsedReply(reasoning.strip(), answer.strip(), finished_thinking=True, finished=True)
    if opening:
        return ParsedReply(body.strip(), None, finished_thinking=False, finished=False)
    return ParsedReply("", body.strip(), finished_thinking=True, finished=True)
