"""A chat with a model: one question after another, each a conversation of its own, answered as a stream.

Each question starts a new conversation, because the model is trained on single turns (paper §3.2).
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nautile.common.errors import ConfigError
from nautile.common.text import amount
from nautile.data.chat_template import encode_prompt, parse_completion
from nautile.data.tokenizer import Tokenizer, tokenizer_for
from nautile.flows.serve.token_stream import StreamedText, TokenStream
from nautile.model.decoding.sampling import Sampling
from nautile.model.runtimes.load import Runtime

if TYPE_CHECKING:
    from nautile.model.decoding.engine import Engine


@dataclass(frozen=True)
class ChatSettings:
    """Sampling settings. `max_tokens` None: three quarters of the context, as in the RL stages."""

    max_tokens: int | None = None
    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 1.0
    thinking_budget: int | None = None
    seed: int = 0


@dataclass
class ChatAnswer:
    """A question and its reply. `finished`: the model ended its turn itself."""

    query: str
    thinking: str = ""
    answer: str | None = None
    tokens: int = 0
    finished: bool = False
    seconds: float = field(default=0.0, compare=False)
    first_seconds: float = field(default=0.0, compare=False)  # until the first tokens: prefill and compilation
    first_tokens: int = 0

    def speed(self) -> str:
        """Decoding speed as text, without prefill; empty if all tokens arrived together, which gives no speed."""
        later, seconds = self.tokens - self.first_tokens, self.seconds - self.first_seconds
        return f", {amount(later / seconds)} tokens/s" if later > 0 and seconds > 0 else ""


def chat_sampling(tokenizer: Tokenizer, context: int, settings: ChatSettings) -> Sampling:
    """How the replies of a chat are sampled: to the end of the turn, at most `max_tokens`."""
    return Sampling(
        # Reasoning is much longer than a question, and the RL stages sample with the same split.
        max_tokens=settings.max_tokens or context - context // 4,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        stop_ids=(tokenizer.im_end, tokenizer.end_of_text),
        think_end=tokenizer.think_end,
        thinking_budget=settings.thinking_budget,
    )


def chat_engine(loaded: Runtime, slots: int, queue: int) -> "Engine":
    """An engine, not started, for replies that end with the turn: so many at a time, and so many waiting."""
    from nautile.model.decoding.engine import Engine  # not above: a chat itself needs none, nor what it imports

    tokenizer = tokenizer_for(loaded.tokenizer)
    return Engine(loaded.slots((tokenizer.im_end, tokenizer.end_of_text), tokenizer.think_end, slots), queue)


class Chat:
    """Single turns with a loaded checkpoint or export. Raises ConfigError if the settings do not fit its context."""

    def __init__(self, loaded: Runtime, settings: ChatSettings) -> None:
        context = loaded.config.context
        self._tokenizer = tokenizer_for(loaded.tokenizer)
        sampling = chat_sampling(self._tokenizer, context, settings)
        room = context - sampling.max_tokens
        if room <= 0:
            raise ConfigError(
                f"max_tokens {sampling.max_tokens} leaves no room for a question in a context of {context}"
            )
        # One program is compiled for the whole conversation; shorter prompts are padded to its length.
        self._sampler = loaded.sampler(sampling, rows=1, prompt_length=room)
        self._seed, self._questions = settings.seed, 0  # asked so far

    def ask(self, answer: ChatAnswer, number: int | None = None) -> Iterator[StreamedText]:
        """Generate the reply to `answer.query`: yield text as it is generated, and fill in `answer` at the end.

        `number`: of the question, which its sample depends on; None: the next. Raises `ConfigError` if the question and
        `max_tokens` do not fit into the context.
        """
        prompt = encode_prompt(self._tokenizer, answer.query)
        if len(prompt) > self._sampler.prompt_length:
            raise ConfigError(
                f"the question is {len(prompt)} tokens long in the chat template, and there is room for "
                f"{self._sampler.prompt_length}: shorten it, or lower max_tokens"
            )
        # The same question asked twice gets two replies, and `--seed` repeats the whole conversation.
        if number is None:
            number = self._questions = self._questions + 1
        started = time.perf_counter()
        ids: list[int] = []
        stream = TokenStream(self._tokenizer, chat=True)
        # The first stride includes the prefill, and the compilation with the first question.
        for completion in self._sampler.stream(prompt, (self._seed, number)):
            new_ids = completion.ids[len(ids) :].tolist()  # a completion holds all tokens so far
            ids += new_ids
            if not answer.first_tokens:
                answer.first_tokens, answer.first_seconds = len(ids), time.perf_counter() - started
            yield stream.write(new_ids)
        yield stream.finish()
        # Read from the ids once more, by the same function as in training and evaluation.
        reply = parse_completion(self._tokenizer, ids)
        answer.thinking, answer.answer, answer.finished = reply.reasoning, reply.answer, reply.finished
        answer.tokens, answer.seconds = len(ids), time.perf_counter() - started
