"""The first round of an ingest: one file of a source, read once, screened and tokenised, not yet packed into rows.

What a document costs beyond its tokenising is what `bench/ingest.py` measures: rows come as columns, ids go from the
tokenizer's buffer to the file without a Python object each.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from configs.model import TokenizerConfig
from data.chat import asked, encode_turns
from data.decontaminate import Contamination
from data.deduplicate import in_validation, text_hash
from data.exemplars import Sample, write_candidates
from data.records import Batch, Form, Record
from data.tokenizer import Tokenizer, tokenizer_for
from data.unpacked import CANDIDATES, HITS, UnitCounts, UnpackedWriter, is_finished, read_counts

SAMPLES = 3
SAMPLE_CHARACTERS = 400
HITS_A_DOCUMENT = 3  # kept, the largest share first
BEGINNING = 80  # characters of a document that is shown beside its hit


@dataclass(frozen=True)
class CorpusPlan:
    """How records become rows. `exemplars`: the size of the sample for retrieval; `records`: for progress alone."""

    tokenizer: TokenizerConfig
    form: Form
    row_length: int
    rows_per_shard: int
    validation_share: float
    exemplars: int = 0
    records: int | None = None


@dataclass(frozen=True)
class Screens:
    """What documents are looked at for beside their content hash.

    contamination: held-out questions; a document that overlaps one is rejected. bands: texts -> [documents, bands]
    uint64, for near duplicates.
    """

    contamination: Contamination | None = None
    bands: Callable[[list[str]], np.ndarray] | None = None


def write_unit(
    batches: Iterable[Batch],
    plan: CorpusPlan,
    screens: Screens,
    folder: Path,
    candidates: int = 0,
    threads: int = 1,
    told: Callable[[int, int], None] = lambda rows, tokens: None,
) -> UnitCounts:
    """Tokenise the rows of `batches` into the unit `folder`, or leave it as it is if it is whole already.

    `candidates`: exemplars kept of each exercise; `told(rows, tokens)` is called after each batch. Memory depends on
    the batches alone. Errors of the reader pass through, and leave nothing behind.
    """
    if is_finished(folder):
        return read_counts(folder)
    begun = time.monotonic()
    chat = plan.form == "synth"
    tokenizer = tokenizer_for(plan.tokenizer)
    rows, rejected, samples = 0, Counter[str](), []
    candidates = candidates if chat else 0  # exemplars are exercises
    sample = Sample(candidates)
    with UnpackedWriter(folder, plan.tokenizer.vocabulary, chat=chat, bands=screens.bands is not None) as writer:
        with (writer.partial / HITS).open("w", encoding="utf-8") as hits:
            for batch in batches:
                rows += batch.rows
                batch, texts = _clean(batch, screens.contamination, hits)
                rejected += batch.rejected
                if texts:
                    hashes = np.array([text_hash(text) for text in texts], np.uint64)
                    if screens.bands is not None:
                        writer.add_bands(screens.bands(texts))
                    if candidates:
                        _offer(sample, batch, hashes, writer.documents, plan.validation_share)
                    if len(samples) < SAMPLES:
                        samples += [_shown(batch.record(i)) for i in range(min(len(texts), SAMPLES - len(samples)))]
                    _encode(tokenizer, batch, hashes, writer, threads)
                told(rows, writer.tokens)
        write_candidates(writer.partial / CANDIDATES, sample.candidates())
        seconds = time.monotonic() - begun
        counts = UnitCounts(
            rows, writer.documents, writer.tokens, dict(sorted(rejected.items())), seconds, samples=samples
        )
        writer.finish(counts)
    return counts


def _clean(batch: Batch, contamination: Contamination | None, hits: IO[str]) -> tuple[Batch, list[str]]:
    """The rows of the batch that overlap no held-out question, and their texts; the hits of the others are kept."""
    texts = batch.texts()
    if contamination is None or not texts:
        return batch, texts
    found = contamination.screen(texts)
    if not any(found):
        return batch, texts
    for text, one in zip(texts, found, strict=True):
        for hit in one[:HITS_A_DOCUMENT]:
            hits.write(json.dumps({**asdict(hit), "begins": text[:BEGINNING]}, sort_keys=True) + "\n")
    places = [i for i, one in enumerate(found) if not one]
    return batch.kept(places, "contaminated"), [texts[i] for i in places]


def _encode(tokenizer: Tokenizer, batch: Batch, hashes: np.ndarray, writer: UnpackedWriter, threads: int) -> None:
    """Append the ids of every row; web text gets its end-of-text."""
    columns = batch.columns
    if batch.form == "web":
        encoded = tokenizer.encode_arrays(columns["text"], threads)
        end = np.array([tokenizer.end_of_text], np.uint32)
        writer.add([piece for ids in encoded for piece in (ids, end)], [len(ids) + 1 for ids in encoded], hashes)
        return
    queries = map(asked, columns["query"], columns["exercise"], columns["constraints"])
    turns = zip(queries, columns["synthetic_reasoning"], columns["synthetic_answer"], strict=True)
    pieces, lengths, prompts = encode_turns(tokenizer, turns, threads)
    writer.add(pieces, lengths, hashes)
    writer.add_prompts(prompts)


def _offer(sample: Sample, batch: Batch, hashes: np.ndarray, documents: int, validation_share: float) -> None:
    for i, (digest, exercise) in enumerate(zip(hashes.tolist(), batch.columns["exercise"], strict=True)):
        if not in_validation(digest, validation_share):
            sample.offer(digest, documents + i, exercise, lambda i=i: batch.record(i))


def _shown(record: Record) -> dict[str, Any]:
    """A record for people to look at, long texts cut."""
    return {key: _cut(value) for key, value in asdict(record).items() if value is not None}


def _cut(value: Any) -> Any:
    if not isinstance(value, str) or len(value) <= SAMPLE_CHARACTERS:
        return value
    return value[:SAMPLE_CHARACTERS] + " […]"
