"""The `ingest` stage (paper §3.1): from one source to a `tokens` artifact, and for SYNTH to `exemplars` for retrieval.

Two fan-outs over the files of the source do the work with any number of workers: the first tokenises, the second packs.
Between them is the only step that needs all files at once: finding documents that are copies of one another.
"""

import json
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nautile.common.errors import ConfigError
from nautile.common.files import write_atomically
from nautile.configs.ingest import IngestConfig, IngestPart, SourceConfig
from nautile.data.screening import duplicates
from nautile.data.screening.contamination import load_contamination_index
from nautile.data.screening.corpus_copies import find_copies, publish_signatures
from nautile.data.sources.corpus_source import check_source, list_files, read_file, stand_in_of
from nautile.data.sources.hub import SourceFile, read_file_list, write_file_list
from nautile.data.sources.slips import Slips
from nautile.data.tokens.build import (
    PROGRESS_SECONDS,
    CorpusPlan,
    DocumentChecks,
    PublishedTokens,
    candidates_per_exercise,
    pack_file,
    publish_tokens,
    read_counts,
    remove_partial_files,
    tokenise_file,
    write_exemplars,
)
from nautile.data.tokens.losses import LOST, losses_line
from nautile.tasks.engine.fanout import FanOut, finished_items, skipped_items
from nautile.tasks.engine.job import Job
from nautile.tasks.engine.stage import stage
from nautile.tasks.tokenizer import tokenizer_of

TOKENISE, PACK = "tokenise", "pack"
AGAINST = "against."  # prefix of the inputs that are signatures of sources earlier in the configuration
TOKENISED, FETCHING = "files", ".fetching"  # folders in scratch
FILE_LIST = "files.jsonl"  # likewise a file
REHEARSED_ROWS, REHEARSED_EXEMPLARS = 256, 32  # of each source
SHOWN_SKIPPED = 20  # skipped files in the manifest of the artifact; `files.jsonl` has all of them


def list_source(job: Job) -> list[str]:
    """List the files of the source; the list is written to scratch once, so that a resume has the same items."""
    source = _source(job)
    path = _file_list(job)
    if not path.is_file():
        write_file_list(path, list_files(source, job.scratch / "listing"))
    files = read_file_list(path)
    if not files:
        raise ConfigError(f"source {source.name!r}: {source.path or source.reader} has no files to read")
    return [file.item for file in files]


def tokenise(job: Job, item: str) -> None:
    """Read, screen and tokenise one file of the source."""
    files = read_file_list(_file_list(job))
    file, source = files[int(item)], _source(job)  # items are indices into the list
    plan, folder = _plan(job), _folder(job, item)
    # A folder of its own for the download: the same item may run twice, if its host counted as lost but still works.
    rows = read_file(source, file, job.scratch / FETCHING / f"{item}.{uuid.uuid4().hex[:12]}")
    candidates = candidates_per_exercise(plan.exemplars, len(files))
    near = _part(job).deduplicate.near
    questions = load_contamination_index(job.inputs.get("questions"))
    checks = DocumentChecks(questions, duplicates.minhash_bands if near else None)
    tokenise_file(rows, plan, checks, folder, candidates, progress=_progress(job, file))


def find_all_copies(job: Job) -> list[str]:
    """Find copies among the documents of all files; returns the items to pack, which are those tokenised."""
    items = finished_items(job, TOKENISE)
    # All items of the first fan-out have ended, so nothing is being written there.
    remove_partial_files(job.scratch / TOKENISED)
    shutil.rmtree(job.scratch / FETCHING, ignore_errors=True)
    # Sorted, because the search resumes only with the same folders in the same order.
    earlier = [path for name, path in sorted(job.inputs.items()) if name.startswith(AGAINST)]
    find_copies([_folder(job, item) for item in items], earlier, job.scratch / "settling", job.emit)
    return items


def pack(job: Job, item: str) -> None:
    """Pack the documents of one file, without copies, into shards."""
    pack_file(_folder(job, item), int(item), _plan(job), _packed(job, item), job.output("tokens"))


def _check_sources(config: IngestConfig) -> None:
    for source in config.sources:
        check_source(source)


def _rehearsal(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The first rows of each source, of which enough are for validation and as exemplars."""
    exemplars = max(REHEARSED_EXEMPLARS, (settings["distill"] or {}).get("neighbours", 0))
    sources = [
        {
            **source,
            "records": min(REHEARSED_ROWS, source["records"] or REHEARSED_ROWS),
            "exemplars": min(exemplars, source["exemplars"]),
            "validation_share": source["validation_share"] and max(0.1, source["validation_share"]),
        }
        for source in settings["ingest"]["sources"]
    ]
    return {"ingest": settings["ingest"] | {"sources": sources}}


@stage(
    "ingest",
    version=4,
    outputs=("tokens", "exemplars", "signatures"),
    optional=("exemplars", "signatures"),
    samples="",
    check=_check_sources,
    rehearsal=_rehearsal,
    fan_outs=(
        FanOut(
            TOKENISE,
            list_source,
            tokenise,
            lambda job: _source(job).bad_files_share,
            reads=lambda _: (f"scratch/{FILE_LIST}",),
        ),
        # Listing these items is the step between the two fan-outs: it runs once, when all files are tokenised.
        FanOut(PACK, find_all_copies, pack, reads=lambda item: (f"scratch/{TOKENISED}/{item}",)),
    ),
)
def ingest(job: Job) -> None:
    """Index, count and describe the shards that the fan-outs wrote."""
    plan, source = _plan(job), _source(job)
    items, skipped = finished_items(job, TOKENISE), skipped_items(job, TOKENISE)
    files = read_file_list(_file_list(job))
    # The `tokens` artifact: an index over the shards of all files.
    corpus = publish_tokens(
        [_folder(job, item) for item in items], [_packed(job, item) for item in items], plan, job.output("tokens")
    )
    job.add_digests("tokens", {entry.file: entry.sha256 for entry in corpus.index.shards})
    _write_files(job, files, skipped)
    _emit_metrics(job, corpus, len(skipped))
    slips, stand_in = Slips(source.tasks).facts(), stand_in_of(source)
    notes: list[str] = []
    if slips:
        bounds = ", ".join(f"{facts['greedy_accuracy']:.0%} of {tasks}" for tasks, facts in slips.items())
        learner = f"a model that learns the mistakes perfectly solves {bounds} greedily"
        stand_in = f"{stand_in}; {learner}"
        notes.append(learner)
    read = {file.path: read_counts(_folder(job, file.item)) for file in files if file.item not in skipped}
    lost = losses_line(
        {path: counts.rows for path, counts in read.items()},
        {files[int(item)].path: reason for item, reason in skipped.items()},
        {path: Counter(counts.rejected) for path, counts in read.items()},
    )
    if lost:
        notes.append(lost)
    if notes:
        job.emit("progress", done=len(items), total=len(items), unit="files", note="; ".join(notes))
    origin: dict[str, Any] = {"source": source.name, "stand_in": stand_in}
    job.describe(
        "tokens",
        **origin,
        revision=source.revision or None,
        files=len(files),
        files_skipped=len(skipped),
        skipped={files[int(item)].path: reason for item, reason in sorted(skipped.items())[:SHOWN_SKIPPED]},
        **corpus.facts(),
        **({LOST: lost} if lost else {}),
        slips=slips,
        samples=corpus.samples,
    )
    # Signatures let sources later in the configuration find copies of this source's documents.
    if _part(job).deduplicate.across:
        documents = publish_signatures([_folder(job, item) for item in items], job.output("signatures"))
        job.describe(
            "signatures", **origin, documents=documents, **(duplicates.facts() if _part(job).deduplicate.near else {})
        )
    if plan.exemplars:
        write_exemplars(job.output("exemplars") / "exemplars.jsonl", corpus.exemplars)
        exercises = sorted({record.exercise or "" for record in corpus.exemplars})
        job.describe("exemplars", **origin, records=len(corpus.exemplars), exercises=exercises)


def _write_files(job: Job, files: Sequence[SourceFile], skipped: dict[str, str]) -> None:
    """Write `files.jsonl` in the artifact: each listed file with its counts, or the reason why it was skipped."""
    lines = []
    for file in files:
        row: dict[str, Any] = asdict(file)
        if (reason := skipped.get(file.item)) is not None:
            row["skipped"] = reason
        else:
            counts = read_counts(_folder(job, file.item))
            row |= {"rows_read": counts.rows, "documents": counts.documents, "tokens": counts.tokens}
        lines.append(json.dumps(row, sort_keys=True) + "\n")
    write_atomically(job.output("tokens") / "files.jsonl", "".join(lines).encode())


def _emit_metrics(job: Job, corpus: PublishedTokens, skipped: int) -> None:
    facts = corpus.facts()
    counts = ("records", "documents", "tokens", "cropped", "padded", "bytes_per_token", "disk_bytes_per_token")
    metrics = {name: facts[name] for name in counts}
    metrics |= {"tokens_per_second": corpus.tokens_per_second, "files_skipped": skipped}
    metrics |= {f"rejected_{reason}": count for reason, count in corpus.rejected.items()}
    for name, value in metrics.items():
        job.emit("metric", name=name, step=0, value=value)


def _progress(job: Job, file: SourceFile) -> Callable[[int, int, int | None], None]:
    """A callback that emits the progress within a file at most twice a second, if its number of rows is known."""
    last = start = time.monotonic()

    def emit_progress(rows: int, tokens: int, total: int | None) -> None:
        nonlocal last
        total = total or file.rows
        if total and (now := time.monotonic()) - last > PROGRESS_SECONDS:
            last, rate = now, tokens / (now - start)
            job.emit("progress", done=rows, total=total, unit="records", note=f"{rate / 1e3:,.0f}k tokens/s")

    return emit_progress


def _part(job: Job) -> IngestPart:
    return job.part("ingest", IngestPart)


def _source(job: Job) -> SourceConfig:
    return _part(job).source


def _plan(job: Job) -> CorpusPlan:
    part = _part(job)
    source = part.source
    return CorpusPlan(
        tokenizer=tokenizer_of(job),
        form=source.form,
        row_length=part.row_length,
        rows_per_shard=source.rows_per_shard,
        validation_share=source.validation_share,
        exemplars=source.exemplars if source.form == "synth" else 0,
    )


def _file_list(job: Job) -> Path:
    return job.scratch / FILE_LIST


def _folder(job: Job, item: str) -> Path:
    """The folder of one tokenised file."""
    return job.scratch / TOKENISED / item


def _packed(job: Job, item: str) -> Path:
    """Path of the marker file of a packed file, which holds its counts."""
    return job.scratch / "packed" / f"{item}.json"
