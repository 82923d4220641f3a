"""The answers of `/v1/chat/completions`: what is thought stands apart from what is answered.

`reasoning_content` holds the thinking, `content` the answer, which is null where the thinking did not come to an end.
"""

from typing import Any

from data.chat import encode_prompt
from data.tokenizer import Tokenizer
from flows.protocol import ChatRequest
from flows.replies import Choice, Reply, check_room
from flows.writing import Part, Writer, Written, bytes_of
from model.orders import Piece, Scored


class ChatReply(Reply):
    """An answer to a question, its reasoning beside it."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, request: ChatRequest, tokenizer: Tokenizer, context: int) -> None:
        prompt = encode_prompt(tokenizer, request.query)
        asked = request.max_tokens or request.max_completion_tokens
        check_room([prompt], asked, 1, context, tokenizer.vocabulary, "messages")
        super().__init__(request, tokenizer, [prompt])
        for order in self._orders(asked, context - len(prompt), False, request.top_logprobs or 0):
            self.choices.append(Choice(order, Writer(tokenizer, request.stops, turn=True)))

    def usage(self) -> dict[str, Any]:
        thought = sum(choice.writer.parts.count("thinking") for choice in self.choices)
        return {**super().usage(), "completion_tokens_details": {"reasoning_tokens": thought}}

    def opening(self) -> list[dict[str, Any]]:
        return [self._chunk(index, {"role": "assistant"}, None, None) for index in range(len(self.choices))]

    def chunk(self, index: int, event: Piece | Scored, told: Written, first: int) -> dict[str, Any] | None:
        choice = self.choices[index]
        delta = {name: text for name, text in (("reasoning_content", told.thinking), ("content", told.answer)) if text}
        told_of = self._logprobs(choice, first)
        if not (delta or choice.finish or told_of):
            return None
        return self._chunk(index, delta, told_of, choice.finish)

    def whole(self) -> dict[str, Any]:
        answers = []
        for index, choice in enumerate(self.choices):
            content = choice.answer if choice.writer.part == "answer" else None
            message = {"role": "assistant", "content": content, "reasoning_content": choice.thinking, "refusal": None}
            answers.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self._logprobs(choice, 0),
                    "finish_reason": choice.finish,
                }
            )
        return self.body(answers, self.kind, self.usage())

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, finish: str | None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return self.body([choice], self.chunk_kind, None)

    def _logprobs(self, choice: Choice, first: int) -> dict[str, Any] | None:
        """Of the answer's tokens under `content`, and of the thinking's under `reasoning_content`."""
        if not self._request.logprobs:
            return None
        told: dict[Part, list[dict[str, Any]]] = {"answer": [], "thinking": []}
        tops = choice.tops or [[] for _ in choice.ids]
        for place in range(first, len(choice.ids)):
            if (part := choice.writer.parts[place]) is not None:
                best = [self._token(*top) for top in tops[place]]
                told[part].append({**self._token(choice.ids[place], choice.logprobs[place]), "top_logprobs": best})
        return {"content": told["answer"], "refusal": None, "reasoning_content": told["thinking"]}

    def _token(self, one: int, logprob: float) -> dict[str, Any]:
        return {"token": self._text(one), "logprob": logprob, "bytes": list(bytes_of(self._tokenizer, one))}
