"""The answers of `/v1/completions`: text goes on as it stands, with the prompt and its log-probabilities if echoed."""

from collections.abc import Sequence
from typing import Any

from data.tokenizer import Tokenizer
from flows.protocol import CompletionRequest
from flows.replies import Choice, Reply, Top, check_room
from flows.writing import Writer, Written, bytes_of
from model.engine import Piece, Scored

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
            begins = isinstance(event, Scored)
            text = choice.prompt_text + text if begins else text
            told_of = self._logprobs(choice, begins, first)
        if not (text or choice.finish or (told_of and told_of["tokens"])):
            return None
        return self._chunk(index, text, told_of, choice.finish)

    def whole(self) -> dict[str, Any]:
        answers = []
        for index, choice in enumerate(self.choices):
            told_of = None if self._request.logprobs is None else self._logprobs(choice, self._echo, 0)
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

    def _logprobs(self, choice: Choice, with_prompt: bool, first: int) -> dict[str, Any]:
        """Four lists side by side; the first token of a prompt has no log-probability. The end's id is left out."""
        rows: list[tuple[int, float | None, list[Top]]] = []
        if with_prompt and choice.scored:
            scored = choice.scored
            tops = scored.tops or [[] for _ in scored.logprobs]
            rows.append((choice.order.prompt[0], None, []))
            rows += zip(choice.order.prompt[1:], scored.logprobs, tops, strict=True)
        start = 0 if rows else len(choice.prompt_text) + self._length(choice.ids[:first])
        tops = choice.tops or [[] for _ in choice.ids]
        rows += [
            row
            for row, part in zip(
                zip(choice.ids[first:], choice.logprobs[first:], tops[first:], strict=True),
                choice.writer.parts[first:],
                strict=True,
            )
            if part is not None
        ]
        texts, offsets = [self._text(one) for one, _, _ in rows], []
        for one, _, _ in rows:
            offsets.append(start)
            start += self._length([one])
        wanted = bool(self._request.logprobs)
        return {
            "tokens": texts,
            "token_logprobs": [logprob for _, logprob, _ in rows],
            "top_logprobs": [self._best(*row) for row in rows] if wanted else None,
            "text_offset": offsets,
        }

    def _best(self, one: int, logprob: float | None, tops: list[Top]) -> dict[str, float] | None:
        """The likeliest tokens, and the one at hand."""
        if logprob is None:
            return None
        return {**{self._text(other): value for other, value in tops}, self._text(one): logprob}

    def _length(self, ids: Sequence[int]) -> int:
        return len(_text_of(self._tokenizer, ids))


def _text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return b"".join(bytes_of(tokenizer, one) for one in ids).decode("utf-8", "replace")
