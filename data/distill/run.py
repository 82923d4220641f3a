"""Retrieval-guided distillation (paper §3.2, §3.3): every prompt becomes one document or one rejected record.

Prompts are collected first, in files of `chunk`; each file gives one file of documents and one of rejected replies. A
finished file has a marker in the work folder, with its statistics and the hashes for finding duplicates of its
documents, and is skipped after a restart. An unfinished file is computed again; its replies come from the cache. Memory
holds the prompts in progress (see data/distill/window.py), offsets of exemplars and replies, and 8 bytes a hash: with
near-duplicate search 15 hashes a document, 0.5 GB for four million documents.

    documents-00000.jsonl   SYNTH records with provenance       rejected-00000.jsonl   the others, each with its reason
"""

import json
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nautile.common.events import Emit
from nautile.common.files import write_atomically
from nautile.configs.distill import DistillConfig
from nautile.data.distill.ask import Teachers, document_text
from nautile.data.distill.collect_prompts import BenchmarkScreen, CollectedPrompts, collect_prompts
from nautile.data.distill.seen import SeenTexts
from nautile.data.distill.stats import (
    ASK_AGAIN,
    DistillStats,
    check_final_reject_share,
    check_running_reject_share,
    emit_samples,
    unanswered_message,
)
from nautile.data.distill.types import UNASKED, PromptResult, result_row, unasked_row
from nautile.data.distill.window import OpenFile, PromptWindow
from nautile.data.endpoints.chat_types import ChatReply, request_digest
from nautile.data.endpoints.pool import EndpointPool
from nautile.data.retrieval.exemplar_index import ExemplarIndex

logger = logging.getLogger(__name__)

DOCUMENTS, REJECTED = "documents-*.jsonl", "rejected-*.jsonl"
CURVE_STEP = 128  # prompts between two points of the cost curve


@dataclass(frozen=True)
class DistillOutput:
    """The result of a distillation: its statistics, and counts of the collected prompts."""

    stats: DistillStats
    prompts: CollectedPrompts


def distill_prompts(
    config: DistillConfig,
    pool: EndpointPool,
    index: ExemplarIndex,
    out: Path,
    work: Path,
    seed: int,
    emit: Emit,
    screen: BenchmarkScreen | None = None,
) -> DistillOutput:
    """Collect the prompts, send them to the teachers, write documents and rejected replies into `out`.

    Markers go into `work`; `screen` finds texts that overlap a benchmark. Raises `ConfigError` if a prompt set or an
    endpoint cannot be used or too many documents are rejected, `Retryable` on an outage.
    """
    work.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    collected = collect_prompts(config, seed, work, screen, emit)
    run = _Run(Teachers(config, pool, index, seed), screen, out, work, emit)
    run.process(collected.files)
    check_final_reject_share(config, run.stats, out / REJECTED)
    if run.stats.unanswered:
        logger.warning("distill: %s", unanswered_message(run.stats))
    return DistillOutput(run.stats, collected)


class _Run:
    """Processes the files of prompts, from the first one without a marker."""

    def __init__(self, teachers: Teachers, screen: BenchmarkScreen | None, out: Path, work: Path, emit: Emit) -> None:
        self._teachers, self._screen, self._out, self._work, self._emit = teachers, screen, out, work, emit
        self._config, self._pool = teachers.config, teachers.pool
        self.stats, self._seen = DistillStats(), SeenTexts(self._config.near_duplicates)
        self._done = self._accepted = self._unanswered = 0  # prompts, for the progress line
        self._curve: list[list[float]] = []  # unsaved points [unix time, dollars since the previous point]
        self._dollars = 0.0  # dollars spent at the last point of the curve

    def process(self, files: Sequence[Path]) -> None:
        """Process all files of prompts; finished ones are only loaded. Raises as `distill_prompts`."""
        finished_count = self._load_finished(files)
        if finished_count:
            logger.info("resuming after %d finished files of %d prompts", finished_count, self._config.chunk)
        self._show_progress()
        check_running_reject_share(self._config, self.stats.judged, self.stats.rejected, self._pool.spent)
        # Counts that include the files in progress, to stop early if too many replies are rejected.
        rejected_counts, judged_count = Counter(self.stats.rejected), self.stats.judged
        number = finished_count

        def on_verdict(result: PromptResult) -> None:
            nonlocal judged_count
            reason = result.reason
            self._done, self._accepted = self._done + 1, self._accepted + (reason is None)
            self._unanswered += result.unanswered
            if self._done % CURVE_STEP == 0:
                self._add_curve_point()
            self._show_progress()
            if reason != UNASKED and not result.unanswered:
                judged_count += 1
                rejected_counts.update([] if reason is None else [reason])
                check_running_reject_share(self._config, judged_count, rejected_counts, self._pool.spent)

        def on_wait() -> None:
            self._show_progress(self._pool.waits_for())

        def finish(file: OpenFile) -> None:
            nonlocal number
            self._add_curve_point()
            self._finish(number, file)
            number += 1

        wanted = self._config.accepted
        needed = None if wanted is None else wanted - self.stats.accepted
        if needed != 0:
            window = PromptWindow(self._teachers, judged_count, on_verdict, on_wait, needed)
            window.run(files[finished_count:], self._settle, finish)
        self._report_wanted()

    def _load_finished(self, files: Sequence[Path]) -> int:
        """Load the statistics and hashes of the finished files; returns their number.

        A file with unasked or unanswered prompts does not count as finished: the budget may be larger now, and the
        endpoint may answer.
        """
        for number in range(len(files)):
            marker = self._marker(number)
            if not marker.is_file():
                return number
            part = DistillStats.from_json(json.loads(marker.read_bytes()))
            if part.unasked or part.unanswered:
                return number
            self.stats.merge(part)
            self._seen.load(marker.with_suffix(".u8"), marker.with_suffix(".bands.u8"))
            self._done, self._accepted = self.stats.prompts, self.stats.accepted
            self._dollars = sum(dollars for _, dollars in self.stats.curve)
        return len(files)

    def _reject_contaminated(self, results: list[PromptResult]) -> list[PromptResult]:
        """Reject documents that overlap a benchmark, with benchmark, example and words as evidence."""
        if self._screen is None:
            return results
        accepted = [index for index, result in enumerate(results) if result.reason is None]
        hits = self._screen([document_text(results[index]) for index in accepted])
        for index, hit in zip(accepted, hits, strict=True):
            if hit:
                evidence = {"benchmark": hit[0].benchmark, "example": hit[0].example, "words": hit[0].words}
                results[index] = replace(results[index], reason="contaminated", evidence=evidence)
        return results

    def _reject_duplicates(self, results: Sequence[PromptResult]) -> Iterator[PromptResult]:
        """Reject documents that repeat an earlier one.

        The query is not compared, so that a reply that fits every question is a duplicate whatever the question.
        """
        accepted = [result for result in results if result.reason is None and result.document is not None]
        texts = [document_text(result).removeprefix(result.task.prompt.query) for result in accepted]
        # By identity, because results hold dictionaries and cannot be hashed.
        hashes = dict(zip(map(id, accepted), self._seen.hashes(texts), strict=True))
        for result in results:
            if id(result) not in hashes:
                yield result
            elif (duplicate := self._seen.duplicate(hashes[id(result)])) is not None:
                yield replace(result, reason=duplicate)
            else:
                self._seen.add(hashes[id(result)])
                yield result

    def _settle(self, file: OpenFile) -> int:
        """Screen the results of a file that have not been screened yet; returns how many accepted ones are rejected."""
        before = [result for result in file.results[file.settled :] if result is not None]
        after = list(self._reject_duplicates(self._reject_contaminated(list(before))))
        file.results[file.settled :] = after
        file.settled = len(file.results)
        return sum(old.reason is None and new.reason is not None for old, new in zip(before, after, strict=True))

    def _finish(self, number: int, file: OpenFile) -> None:
        """Count and write the results of one file of prompts."""
        results = [result for result in file.results if result is not None]
        # The points until now go into this file's marker, also if later files' replies were paid for meanwhile: the
        # curve of the run is the sum over markers.
        part = DistillStats(curve=self._curve)
        self._curve = []
        for result in results:
            part.add(result, self._pool)
        if self._config.probe:
            part.unprobed = sum(result.task.probe is None for result in results)
        part.add_unasked(Counter(prompt.set for prompt in file.unasked))
        part.unneeded = len(file.unneeded)
        self._done += len(file.unasked)
        emit_samples(results, self.stats.prompts, self._emit)
        document_rows = "".join(self._row(result) for result in results if result.reason is None)
        rejected_rows = [self._row(result) for result in results if result.reason is not None]
        rejected_rows += [unasked_row(prompt) for prompt in file.unasked]
        self._write(number, part, document_rows, "".join(rejected_rows))
        self._show_progress()

    def _write(self, number: int, part: DistillStats, document_rows: str, rejected_rows: str) -> None:
        """Write the output of one file of prompts; with its marker, written last, it is finished. No empty files."""
        for pattern, rows in ((DOCUMENTS, document_rows), (REJECTED, rejected_rows)):
            path = self._out / pattern.replace("*", f"{number:05d}")
            if rows:
                write_atomically(path, rows.encode())
            else:
                # An attempt that could not pay for its prompts may have left one.
                path.unlink(missing_ok=True)
        exact, bands = self._seen.take_unsaved()
        marker = self._marker(number)
        write_atomically(marker.with_suffix(".u8"), exact)
        write_atomically(marker.with_suffix(".bands.u8"), bands)
        write_atomically(marker, json.dumps(part.to_json()).encode())
        self.stats.merge(part)
        check_running_reject_share(self._config, self.stats.judged, self.stats.rejected, self._pool.spent)

    def _marker(self, number: int) -> Path:
        return self._work / f"documents-{number:05d}.json"

    def _row(self, result: PromptResult) -> str:
        """The JSON line of a result. If a fallback answered, its model and digest are recorded, not the teacher's."""
        task, reply = result.task, result.reply
        config = self._pool.config(task.teacher.endpoint)
        if isinstance(reply, ChatReply):
            return result_row(result, self._pool.config(reply.endpoint), reply.digest)
        return result_row(result, config, request_digest(task.request, config))

    def _add_curve_point(self) -> None:
        # Dollars since the last point, not in all: so the points of several processes can be put together.
        self._curve.append([round(time.time(), 3), self._pool.spent - self._dollars])
        self._dollars = self._pool.spent

    def _report_wanted(self) -> None:
        """Say how many prompts were asked for the documents that are wanted, and why some are missing."""
        wanted, stats = self._config.accepted, self.stats
        if wanted is None:
            return
        counts = f"{stats.accepted:,} of {wanted:,} documents were accepted; {stats.judged:,} prompts were asked"
        if stats.accepted < wanted:
            why = "there are no more: raise distill.prompts"
            if stats.unasked:
                why = "the budget is spent"
            elif stats.unanswered:
                why = f"{stats.unanswered.total()} got no reply: {ASK_AGAIN}"
            logger.warning("%s, and %s", counts, why)
        else:
            logger.info("%s, and %d were not needed", counts, self._config.prompts - stats.judged)
        self._done, self._accepted = stats.judged, stats.accepted
        self._show_progress()

    def _show_progress(self, waits_for: str = "") -> None:
        """Emit the progress line. `waits_for`: why nothing happens."""
        notes = [f"{self._accepted / self._done:.0%} accepted"] if self._done else []
        progress = {"done": self._done, "total": self._config.prompts, "unit": "prompts"}
        if self._config.accepted is not None:
            notes = [f"{self._done:,} prompts asked"]
            progress = {"done": self._accepted, "total": self._config.accepted, "unit": "documents"}
        if self._unanswered:
            notes.append(f"{self._unanswered} without a reply ({ASK_AGAIN})")
        self._emit("progress", **progress, note="; ".join([*notes, *filter(None, [waits_for])]))
