"""Evaluation during pretraining: validation loss by source, and sample continuations of validation documents."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import numpy as np

from nautile.common.events import Emit
from nautile.configs.model import ModelConfig, TokenizerConfig
from nautile.data.tokenizer import Tokenizer, tokenizer_for
from nautile.data.tokens.loader import Batch, Loader
from nautile.model.decoding.generate import Generator
from nautile.model.decoding.sampling import Sampling
from nautile.model.layers.common import Params
from nautile.model.sharding import put_rows
from nautile.model.training.step import BATCH, Program

SAMPLES_PER_SOURCE = 4
OPENING = 16  # tokens of a plain document that the model continues
PROMPT_LIMIT = 64  # tokens of an opening
MAX_TOKENS = 96  # of a continuation


def validate(program: Program, params: Params, loader: Loader, rows: int) -> dict[str, dict[str, float]]:
    """Mean validation loss of each source over its first `rows` rows: nats per target and bits per byte."""
    results: dict[str, dict[str, float]] = {}
    for source in loader.names:
        batch = loader.validation(source, rows)
        sums = [
            program.evaluate(params, put_rows(part, program.mesh)) for part in _micro_batches(batch, program.micro_rows)
        ]
        nats, targets = (sum(float(pair[i]) for pair in sums) for i in range(2))
        size = int(batch["bytes"].sum())
        if targets and size:
            results[source] = {"loss": nats / targets, "bits_per_byte": nats / math.log(2) / size}
    return results


def _micro_batches(batch: Batch, rows: int) -> Iterator[Batch]:
    """Cut a batch into batches of `rows` rows, the last padded with rows of weight 0; yield this process's share."""
    # Every process evaluates its own rows of each part, and the sums are over all of them.
    share = rows // jax.process_count()
    first = share * jax.process_index()
    for start in range(0, len(batch["source"]), rows):
        part = {name: batch[name][start : start + rows] for name in BATCH}
        missing = rows - len(part["source"])
        padded = {name: np.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1)) for name, array in part.items()}
        yield {name: array[first : first + share] for name, array in padded.items()}


@dataclass(frozen=True)
class Opening:
    """The beginning of a validation document, and its true continuation."""

    source: str
    prompt: tuple[int, ...]
    reference: tuple[int, ...]


class MidtrainSampler:
    """Emits `sample` events with greedy continuations of validation documents. Compiles at the first `show`."""

    def __init__(self, model: ModelConfig, tokenizer: TokenizerConfig, loader: Loader, emit: Emit) -> None:
        self._model, self._loader, self._emit = model.with_tokenizer(tokenizer), loader, emit
        self._tokenizer = tokenizer_for(tokenizer)
        self._generator: Generator | None = None
        self._openings: list[Opening] = []

    def show(self, params: Params, step: int) -> None:
        """Emit one sample per opening, in the set "pretrain-<step>"."""
        if self._generator is None:
            limit = min(PROMPT_LIMIT, self._model.context // 2)
            for source in self._loader.names:
                self._openings += openings(self._loader, source, self._tokenizer, limit)
            if not self._openings:
                return
            longest = max(len(opening.prompt) for opening in self._openings)
            max_tokens = min(MAX_TOKENS, self._model.context - longest)
            stops = (self._tokenizer.im_end, self._tokenizer.end_of_text)
            sampling = Sampling(max_tokens=max_tokens, temperature=0.0, stop_ids=stops)
            self._generator = Generator(self._model, sampling, rows=len(self._openings), prompt_length=longest)
        prompts = [opening.prompt for opening in self._openings]
        seeds = [(step, index) for index in range(len(prompts))]
        for index, completion in enumerate(self._generator(params, prompts, seeds)):
            opening = self._openings[index]
            self._emit(
                "sample",
                set=f"pretrain-{step}",
                index=index,
                step=step,
                source=opening.source,
                prompt=self._tokenizer.decode(opening.prompt),
                text=self._tokenizer.decode(completion.ids.tolist()),
                reference=self._tokenizer.decode(opening.reference),
                truncated=completion.truncated,
            )


def openings(loader: Loader, source: str, tokenizer: Tokenizer, limit: int) -> list[Opening]:
    """Openings from a source's validation rows: at most four, each from the first document of a row.

    A chat document is cut where the assistant's reasoning starts, any other after 16 tokens. Openings of more than
    `limit` tokens, or with nothing after them, are skipped.
    """
    selected = []
    batch = loader.validation(source, 4 * SAMPLES_PER_SOURCE)
    for tokens_L, segments_L in zip(batch["tokens"], batch["segments"], strict=True):
        document = tokens_L[segments_L == 1].tolist()
        is_chat = tokenizer.think_start in document
        cut = document.index(tokenizer.think_start) + 1 if is_chat else OPENING
        if cut <= limit and cut < len(document):
            reference = np.asarray(document[cut : cut + MAX_TOKENS]).tolist()
            selected.append(Opening(source, tuple(document[:cut]), tuple(reference)))
    return selected[:SAMPLES_PER_SOURCE]
