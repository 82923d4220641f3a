"""A decoding engine for tests of the HTTP API: checks requests as the real one does, and answers with three tokens."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from nautile.configs.model import TokenizerConfig
from nautile.data.tokenizer import tokenizer_for
from nautile.flows.serve.http import ServedModel, application
from nautile.model.decoding.engine import Engine, Listener
from nautile.model.decoding.slots import Chunk, DecodeRequest, Handle, PromptScores

TOKENIZER = TokenizerConfig(ranks=256)
NAME = "checkpoint/0123456789ab"


class InstantEngine(Engine):
    """No programs and no thread: the events of a request are there when it is submitted."""

    def __init__(self, context: int = 128, queue: int = 64) -> None:
        config = SimpleNamespace(context=context, vocabulary=TOKENIZER.vocabulary)
        programs: Any = SimpleNamespace(config=config, count=4)
        super().__init__(programs, queue)

    def start(self, listener: Listener) -> None:
        self._listener = listener
        self.ready.set()

    def submit(self, requests: Sequence[DecodeRequest]) -> list[Handle]:
        events: list[Any] = []
        for request in requests:
            self._check(request)
        handles = [Handle(request) for request in requests]
        for handle in handles:
            request = handle.request
            best = [(98, -1.5)] * request.alternatives
            if request.score_prompt:
                scored = len(request.prompt) - 1
                events.append((handle, PromptScores([-1.0] * scored, [best] * scored)))
            if count := min(3, request.max_tokens):
                self.tokens += count
                events.append((handle, Chunk([97] * count, [-0.5] * count, [best] * count, "length")))
        self._listener(events)
        return handles


def instant_application(key: str | None = None, **engine: int) -> Any:
    """The server's application over an `InstantEngine`."""
    return application(ServedModel(NAME, 1_700_000_000, tokenizer_for(TOKENIZER), InstantEngine(**engine), key))
