"""Translate completion requests into engine requests, and engine events into OpenAI's response bodies or chunks.

Log-probabilities are those of the untruncated distribution at temperature 1, restricted to the tokens that a constraint
allows. A `response_format` constrains the answer, after the thinking, whose default budget is half of the tokens that
the shortest document leaves, so that the answer has room; 0 skips the thinking.
"""

import codecs
import functools
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nautile.common.errors import ConfigError
from nautile.data.chat_template import encode_prompt
from nautile.data.tokenizer import Tokenizer
from nautile.flows.serve.protocol import ApiError, ChatCompletionRequest, CompletionRequest, ResponseFormat
from nautile.flows.serve.token_stream import Part, StreamedText, TokenStream, bytes_of
from nautile.model.decoding.constrained import Constraint
from nautile.model.decoding.slots import Chunk, DecodeRequest, PromptScores

FIELD = "response_format"
CACHED_SCHEMAS = 32


def constraint_for(tokenizer: Tokenizer, response_format: ResponseFormat | None) -> Constraint | None:
    """The constraint of the answer; None for free text. Raises `ApiError` 400 for an invalid or unsatisfiable schema.

    Compiling a schema may take 0.1 s, so call this in a thread. Equal schemas are compiled once.
    """
    if response_format is None or response_format.type == "text":
        return None
    schema = {"type": "object"} if response_format.json_schema is None else response_format.json_schema.content
    try:
        return _compiled(tokenizer, json.dumps(schema))
    except ConfigError as error:
        raise ApiError(400, str(error), FIELD, "invalid_schema") from None


def constrained_request(constraint: Constraint, request: DecodeRequest) -> DecodeRequest:
    """The request with the constraint and a thinking budget. Raises `ApiError` 400 if no answer fits `max_tokens`."""
    spare = request.max_tokens - constraint.least_tokens
    if spare < 0:
        message = (
            f"max_tokens: {request.max_tokens} are too few for the {FIELD}, whose shortest answer has "
            f"{constraint.least_tokens} tokens"
        )
        raise ApiError(400, message, "max_tokens")
    budget = spare // 2 if request.thinking_budget is None else request.thinking_budget
    return replace(request, constraint=constraint, thinking_budget=budget)


@functools.lru_cache(maxsize=CACHED_SCHEMAS)
def _compiled(tokenizer: Tokenizer, schema: str) -> Constraint:
    return Constraint(tokenizer, json.loads(schema), f"{FIELD}.json_schema.schema")


DEFAULT_TOKENS = 16  # default of `max_tokens` in /v1/completions, as in OpenAI's API
TokenScore = tuple[int, float]  # a token id and its log-probability


@dataclass
class Choice:
    """One sample of the response: its engine request, and its text and tokens so far."""

    request: DecodeRequest
    stream: TokenStream
    prompt_text: str = ""
    prompt_scores: PromptScores | None = None
    thinking: str = ""
    answer: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    alternatives: list[list[TokenScore]] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, event: Chunk | PromptScores) -> StreamedText:
        """Process an event of the engine and return the new text. The last event, or a stop string, ends the choice."""
        if isinstance(event, PromptScores):
            self.prompt_scores = event
            # With `max_tokens` 0 only the scores were asked for, so the choice ends with them.
            self.finish_reason = None if self.request.max_tokens else "length"
            return StreamedText()
        added = self.stream.write(event.ids)
        self.ids += event.ids[: added.used]
        self.logprobs += event.logprobs[: added.used]
        self.alternatives += event.alternatives[: added.used]
        # The tokens behind the stop string are in neither the text, the log-probabilities nor the usage.
        if self.stream.stopped:
            self.finish_reason = "stop"
        elif event.finish:
            self.finish_reason = event.finish
            final = self.stream.finish()
            added.thinking, added.answer = added.thinking + final.thinking, added.answer + final.answer
        self.thinking, self.answer = self.thinking + added.thinking, self.answer + added.answer
        return added


class ResponseBuilder(ABC):
    """Collects the engine events of all samples of one HTTP request, and builds the response bodies.

    `kind`, `chunk_kind`: the `object` field of the response and of its stream chunks. `prefix`: of its id.
    """

    kind = chunk_kind = prefix = ""

    def __init__(
        self,
        request: CompletionRequest | ChatCompletionRequest,
        tokenizer: Tokenizer,
        prompts: list[list[int]],
        model: str,
    ) -> None:
        self._request, self._tokenizer, self._prompts, self._model = request, tokenizer, prompts, model
        self._created = int(time.time())
        self._id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.choices: list[Choice] = []

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason for choice in self.choices)

    def usage(self) -> dict[str, Any]:
        """The `usage` field: token counts. A prompt with `n` samples counts once."""
        prompt = sum(map(len, self._prompts))
        completion = sum(len(choice.ids) for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def fault(self, index: int) -> str | None:
        """How a finished choice breaks what the request demands of it; None if it does not."""
        return None

    def opening_chunks(self) -> list[dict[str, Any]]:
        """The chunks at the beginning of a stream."""
        return []

    @abstractmethod
    def chunk(self, index: int, event: Chunk | PromptScores, added: StreamedText, first: int) -> dict[str, Any] | None:
        """The stream chunk for `event` of choice `index`, or None if it is empty. `first`: index of its first token."""

    @abstractmethod
    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        """The text and log-probabilities of a choice in the body of a non-streaming response."""

    def whole(self) -> dict[str, Any]:
        """The body of a non-streaming response."""
        choices = [
            {"index": index, **self.whole_choice(choice), "finish_reason": choice.finish_reason}
            for index, choice in enumerate(self.choices)
        ]
        return self._body(choices, self.kind, self.usage())

    def usage_chunk(self) -> dict[str, Any]:
        """The final chunk with token counts, for `stream_options.include_usage`."""
        return self._body([], self.chunk_kind, self.usage())

    def _chunk(self, index: int, logprobs: dict[str, Any] | None = None, **content: Any) -> dict[str, Any]:
        """The stream chunk that adds `content` (`delta` or `text`) to a choice."""
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": self.choices[index].finish_reason}
        return self._body([choice], self.chunk_kind, None)

    def _body(self, choices: Sequence[dict[str, Any]], kind: str, usage: dict[str, Any] | None) -> dict[str, Any]:
        head = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        return {**head, "choices": list(choices), "usage": usage}

    def _decode_requests(self, max_tokens: int, score_prompt: bool, alternatives: int) -> list[DecodeRequest]:
        """`n` engine requests per prompt. Sample j has seed (seed, j + 1), like question j + 1 of `nautile chat`.

        A prompt that is given again has further samples: with the seeds of the first it would only repeat them.
        """
        request = self._request
        asked = Counter[tuple[int, ...]]()
        requests = []
        for prompt in map(tuple, self._prompts):
            # Without a seed every sample is different, as in OpenAI's API; with one, those of two prompts are alike.
            seed = secrets.randbits(63) if request.seed is None else request.seed
            for _ in range(request.n or 1):
                asked[prompt] += 1
                requests.append(
                    DecodeRequest(
                        prompt=prompt,
                        max_tokens=max_tokens,
                        seed=(seed, asked[prompt]),
                        temperature=1.0 if request.temperature is None else request.temperature,
                        top_k=request.top_k or 0,
                        top_p=1.0 if request.top_p is None else request.top_p,
                        thinking_budget=request.thinking_budget,
                        score_prompt=score_prompt,
                        alternatives=alternatives,
                    )
                )
        return requests

    def _token_text(self, token: int) -> str:
        """The text of a token, or `bytes:\\x..` if it is not UTF-8, so that different tokens have different texts."""
        raw = bytes_of(self._tokenizer, token)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def refuse_long_text(text: str, context: int, tokenizer: Tokenizer, field_name: str) -> None:
    """Raise `ApiError` 400 for a text that cannot fit the context, without encoding it: 4 MB take six seconds."""
    least = -(-len(text.encode("utf-8", "replace")) // tokenizer.longest)
    if least > context:
        message = f"{field_name}: at least {least} tokens do not fit into the model's context of {context}"
        raise ApiError(400, message, field_name, "context_length_exceeded")


def check_prompts(
    prompts: list[list[int]], max_tokens: int, context: int, tokenizer: Tokenizer, field_name: str
) -> None:
    """Raise `ApiError` 400, with the field, for prompts over the context or with an id that no token has."""
    for index, prompt in enumerate(prompts):
        where = f"{field_name}[{index}]" if len(prompts) > 1 else field_name
        too_long = "context_length_exceeded"
        if len(prompt) + min(max_tokens, 1) > context:
            message = f"{where}: {len(prompt)} tokens do not fit into the model's context of {context}"
            raise ApiError(400, message, field_name, too_long)
        if len(prompt) + max_tokens > context:
            message = (
                f"max_tokens: {max_tokens} after the {len(prompt)} tokens of {where} exceed the model's context of "
                f"{context}: set it to at most {context - len(prompt)}"
            )
            raise ApiError(400, message, "max_tokens", too_long)
        if (unused := tokenizer.first_unused(prompt)) is not None:
            message = f"{where}: no token of the vocabulary of {tokenizer.vocabulary} has the id {unused}"
            raise ApiError(400, message, field_name)


class ChatCompletionResponse(ResponseBuilder):
    """The response to a chat request: an answer, with its reasoning in `reasoning_content`."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(
        self,
        request: ChatCompletionRequest,
        tokenizer: Tokenizer,
        context: int,
        model: str,
        constraint: Constraint | None = None,
    ) -> None:
        refuse_long_text(request.query, context, tokenizer, "messages")
        prompt = encode_prompt(tokenizer, request.query)
        limit = request.max_tokens or request.max_completion_tokens
        # At least one token must fit; without a limit the reply may fill the context.
        check_prompts([prompt], limit or 1, context, tokenizer, "messages")
        super().__init__(request, tokenizer, [prompt], model)
        self._constraint = constraint
        limit = limit or context - len(prompt)
        for decode_request in self._decode_requests(limit, False, request.top_logprobs or 0):
            if constraint is not None:
                decode_request = constrained_request(constraint, decode_request)
            self.choices.append(Choice(decode_request, TokenStream(tokenizer, request.stops, chat=True)))

    def fault(self, index: int) -> str | None:
        choice = self.choices[index]
        # An answer that was cut, at the limit or at a stop string, is no whole document.
        if self._constraint is None or choice.finish_reason != "stop" or choice.stream.stopped:
            return None
        return self._constraint.fault(choice.answer)

    def usage(self) -> dict[str, Any]:
        reasoning = sum(choice.stream.parts.count("thinking") for choice in self.choices)
        return {**super().usage(), "completion_tokens_details": {"reasoning_tokens": reasoning}}

    def opening_chunks(self) -> list[dict[str, Any]]:
        return [self._chunk(index, delta={"role": "assistant"}) for index in range(len(self.choices))]

    def chunk(self, index: int, event: Chunk | PromptScores, added: StreamedText, first: int) -> dict[str, Any] | None:
        choice = self.choices[index]
        texts = (("reasoning_content", added.thinking), ("content", added.answer))
        delta = {name: text for name, text in texts if text}
        logprobs = self._logprobs(choice, first)
        if not (delta or choice.finish_reason or logprobs):
            return None
        return self._chunk(index, logprobs, delta=delta)

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        # No answer began: null says "still thinking at the limit", where an empty text would look like an empty answer.
        content = choice.answer if choice.stream.part == "answer" else None
        message = {"role": "assistant", "content": content, "reasoning_content": choice.thinking, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(choice, 0)}

    def _logprobs(self, choice: Choice, first: int) -> dict[str, Any] | None:
        """The `logprobs` field: of the answer's tokens under `content`, of the reasoning under `reasoning_content`."""
        if not self._request.logprobs:
            return None
        rows: dict[Part, list[dict[str, Any]]] = {"answer": [], "thinking": []}
        alternatives = choice.alternatives or [[] for _ in choice.ids]
        for index in range(first, len(choice.ids)):
            if (part := choice.stream.parts[index]) is not None:
                top = [self._token(*alternative) for alternative in alternatives[index]]
                rows[part].append({**self._token(choice.ids[index], choice.logprobs[index]), "top_logprobs": top})
        return {"content": rows["answer"], "refusal": None, "reasoning_content": rows["thinking"]}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._token_text(token),
            "logprob": logprob,
            "bytes": list(bytes_of(self._tokenizer, token)),
        }


class CompletionResponse(ResponseBuilder):
    """The response to a text completion: the continued text.

    Special tokens such as `<|think_end|>` are in the text by name, except the token that ended it.
    """

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, request: CompletionRequest, tokenizer: Tokenizer, context: int, model: str) -> None:
        for prompt in request.prompts:
            if isinstance(prompt, str):
                refuse_long_text(prompt, context, tokenizer, "prompt")
        prompts = [tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in request.prompts]
        max_tokens = DEFAULT_TOKENS if request.max_tokens is None else request.max_tokens
        check_prompts(prompts, max_tokens, context, tokenizer, "prompt")
        super().__init__(request, tokenizer, prompts, model)
        self._echo = bool(request.echo)
        # The engine rejects a request that neither generates nor scores. With `max_tokens` 0 the prompt is therefore
        # always scored; the response includes the scores only if they were requested.
        score_prompt = (self._echo and request.logprobs is not None) or request.max_tokens == 0
        for decode_request in self._decode_requests(max_tokens, score_prompt, request.logprobs or 0):
            raw = b"".join(bytes_of(tokenizer, token) for token in decode_request.prompt) if self._echo else b""
            text = raw.decode("utf-8", "replace")
            self.choices.append(Choice(decode_request, TokenStream(tokenizer, request.stops), text))

    def opening_chunks(self) -> list[dict[str, Any]]:
        if not self._echo or self._request.logprobs is not None:  # with scores, their chunk contains the prompt
            return []
        return [self._chunk(index, text=choice.prompt_text) for index, choice in enumerate(self.choices)]

    def chunk(self, index: int, event: Chunk | PromptScores, added: StreamedText, first: int) -> dict[str, Any] | None:
        choice, text, logprobs = self.choices[index], added.answer, None
        if self._request.logprobs is not None:
            echoed = len(choice.request.prompt) if choice.prompt_scores else 0
            if isinstance(event, PromptScores):
                text, echoed = choice.prompt_text + text, 0
            logprobs = self._logprobs(choice, echoed + first)
        if not (text or choice.finish_reason or (logprobs and logprobs["tokens"])):
            return None
        return self._chunk(index, logprobs, text=text)

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        logprobs = None if self._request.logprobs is None else self._logprobs(choice, 0)
        return {"text": choice.prompt_text + choice.answer, "logprobs": logprobs}

    def _logprobs(self, choice: Choice, first: int) -> dict[str, Any]:
        """The `logprobs` field: four parallel lists over the tokens from `first` on.

        They include an echoed prompt, whose first token has no log-probability, and all generated tokens. The token
        that ended the text is included, because evaluation harnesses count one row per token.
        """
        rows: list[tuple[int, float | None, list[TokenScore]]] = []
        if scores := choice.prompt_scores:
            prompt = choice.request.prompt
            alternatives = scores.alternatives or [[] for _ in scores.logprobs]
            rows = [(prompt[0], None, []), *zip(prompt[1:], scores.logprobs, alternatives, strict=True)]
        alternatives = choice.alternatives or [[] for _ in choice.ids]
        rows += zip(choice.ids, choice.logprobs, alternatives, strict=True)
        # The offset in characters at which each token begins. Tokens that are parts of one character share its offset.
        decoder, length, offsets = codecs.getincrementaldecoder("utf-8")("replace"), 0, []
        for token, _, _ in rows:
            offsets.append(length)
            length += len(decoder.decode(bytes_of(self._tokenizer, token)))
        rows = rows[first:]
        # The most likely tokens, and the sampled token.
        top = [
            None if logprob is None else {self._token_text(other): p for other, p in [*best, (token, logprob)]}
            for token, logprob, best in rows
        ]
        return {
            "tokens": [self._token_text(token) for token, _, _ in rows],
            "token_logprobs": [logprob for _, logprob, _ in rows],
            "top_logprobs": top if self._request.logprobs else None,
            "text_offset": offsets[first:],
        }
