"""The answers of `/v1/completions`: text goes on as it stands, with the prompt and its log-probabilities if echoed."""

import codecs
from collections.abc import Sequence
from typing import Any

from data.tokenizer import Tokenizer
from flows.protocol import CompletionRequest
from flows.replies import Choice, Reply, Top, check_room
from flows.writing import Writer, Written, bytes_of
from model.orders import Piece, Scored

DEFAULT_TOKENS = 16  # OpenAI's


class CompletionReply(Reply):
    """Plain text going on. Markers such as `<|think_end|>` stand in it by name; the id that ended it does not."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, request: CompletionRequest, tokenizer: Tokenizer, context: int) -> None:
        prompts = [tokenizer.encode(one) if isinstance(one, str) else list(one) for one in request.prompts]
        check_room(prompts, request.max_tokens, DEFAULT_TOKENS, context, tokenizer.vocabulary, "prompt")
        super().__init__(request, tokenizer, prompts)
        self._echo = bool(request.echo)
        scored = self._echo and request.logprobs is not None
        # With nothing to write and nothing to score there would be nothing to order; the scores are left out then.
        for order in self._orders(
            request.max_tokens, DEFAULT_TOKENS, scored or request.max_tokens == 0, request.logprobs or 0
        ):
            text = _text_of(tokenizer, order.prompt) if self._echo else ""
            self.choices.append(Choice(order, Writer(tokenizer, request.stops), text))

    def opening(self) -> list[dict[str, Any]]:
        if not self._echo or self._request.logprobs is not None:  # with scores it comes as these do
            return []
        return [self._chunk(i, one.prompt_text, None, None) for i, one in enumerate(self.choices)]

    def chunk(self, index: int, event: Piece | Scored, told: Written, first: int) -> dict[str, Any] | None:
        choice, text, told_of = self.choices[index], told.answer, None
        if self._request.logprobs is not None:
            echoed = len(choice.order.prompt) if choice.scored else 0
            if isinstance(event, Scored):
                text, echoed = choice.prompt_text + text, 0
            told_of = self._logprobs(choice, echoed + first)
        if not (text or choice.finish or (told_of and told_of["tokens"])):
            return None
        return self._chunk(index, text, told_of, choice.finish)

    def whole(self) -> dict[str, Any]:
        answers = []
        for index, choice in enumerate(self.choices):
            told_of = None if self._request.logprobs is None else self._logprobs(choice, 0)
            answers.append(
                {
                    "index": index,
                    "text": choice.prompt_text + choice.answer,
                    "logprobs": told_of,
                    "finish_reason": choice.finish,
                }
            )
        return self.body(answers, self.kind, self.usage())

    def _chunk(self, index: int, text: str, logprobs: dict[str, Any] | None, finish: str | None) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return self.body([choice], self.chunk_kind, None)

    def _logprobs(self, choice: Choice, first: int) -> dict[str, Any]:
        """Four lists side by side, of the tokens from `first` on: an echoed prompt's, whose very first has no
        log-probability, and those written, the id that ended it included, for harnesses count on one a token."""
        rows = self._rows(choice)
        offsets = self._offsets([one for one, _, _ in rows])[first:]
        rows = rows[first:]
        return {
            "tokens": [self._text(one) for one, _, _ in rows],
            "token_logprobs": [logprob for _, logprob, _ in rows],
            "top_logprobs": [self._best(*row) for row in rows] if self._request.logprobs else None,
            "text_offset": offsets,
        }

    def _rows(self, choice: Choice) -> list[tuple[int, float | None, list[Top]]]:
        """Id, log-probability and alternatives of every token there is."""
        rows: list[tuple[int, float | None, list[Top]]] = []
        if scored := choice.scored:
            best = scored.tops or [[] for _ in scored.logprobs]
            rows = [
                (choice.order.prompt[0], None, []),
                *zip(choice.order.prompt[1:], scored.logprobs, best, strict=True),
            ]
        best = choice.tops or [[] for _ in choice.ids]
        return [*rows, *zip(choice.ids, choice.logprobs, best, strict=True)]

    def _offsets(self, ids: Sequence[int]) -> list[int]:
        """At which character of the text each token begins: those that share a character, where it does."""
        decoder, length, offsets = codecs.getincrementaldecoder("utf-8")("replace"), 0, []
        for one in ids:
            offsets.append(length)
            length += len(decoder.decode(bytes_of(self._tokenizer, one)))
        return offsets

    def _best(self, one: int, logprob: float | None, tops: list[Top]) -> dict[str, float] | None:
        """The likeliest tokens, and the one at hand."""
        if logprob is None:
            return None
        return {**{self._text(other): value for other, value in tops}, self._text(one): logprob}


def _text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return b"".join(bytes_of(tokenizer, one) for one in ids).decode("utf-8", "replace")
