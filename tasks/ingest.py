"""Ingest (paper §3.1): one source becomes a `tokens` artifact, and for SYNTH a sample of `exemplars` for retrieval.

Two rounds of units, a file each, that any number of workers may share. Between them lies the one step that needs all
of the files: which documents are copies of one another.
"""

import json
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import PositiveInt

from common.errors import ConfigError
from common.files import write_atomically
from configs.base import Section
from configs.ingest import DeduplicateConfig, SourceConfig
from configs.model import TokenizerConfig
from data.screening import minhash
from data.screening.contamination import load_contamination_index
from data.screening.corpus_copies import find_copies, publish_signatures
from data.sources.corpus_source import STAND_INS, list_files, read_file
from data.sources.file_list import SourceFile, read_file_list, write_file_list
from data.tokens.build import PublishedTokens, pack_file, publish_tokens
from data.tokens.exemplar_sample import candidates_per_exercise, write_exemplars
from data.tokens.tokenise_file import CorpusPlan, DocumentChecks, read_counts, remove_partial_files, tokenise_file
from tasks.engine.fanout import FanOut, finished_items, skipped_items
from tasks.engine.job import Job
from tasks.engine.stage import stage

TOKENISE, PACK = "tokenise", "pack"
AGAINST = "against."  # inputs: the signatures of sources earlier in the configuration
PROGRESS_SECONDS = 0.5
UNITS, FETCHING = "units", "fetching"
SHOWN = 20  # files that were set aside, in the manifest of the artifact; `files.json` has them all


class IngestPart(Section):
    """What an ingest depends on: its one source, and the length of the rows."""

    row_length: PositiveInt
    deduplicate: DeduplicateConfig = DeduplicateConfig()
    source: SourceConfig


def list_source(job: Job) -> list[str]:
    """The manifest: every file of the source, listed once and kept."""
    source = _source(job)
    path = _manifest(job)
    if not path.is_file():
        write_file_list(path, list_files(source, job.seed, job.scratch / "listing"))
    files = read_file_list(path)
    if not files:
        raise ConfigError(f"source {source.name!r}: {source.path or source.reader} has no files to read")
    return [file.item for file in files]


def tokenise(job: Job, unit: str) -> None:
    """One file of the source: read, screened, tokenised."""
    files = read_file_list(_manifest(job))
    file, source = files[int(unit)], _source(job)
    plan, folder = _plan(job), _folder(job, unit)
    rows = read_file(source, job.seed, file, job.scratch / FETCHING / f"{unit}.{uuid.uuid4().hex[:12]}")
    told = _teller(job, file)
    tokenise_file(rows, plan, _screens(job), folder, candidates_per_exercise(plan.exemplars, len(files)), progress=told)


def settle_copies(job: Job) -> list[str]:
    """Which documents of all files are copies; then every file's can be packed."""
    done = finished_items(job, TOKENISE)
    remove_partial_files(job.scratch / UNITS)
    shutil.rmtree(job.scratch / FETCHING, ignore_errors=True)
    earlier = [path for name, path in sorted(job.inputs.items()) if name.startswith(AGAINST)]
    find_copies([_folder(job, unit) for unit in done], earlier, job.scratch / "settling", job.emit)
    return done


def pack(job: Job, unit: str) -> None:
    """One file's documents, without the copies, to shards."""
    pack_file(_folder(job, unit), int(unit), _plan(job), _mark(job, unit), _tokens(job))


@stage(
    "ingest",
    version=2,
    outputs=("tokens", "exemplars", "signatures"),
    optional=("exemplars", "signatures"),
    fan_outs=(
        FanOut(TOKENISE, list_source, tokenise, lambda job: _source(job).bad_files_share),
        FanOut(PACK, settle_copies, pack),
    ),
)
def ingest(job: Job) -> None:
    """Index, count and describe what the rounds left."""
    plan, source = _plan(job), _source(job)
    done, aside = finished_items(job, TOKENISE), skipped_items(job, TOKENISE)
    files = read_file_list(_manifest(job))
    corpus = publish_tokens(
        [_folder(job, unit) for unit in done], [_mark(job, unit) for unit in done], plan, _tokens(job)
    )
    _write_files(job, files, aside)
    _measure(job, corpus, len(aside))
    origin: dict[str, Any] = {"source": source.name, "stand_in": STAND_INS.get(source.reader)}
    named = {files[int(unit)].path: why for unit, why in sorted(aside.items())[:SHOWN]}
    job.describe(
        "tokens",
        **origin,
        revision=source.revision or None,
        files=len(files),
        files_set_aside=len(aside),
        set_aside=named,
        **corpus.facts(),
        samples=corpus.samples,
    )
    if _part(job).deduplicate.across:
        signed = publish_signatures([_folder(job, unit) for unit in done], job.output("signatures"))
        job.describe(
            "signatures", **origin, documents=signed, **(minhash.facts() if _part(job).deduplicate.near else {})
        )
    if plan.exemplars:
        write_exemplars(job.output("exemplars") / "exemplars.jsonl", corpus.exemplars)
        exercises = sorted({record.exercise or "" for record in corpus.exemplars})
        job.describe("exemplars", **origin, records=len(corpus.exemplars), exercises=exercises)


def _write_files(job: Job, files: Sequence[SourceFile], aside: dict[str, str]) -> None:
    """`files.jsonl` in the artifact: each file as listed, and what came of it."""
    lines = []
    for file in files:
        row: dict[str, Any] = asdict(file)
        if (why := aside.get(file.item)) is not None:
            row["set_aside"] = why
        else:
            counts = read_counts(_folder(job, file.item))
            row |= {"rows_read": counts.rows, "documents": counts.documents, "tokens": counts.tokens}
        lines.append(json.dumps(row, sort_keys=True) + "\n")
    write_atomically(_tokens(job) / "files.jsonl", "".join(lines).encode())


def _measure(job: Job, corpus: PublishedTokens, set_aside: int) -> None:
    facts = corpus.facts()
    counts = ("records", "documents", "tokens", "cropped", "padded", "bytes_per_token", "disk_bytes_per_token")
    measured = {name: facts[name] for name in counts}
    measured |= {"tokens_per_second": corpus.tokens_per_second, "files_set_aside": set_aside}
    measured |= {f"rejected_{reason}": count for reason, count in corpus.rejected.items()}
    for name, value in measured.items():
        job.emit("metric", name=name, step=0, value=value)


def _teller(job: Job, file: SourceFile) -> Callable[[int, int, int | None], None]:
    """Tells now and then how far a unit is, where the number of its rows is known."""
    last = begun = time.monotonic()

    def told(rows: int, tokens: int, total: int | None) -> None:
        nonlocal last
        total = total or file.rows
        if total and (now := time.monotonic()) - last > PROGRESS_SECONDS:
            last, rate = now, tokens / (now - begun)
            job.emit("progress", done=rows, total=total, unit="records", note=f"{rate / 1e3:,.0f}k tokens/s")

    return told


def _part(job: Job) -> IngestPart:
    return job.part("ingest", IngestPart)


def _source(job: Job) -> SourceConfig:
    return _part(job).source


def _plan(job: Job) -> CorpusPlan:
    part = _part(job)
    source = part.source
    return CorpusPlan(
        tokenizer=job.part("tokenizer", TokenizerConfig),
        form=source.form,
        row_length=part.row_length,
        rows_per_shard=source.rows_per_shard,
        validation_share=source.validation_share,
        exemplars=source.exemplars if source.form == "synth" else 0,
    )


def _screens(job: Job) -> DocumentChecks:
    near = _part(job).deduplicate.near
    return DocumentChecks(
        load_contamination_index(job.inputs.get("questions")), minhash.minhash_bands if near else None
    )


def _manifest(job: Job) -> Path:
    return job.scratch / "files.jsonl"


def _folder(job: Job, unit: str) -> Path:
    return job.scratch / UNITS / unit


def _mark(job: Job, unit: str) -> Path:
    return job.scratch / "packed" / f"{unit}.json"


def _tokens(job: Job) -> Path:
    return job.output("tokens")
