"""Entities by a head on each token: BIO tags (begins, inside, outside) of tokens to and from spans of characters.

A token's state knows the text up to this token, not what follows. Spans are those of `AutoModelForTokenClassification`
with the aggregation "simple": an I tag of another kind than the tag before begins an entity.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from nautile.common.errors import ConfigError
from nautile.data.label_set import HEAD, Head, LabelSet, load_head, read_label_set
from nautile.data.tokenizer import Tokenizer, tokenizer_for
from nautile.model.runtimes.load import Runtime, load_runtime, runtime_of
from nautile.uses.labelled.predictor import readable

Place = tuple[int, int]  # characters [start, end)
OUTSIDE = "O"


def token_places(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[Place]]:
    """The ids of a stripped text, and the characters that each stands for in `text`, white space before them left out.

    The place of a token of white space alone is empty. Tokens of a part of a character stand for the whole.
    """
    stripped = text.strip()
    ids = tokenizer.encode(stripped)
    characters = [place for place, letter in enumerate(stripped) for _ in letter.encode("utf-8", "surrogatepass")]
    lead = len(text) - len(text.lstrip())
    places, before = [], 0
    for token in ids:
        after = before + len(tokenizer.decode_bytes([token]))
        inside = characters[before:after]
        start, end = (inside[0], inside[-1] + 1) if inside else (len(stripped), len(stripped))
        words = stripped[start:end]
        places.append((lead + start + len(words) - len(words.lstrip()), lead + end))
        before = after
    return ids, places


def tags_of(text: str, target: str, places: Sequence[Place]) -> list[str]:
    """The tag of each token. `target`: the entities as JSON, in the order of the text; each is looked for in turn."""
    tags, cursor = [OUTSIDE] * len(places), 0
    for entity in json.loads(target):
        start = text.find(entity["text"], cursor)
        start = text.find(entity["text"]) if start < 0 else start
        cursor = start + len(entity["text"])
        inside = [i for i, (s, e) in enumerate(places) if s < e and s < cursor and e > start and tags[i] == OUTSIDE]
        for order, token in enumerate(inside):
            tags[token] = f"{'I' if order else 'B'}-{entity['label']}"
    return tags


def entities_of(tags: Sequence[str], places: Sequence[Place]) -> list[tuple[int, int, str]]:
    """The entities (start, end, kind) that tags of tokens mean."""
    entities: list[tuple[int, int, str]] = []
    previous = ""
    for tag, (start, end) in zip(tags, places, strict=True):
        if start == end:
            continue
        prefix, _, kind = tag.partition("-")
        if prefix == "I" and kind == previous:
            entities[-1] = (entities[-1][0], end, kind)
        elif tag != OUTSIDE:
            entities.append((start, end, kind))
        previous = kind
    return entities


class TokenTagger:
    """Finds the entities of texts with a checkpoint that was tuned on them by a head, or its export for onnxruntime.

    `runtime`: of the folder, if it is loaded already.
    """

    def __init__(self, folder: Path, rows: int, runtime: "Runtime | None" = None) -> None:
        labels = read_label_set(folder)
        if labels is None or labels.form != "entities" or labels.method != "head":
            raise ConfigError(f"{folder}: has no head for entities; `nautile tune` with `form` and `method` makes one")
        self.labels: LabelSet = labels
        runtime = runtime or load_runtime(runtime_of(folder), folder)
        self._states = partial(runtime.token_states, rows=rows)
        self._head = load_head(folder / HEAD, runtime.config.width, len(labels.classes))
        self.longest = readable(labels, runtime.config)
        self._tokenizer = tokenizer_for(runtime.tokenizer)

    def tokens(self, text: str) -> int:
        """The tokens of a text; one with more than `longest` cannot be read whole."""
        return len(self._tokenizer.encode(text.strip()))

    def entities(self, texts: Sequence[str]) -> list[list[tuple[int, int, str]]]:
        """The entities (start, end, kind) of each text, none of which may have more than `longest` tokens."""
        return tagged(self._head, self.labels.classes, self._tokenizer, texts, self._states)


def tagged(
    head: Head,
    classes: Sequence[str],
    tokenizer: Tokenizer,
    texts: Sequence[str],
    states: Callable[[Sequence[Sequence[int]]], list[np.ndarray]],
) -> list[list[tuple[int, int, str]]]:
    """The entities of each text; `states` computes the hidden states [tokens, D] of ids."""
    read = [token_places(tokenizer, text) for text in texts]
    hidden = states([[tokenizer.end_of_text, *ids] for ids, _ in read])
    return [
        entities_of([classes[i] for i in head.logits(state_SD[1:]).argmax(axis=1)], places)
        for state_SD, (_, places) in zip(hidden, read, strict=True)
    ]
