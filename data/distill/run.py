"""Retrieval-guided distillation (paper §3.2, §3.3): every prompt becomes one document, or one rejected record.

Prompts are gathered first, in files of `chunk`; each file becomes one of documents and one of rejects. A finished file
stands after a kill -9: its mark holds its counts, and what its documents are known again by. Of an unfinished one
everything but the replies is worked out anew, and the pool remembers those. In memory are the prompts of a round,
offsets of exemplars and replies, and 8 bytes a hash: 15 a document where near copies are looked for, 0.5 GB in all for
four million.

    documents-00000.jsonl   SYNTH records with provenance       rejected-00000.jsonl   the others, each with its reason
"""

import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.events import Emit
from common.files import write_atomically
from configs.distill import DistillConfig
from data.distill.ask import RoutedPrompt, TeacherRound, text_of
from data.distill.collect_prompts import BenchmarkScreen, CollectedPrompts, collect_prompts, read_prompts
from data.distill.prompts import Prompt
from data.distill.seen import SeenTexts
from data.distill.stats import DistillStats, emit_samples, refuse_if_poor
from data.distill.types import PromptResult, result_row, unasked_row
from data.endpoints.chat_types import ChatReply, request_digest
from data.endpoints.pool import EndpointPool
from data.retrieval.exemplar_index import ExemplarIndex

log = logging.getLogger(__name__)

DOCUMENTS, REJECTED = "documents-*.jsonl", "rejected-*.jsonl"
POINTS = 32  # of the curve of cost, a round


@dataclass(frozen=True)
class DistillOutput:
    """A whole distillation: its counts, and what the prompt sets gave."""

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
    """Gather the prompts and ask about all of them; write documents and rejects into `out`, marks into `work`.

    `screen` tells texts that a benchmark asks. Raises `ConfigError` if a prompt set or an endpoint cannot be used or
    too many documents are rejected, `Retryable` on an outage.
    """
    work.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    collected = collect_prompts(config, seed, work, screen, emit)
    run = _Run(TeacherRound(config, pool, index, seed, screen), out, work, emit)
    run.over(collected.files)
    refuse_if_poor(config, run.stats)
    return DistillOutput(run.stats, collected)


class _Run:
    """Goes through the files of prompts, from the first that has no mark."""

    def __init__(self, teaching: TeacherRound, out: Path, work: Path, emit: Emit) -> None:
        self._teaching, self._out, self._work, self._emit = teaching, out, work, emit
        self._config, self._pool = teaching.config, teaching.pool
        self.stats, self._novelty = DistillStats(), SeenTexts(self._config.near_duplicates)
        self._done = self._good = 0
        self._points: list[list[float]] = []
        self._spent = 0.0

    def over(self, files: Sequence[Path]) -> None:
        first = self._resumed(files)
        if first:
            log.info("going on after %d finished files of %d prompts", first, self._config.chunk)
        self._show()
        with ThreadPoolExecutor(1) as ahead:  # the next round's neighbours are looked up while this one is asked
            rounds = list(self._rounds(len(files), first))
            coming = None
            for turn, (begin, end) in enumerate(rounds):
                parts = [read_prompts(path) for path in files[begin:end]]
                if self._broke:
                    for number, part in enumerate(parts, begin):
                        self._unasked(number, part)
                    continue
                planned = self._planned(parts) if coming is None else coming.result()
                later = rounds[turn + 1] if turn + 1 < len(rounds) else None
                coming = later and ahead.submit(
                    lambda span: self._planned([read_prompts(path) for path in files[slice(*span)]]), later
                )
                self._round(begin, parts, planned)

    def _rounds(self, files: int, first: int) -> Iterator[tuple[int, int]]:
        """Spans of files that are asked together: as many prompts as keep every endpoint busy."""
        size = max(1, self._pool.appetite(self._config.endpoints) // self._config.chunk)
        return ((begin, min(files, begin + size)) for begin in range(first, files, size))

    @property
    def _broke(self) -> bool:
        """Whether the budget is spent: then nobody is asked any more, and every prompt left says so."""
        return self.stats.rejected["failed_budget"] > 0

    def _planned(self, parts: Sequence[Sequence[Prompt]]) -> list[RoutedPrompt]:
        return self._teaching.plan([prompt for part in parts for prompt in part])

    def _round(self, first: int, parts: Sequence[Sequence[Prompt]], planned: Sequence[RoutedPrompt]) -> None:
        step = max(1, len(planned) // POINTS)

        def tell(good: bool) -> None:
            self._done, self._good = self._done + 1, self._good + good
            if self._done % step == 0:
                self._mark_time()
            self._show()

        outcomes = self._teaching.run(planned, tell)
        self._mark_time()
        for number, part in enumerate(parts, first):
            mine, outcomes = outcomes[: len(part)], outcomes[len(part) :]
            self._finish(number, list(self._without_copies(mine)))

    def _without_copies(self, outcomes: Sequence[PromptResult]) -> Iterator[PromptResult]:
        """A document that says what an earlier one says is rejected."""
        kept = [one for one in outcomes if one.reason is None and one.draft is not None]
        marks = dict(zip(map(id, kept), self._novelty.marks([_said(one) for one in kept]), strict=True))
        for one in outcomes:
            if id(one) not in marks:
                yield one
            elif (copy := self._novelty.copy(marks[id(one)])) is not None:
                yield replace(one, reason=copy)
            else:
                self._novelty.add(marks[id(one)])
                yield one

    def _finish(self, number: int, outcomes: list[PromptResult]) -> None:
        part = DistillStats(curve=self._points)
        self._points = []
        for outcome in outcomes:
            part.add(outcome, self._pool)
        if self._config.probe:
            part.unprobed = sum(outcome.task.probe is None for outcome in outcomes)
        emit_samples(self.stats, outcomes, self._emit)
        kept = "".join(self._row(one) for one in outcomes if one.reason is None)
        self._close(number, part, kept, "".join(self._row(one) for one in outcomes if one.reason is not None))

    def _unasked(self, number: int, prompts: Sequence[Prompt]) -> None:
        part = DistillStats()
        part.add_unasked("failed_budget", Counter(prompt.set for prompt in prompts))
        self._done += len(prompts)
        self._close(number, part, "", "".join(unasked_row(prompt, "failed_budget") for prompt in prompts))
        self._show()

    def _close(self, number: int, part: DistillStats, kept: str, rejected: str) -> None:
        """Write a part's files, its mark last. A file that would be empty is not there."""
        for pattern, rows in ((DOCUMENTS, kept), (REJECTED, rejected)):
            path = self._out / pattern.replace("*", f"{number:05d}")
            if rows:
                write_atomically(path, rows.encode())
            else:
                path.unlink(missing_ok=True)
        exact, bands = self._novelty.take_fresh()
        mark = self._mark(number)
        write_atomically(mark.with_suffix(".u8"), exact)
        write_atomically(mark.with_suffix(".bands.u8"), bands)
        write_atomically(mark, json.dumps(part.plain()).encode())
        self.stats.merge(part)

    def _resumed(self, files: Sequence[Path]) -> int:
        """Take in the parts that are finished; returns how many."""
        for number, _ in enumerate(files):
            mark = self._mark(number)
            if not mark.is_file():
                return number
            self.stats.merge(DistillStats.of(json.loads(mark.read_bytes())))
            self._novelty.load(mark.with_suffix(".u8"), mark.with_suffix(".bands.u8"))
            self._done, self._good = self.stats.prompts, self.stats.accepted
            self._spent = sum(spent for _, spent in self.stats.curve)
        return len(files)

    def _mark(self, number: int) -> Path:
        return self._work / f"documents-{number:05d}.json"

    def _row(self, outcome: PromptResult) -> str:
        task, reply = outcome.task, outcome.reply
        asked = self._pool.config(task.teacher.endpoint)
        answered = self._pool.config(reply.endpoint) if isinstance(reply, ChatReply) else asked
        return result_row(outcome, answered, _digest(reply) or request_digest(task.request, asked))

    def _mark_time(self) -> None:
        part = DistillStats()
        part.mark_time(self._pool.spent - self._spent)
        self._spent = self._pool.spent
        self._points += part.curve

    def _show(self) -> None:
        total: dict[str, Any] = {"total": self._config.prompts, "unit": "prompts"}
        note = f"{self._good / self._done:.0%} accepted" if self._done else ""
        self._emit("progress", done=self._done, **total, note=note)


def _said(outcome: PromptResult) -> str:
    """What two documents are compared by: a reply that fits every question is a copy, whatever was asked."""
    return text_of(outcome).removeprefix(outcome.task.prompt.query)


def _digest(reply: Any) -> str | None:
    return reply.digest if isinstance(reply, ChatReply) else None
