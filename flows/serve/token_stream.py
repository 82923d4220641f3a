"""Incremental decoding of token ids to text: reasoning and answer separate, cut at stop strings, whole characters.

The concatenated texts equal the result of `data.chat_template.parse_completion` for the whole completion. Text that may
be the beginning of a stop string, or trailing white space of a part, is held back until that is decided.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from nautile.data.tokenizer import Tokenizer

Part = Literal["thinking", "answer"]


@dataclass
class StreamedText:
    """New text by part. `used`: the number of ids up to the end of the stream by a stop string."""

    thinking: str = ""
    answer: str = ""
    used: int = 0

    def add(self, part: Part, text: str) -> None:
        setattr(self, part, getattr(self, part) + text)


@dataclass
class TokenStream:
    """Incremental decoder of one completion.

    `chat`: the completion begins with thinking, and white space around its parts is stripped; otherwise all text is
    `answer`, unchanged. `stops`: strings that end the answer; in the thinking they have no effect. `parts`: the part of
    each used id; None for an id that ends a part.
    """

    tokenizer: Tokenizer
    stops: Sequence[str] = ()
    chat: bool = False
    stopped: bool = False
    parts: list[Part | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.part: Part = "thinking" if self.chat else "answer"
        self._end_ids = (self.tokenizer.im_end, self.tokenizer.end_of_text)
        self._begin_part()

    def write(self, ids: Sequence[int]) -> StreamedText:
        """Decode more ids and return the new text. Ids after a stop string are ignored."""
        added = StreamedText()
        for token in ids:
            if self.stopped:
                break
            added.used += 1
            if token in self._end_ids:
                self.parts.append(None)
            elif self.part == "thinking" and token == self.tokenizer.think_end:
                # White space that was held back at the end of the reasoning is dropped here: it belongs to no part.
                self.parts.append(None)
                added.add("thinking", self._flush())
                self.part = "answer"
                self._begin_part()
            else:
                self.parts.append(self.part)
                raw = bytes_of(self.tokenizer, token, specials=not self.chat)
                added.add(self.part, self._release(self._decoder.decode(raw)))
        return added

    def finish(self) -> StreamedText:
        """The text that was held back; call it after the last id."""
        added = StreamedText()
        if not self.stopped:
            added.add(self.part, self._flush())
        return added

    def _begin_part(self) -> None:
        # A token may end inside a character: the decoder keeps its bytes until the rest arrives.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held, self._any_text = "", False

    def _flush(self) -> str:
        text = self._release(self._decoder.decode(b"", final=True))
        if not self.stopped:
            text += self._held.rstrip() if self.chat else self._held
        return text

    def _release(self, text: str) -> str:
        """Add `text` to the held-back text, and return as much of it as later text cannot change."""
        self._held += text
        if self.chat and not self._any_text:
            self._held = self._held.lstrip()
        self._any_text = self._any_text or bool(self._held)
        length = len(self._held)
        if self.part == "answer":
            # Of several stop strings the one that begins first counts.
            positions = [position for stop in self.stops if (position := self._held.find(stop)) >= 0]
            if positions:
                self.stopped, length = True, min(positions)
            else:
                # Hold back the longest suffix of the text that is a prefix of a stop string.
                sizes = ((size, stop) for stop in self.stops for size in range(1, min(length, len(stop) - 1) + 1))
                length -= max((size for size, stop in sizes if stop.startswith(self._held[-size:])), default=0)
        if self.chat:
            length = len(self._held[:length].rstrip())
        released, self._held = self._held[:length], self._held[length:]
        return released


def bytes_of(tokenizer: Tokenizer, token: int, *, specials: bool = True) -> bytes:
    """The bytes of a token; U+FFFD for an unused id, which a model with random weights may sample."""
    try:
        return tokenizer.decode_bytes([token], specials)
    except ValueError:
        return "\N{REPLACEMENT CHARACTER}".encode()
