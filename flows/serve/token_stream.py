"""Ids as they are written, out as text: the thinking and the answer apart, cut at stop strings, never a half character.

What comes out piece by piece is, put together, what `data.chat_template.parse_completion` makes of the whole. Text
that may yet
turn out to begin a stop string, or to be the white space that ends a part, is held back until that is clear.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from data.tokenizer import Tokenizer

Part = Literal["thinking", "answer"]


@dataclass
class Written:
    """What some ids brought: text by part, and how many of them were taken before a stop string ended it all."""

    thinking: str = ""
    answer: str = ""
    taken: int = 0

    def add(self, part: Part, text: str) -> None:
        setattr(self, part, getattr(self, part) + text)


@dataclass
class Writer:
    """One reply. `turn`: it begins with thinking and its parts are stripped; else it is all `answer`, as it stands.

    Stop strings end the answer; in a turn what is thought does not end it, for it is not part of the answer.
    `parts` tells for each id taken where it went, None for an id that ends a part.
    """

    tokenizer: Tokenizer
    stops: Sequence[str] = ()
    turn: bool = False
    stopped: bool = False
    parts: list[Part | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.part: Part = "thinking" if self.turn else "answer"
        self._ends = (self.tokenizer.im_end, self.tokenizer.end_of_text)
        self._begin()

    def write(self, ids: Sequence[int]) -> Written:
        """What these ids add. After a stop string nothing is taken any more."""
        told = Written()
        for one in ids:
            if self.stopped:
                break
            told.taken += 1
            if one in self._ends:
                self.parts.append(None)
            elif self.part == "thinking" and one == self.tokenizer.think_end:
                self.parts.append(None)
                told.add("thinking", self._rest())
                self.part = "answer"
                self._begin()
            else:
                self.parts.append(self.part)
                told.add(self.part, self._out(self._decoder.decode(bytes_of(self.tokenizer, one))))
        return told

    def finish(self) -> Written:
        """What was held back, once there is no more to come."""
        told = Written()
        if not self.stopped:
            told.add(self.part, self._rest())
        return told

    def _begin(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held, self._any = "", False

    def _rest(self) -> str:
        text = self._out(self._decoder.decode(b"", final=True))
        if not self.stopped:
            text += self._held.rstrip() if self.turn else self._held
        return text

    def _out(self, text: str) -> str:
        """Hold `text` back, and let go of what is certain."""
        self._held += text
        if self.turn and not self._any:
            self._held = self._held.lstrip()
        self._any = self._any or bool(self._held)
        sure = len(self._held)
        if self.part == "answer":
            found = [place for stop in self.stops if (place := self._held.find(stop)) >= 0]
            if found:
                self.stopped, sure = True, min(found)
            else:
                sure -= max((_overlap(self._held, stop) for stop in self.stops), default=0)
        if self.turn:
            sure = len(self._held[:sure].rstrip())
        out, self._held = self._held[:sure], self._held[sure:]
        return out


def bytes_of(tokenizer: Tokenizer, one: int) -> bytes:
    """The bytes of an id; an id that the vocabulary leaves unused, which weights may still draw, reads as U+FFFD."""
    try:
        return tokenizer.decode_bytes([one])
    except ValueError:
        return "\N{REPLACEMENT CHARACTER}".encode()


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` may be the beginning of `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-size:])), 0)
