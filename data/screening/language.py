"""Detect the language of a text (py3langid), where the result is reliable: short, formal and mixed texts have none."""

from collections import Counter
from functools import cache
from typing import Any

import numpy as np
from py3langid.langid import MODEL_FILE, LanguageIdentifier

LEAST_PROBABILITY = 0.9  # of 2,000 article questions, all English: 1,902 undecided, 97 `en`, one wrong
LEAST_LETTERS = 12
LONGEST_FEATURE = 6  # bytes; the model's automaton has no state that depends on more of the text


def detect_language(text: str) -> str | None:
    """ISO 639-1 code; None if no language is at least `LEAST_PROBABILITY` likely."""
    if text.isascii() and sum(map(str.isalpha, text[:400])) < LEAST_LETTERS:
        return None
    code, probability = _identifier().classify(text[:4000])
    return code if probability >= LEAST_PROBABILITY and code != "zxx" else None


class _Identifier(LanguageIdentifier):
    """py3langid's identifier, to the bit, with the walk through its automaton done for all positions at once.

    The automaton finds the longest feature that ends at a position (Aho-Corasick), so its state there follows from the
    last six bytes alone: six steps of array operations in place of one step of Python a byte, 4 to 8 times as fast.
    """

    def __init__(self, nb_ptc: np.ndarray, *arguments: Any, **options: Any) -> None:
        # The file has half precision, which each score would convert once more: a third of the time of a text.
        super().__init__(nb_ptc.astype(np.float32), *arguments, **options)

    def _raw_score(self, text: bytes) -> Any:
        next_states, rows, outputs = _tables()
        data = np.frombuffer(text, np.uint8)
        states = np.zeros(len(data), np.intp)
        for back in range(min(LONGEST_FEATURE, len(data)) - 1, -1, -1):
            states[back:] = next_states[rows[states[back:]] + data[: len(data) - back]]
        features = outputs[states]
        features = features[features >= 0]
        if not len(features):
            return super()._raw_score(text)
        return self._sparse_score(Counter(features.tolist()), self.nb_ptc)


@cache
def _identifier() -> _Identifier:
    return _Identifier.from_model_file(MODEL_FILE, norm_probs=True)


@cache
def _tables() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The automaton: next states, the first of a state's 256 entries among them, and a state's feature or -1."""
    identifier = _identifier()
    next_states = np.frombuffer(identifier.tk_nextmove, dtype=identifier.tk_nextmove.typecode)
    return next_states, np.array(identifier.tk_row, np.intp) << 8, np.array(identifier.tk_output, np.intp)
