"""The `tokenizer` stage: byte-level BPE merges of the corpus's own, trained on the first rows of its sources.

Rows are read and filtered as ingestion does, but not screened for copies and for the benchmarks' questions: how often
their words occur decides merges, and no model is trained on them here.
"""

import itertools
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nautile.common.errors import ConfigError
from nautile.common.files import read_bounded_json, write_json
from nautile.common.text import amount, most_common_reasons
from nautile.configs.ingest import SourceConfig
from nautile.configs.model import CL100K_RANKS, TokenizerConfig, TrainedRanks
from nautile.data.bpe_training import BYTES_PER_TOKEN, CUT, TRAINED, WHOLE, train_ranks
from nautile.data.sources.corpus_source import list_files, read_file, stand_in_of
from nautile.data.tokenizer import Tokenizer, read_tokenizer, save_tokenizer, tokenizer_for
from nautile.tasks.engine.job import Job
from nautile.tasks.engine.stage import stage

MEGABYTE = 10**6
REHEARSED_MEGABYTES, REHEARSED_RANKS = 1.0, 512
CONFIG = "config.json"  # names the ranks as that of a checkpoint does
MEASURED_EVERY = 20  # one document in so many is measured and not trained on …
MEASURED_BYTES = 4 * MEGABYTE  # … up to so much text of a source


@dataclass
class _Sample:
    """The first rows of a source: counts, and the texts that are set aside to be measured."""

    documents: int = 0
    bytes: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    measured: list[str] = field(default_factory=list)
    measured_bytes: int = 0


def tokenizer_of(job: Job) -> TokenizerConfig:
    """The tokenizer of a step that tokenises text: the one that its run has trained, else that of its section."""
    if (folder := job.inputs.get("tokenizer")) is None:
        return job.part("tokenizer", TokenizerConfig)
    return read_tokenizer(read_bounded_json(folder / CONFIG).get("tokenizer"), folder)


def _limits(section: Mapping[str, Any]) -> list[str]:
    return [f"{amount(sum(section['tokenizer']['train']['megabytes'].values()) * MEGABYTE)} bytes of text to train on"]


def _rehearsal(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Fewer merges, which the first rows of the sources are enough for; the model keeps its larger vocabulary."""
    part = settings["tokenizer"]
    megabytes = {name: min(REHEARSED_MEGABYTES, most) for name, most in part["train"]["megabytes"].items()}
    ranks = min(REHEARSED_RANKS, part["ranks"])
    return {"tokenizer": part | {"ranks": ranks, "train": part["train"] | {"megabytes": megabytes}}}


@stage("tokenizer", version=1, outputs=("tokenizer",), heading="Tokenizer", limits=_limits, rehearsal=_rehearsal)
def tokenizer(job: Job) -> None:
    """Train the ranks on a sample of each source, and measure them beside cl100k_base's on texts set aside."""
    config = job.part("tokenizer", TokenizerConfig)
    train = config.train
    if train is None:
        raise ConfigError("stage tokenizer: its section has no `train`")
    sources = {name: SourceConfig.model_validate(fields) for name, fields in job.section["sources"].items()}
    samples = {name: _Sample() for name in sources}
    texts = itertools.chain.from_iterable(
        _read(job, source, int(train.megabytes[name] * MEGABYTE), samples[name]) for name, source in sources.items()
    )
    ranks = train_ranks(texts, config.ranks, train.digits)
    trained = TokenizerConfig.of_trained(config.ranks, TrainedRanks(ranks, train.digits))
    out = job.output("tokenizer")
    write_json(out / CONFIG, {"tokenizer": save_tokenizer(out, trained)})
    compared = {TRAINED: tokenizer_for(trained), WHOLE: tokenizer_for(TokenizerConfig())}
    if config.ranks < CL100K_RANKS:
        compared[CUT] = tokenizer_for(TokenizerConfig(ranks=config.ranks))
    measured = {
        name: {title: _bytes_per_token(encoder, sample) for title, encoder in compared.items()}
        for name, sample in samples.items()
    }
    for name, values in measured.items():
        if (value := values[TRAINED]) is not None:
            job.emit("metric", name="bytes_per_token", step=0, value=value, source=name)
    job.describe(
        "tokenizer",
        **trained.fields,
        longest=compared[TRAINED].longest,
        sample={
            name: {"documents": sample.documents, "bytes": sample.bytes, "rejected": dict(sample.rejected)}
            for name, sample in samples.items()
        },
        **{BYTES_PER_TOKEN: measured},
        stand_ins=[note for source in sources.values() if (note := stand_in_of(source))],
    )


def _read(job: Job, source: SourceConfig, limit: int, sample: _Sample) -> Iterator[str]:
    """The texts of the first rows of a source to train on; `sample` has the others. Raises `ConfigError` for none."""
    for document in _documents(job, source, sample):
        size = sum(len(text.encode()) for text in document)
        sample.documents += 1
        sample.bytes += size
        if sample.documents % MEASURED_EVERY == 0 and sample.measured_bytes + size <= MEASURED_BYTES:
            sample.measured += document
            sample.measured_bytes += size
        else:
            yield from document
        if sample.documents % 1000 == 0:
            job.emit("progress", done=sample.bytes, total=limit, unit="bytes", note=source.name)
        if sample.bytes >= limit:
            break
    if not sample.documents:
        reasons = most_common_reasons(sample.rejected) or "it is empty"
        raise ConfigError(f"tokenizer.train: source {source.name!r} has no usable text ({reasons})")


def _documents(job: Job, source: SourceConfig, sample: _Sample) -> Iterator[Sequence[str]]:
    """The texts of each row as they are tokenised: of an exercise message, reasoning and answer."""
    folder = job.scratch / "fetching"
    try:
        for file in list_files(source, folder):
            for batch in read_file(source, file, folder):
                sample.rejected += batch.rejected
                yield from batch.turns() if batch.form == "synth" else ((text,) for text in batch.texts())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _bytes_per_token(encoder: Tokenizer, sample: _Sample) -> float | None:
    """None where no text was set aside, in a sample of few documents."""
    tokens = sum(map(len, encoder.encode_arrays(sample.measured)))
    return round(sample.measured_bytes / tokens, 4) if tokens else None
