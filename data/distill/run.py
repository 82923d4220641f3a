"""Retrieval-guided distillation (paper §3.2, §3.3): every prompt becomes one document or one rejected record.

Prompts are collected first, in files of `chunk`; each file gives one file of documents and one of rejected replies. A
finished file has a marker in the work folder, with its statistics and the hashes for finding duplicates of its
documents, and is skipped after a restart. An unfinished file is computed again; its replies come from the cache. Memory
holds the prompts in progress (see `PromptWindow`), offsets of exemplars and replies, and 8 bytes a hash: with
near-duplicate search 15 hashes a document, 0.5 GB for four million documents.

    documents-00000.jsonl   SYNTH records with provenance       rejected-00000.jsonl   the others, each with its reason
"""

import json
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from nautile.common.events import Emit
from nautile.common.files import write_atomically
from nautile.configs.distill import DistillConfig
from nautile.data.distill.ask import (
    UNASKED,
    PreparedPrompt,
    PromptResult,
    Teachers,
    TeacherTask,
    document_text,
    result_row,
    unasked_row,
)
from nautile.data.distill.checks import WORTH_PROCESSES, ReplyVerdict, judge_reply, verdict_processes
from nautile.data.distill.collect_prompts import BenchmarkScreen, CollectedPrompts, collect_prompts, read_prompts
from nautile.data.distill.prompts import Prompt
from nautile.data.distill.stats import (
    ASK_AGAIN,
    FIRST_JUDGED,
    DistillStats,
    check_final_reject_share,
    check_running_reject_share,
    emit_samples,
    unanswered_message,
)
from nautile.data.endpoints.chat_types import ChatFailure, ChatReply, ChatRequest, request_digest
from nautile.data.endpoints.pool import AskResult, AskSession, EndpointPool, raise_for_outage
from nautile.data.retrieval.exemplar_index import ExemplarIndex
from nautile.data.screening.duplicates import SeenTexts

BLOCK = 256  # prompts prepared together
OnVerdict = Callable[[PromptResult], None]  # called for each result

logger = logging.getLogger(__name__)

DOCUMENTS, REJECTED = "documents-*.jsonl", "rejected-*.jsonl"
CURVE_STEP = 128  # prompts between two points of the cost curve


@dataclass(eq=False)
class OpenFile:
    """A file of prompts in progress.

    `results`: in the order of the prompts, None if pending; `unasked`: prompts that the budget does not allow to send;
    `unneeded`: prompts that are not sent because enough documents are accepted. The first `settled` results have been
    compared with the documents before them.
    """

    prompts: list[Prompt]
    results: list[PromptResult | None] = field(default_factory=list)
    pending_count: int = 0  # prompts that were sent and have no result yet
    unasked: list[Prompt] = field(default_factory=list)
    unneeded: list[Prompt] = field(default_factory=list)
    settled: int = 0

    @property
    def finished(self) -> bool:
        ended = len(self.results) + len(self.unasked) + len(self.unneeded)
        return not self.pending_count and ended == len(self.prompts)


@dataclass(eq=False)
class _OpenPrompt:
    """A prompt in progress: its position, the probes' replies so far, and its teacher's task once there is one."""

    file: OpenFile
    index: int
    item: PreparedPrompt
    probe_replies: list[AskResult | None]
    task: TeacherTask | None = None
    reply: ChatReply | None = None  # the teacher's reply while it is being checked


@dataclass(eq=False)
class _PreparedBlock:
    """The next prompts of a file, the future of their preparation, and how many of them were sent."""

    file: OpenFile
    prompts: list[Prompt]
    items: "Future[list[PreparedPrompt]]"
    sent_count: int = 0


class PromptWindow:
    """The prompts in progress: slides over the files of prompts, so that no endpoint waits for another.

    Prompts are prepared in blocks, in a thread, and sent as soon as there is room. Those of a slow teacher stay in the
    window while others pass through. Files are finished in order, because of two duplicate documents the one in the
    earlier file is accepted. A prompt in progress takes tens of kilobytes: its exemplars, its messages or its reply.

    `judged_count`: results so far, including those of earlier processes. `on_wait` is called every few seconds while
    there is no result.

    `needed`: documents to accept; None: ask all prompts. No more prompts are in progress than documents are missing, so
    that exactly the prompts up to the last needed document are asked, whatever the order of the replies.

    The window stays small until the first `FIRST_JUDGED` replies have been checked, so that not many replies of a poor
    teacher are paid for.
    """

    def __init__(
        self,
        teachers: Teachers,
        judged_count: int,
        on_verdict: OnVerdict,
        on_wait: Callable[[], None],
        needed: int | None = None,
    ) -> None:
        self._teachers, self._judged_count, self._on_verdict = teachers, judged_count, on_verdict
        self._on_wait, self._needed, self._pending_count = on_wait, needed, 0
        config = teachers.config
        self._size = max(config.chunk, teachers.pool.window(config.endpoints))
        self._first_size = max(config.chunk, FIRST_JUDGED)
        self._open: deque[OpenFile] = deque()
        self._open_prompts = 0
        self._budget_spent = False
        self._processes: ProcessPoolExecutor | None = None

    def run(self, paths: Sequence[Path], settle: Callable[[OpenFile], int], finish: Callable[[OpenFile], None]) -> None:
        """Call `settle` and `finish` for each file, in order, once all its prompts have results.

        `settle` compares the results of a file that it has not compared yet with the documents before them, and returns
        how many accepted ones it rejects; it is also called for a part of a file, to see whether documents are missing.
        Once none is, the rest of the file is unneeded, and the files after it are not opened.

        Raises `ConfigError` and `Retryable` when an endpoint as a whole fails.
        """
        # Closed in the opposite order: first the thread that prepares, then the session, which waits for replies that
        # are being paid for, and the processes that judge replies last.
        with ExitStack() as stack:
            if len(paths) * self._teachers.config.chunk >= WORTH_PROCESSES:
                self._processes = verdict_processes()
                stack.callback(self._processes.shutdown, cancel_futures=True)
            session = stack.enter_context(self._teachers.pool.session())
            lookahead = stack.enter_context(ThreadPoolExecutor(1))
            blocks = _blocks(paths)
            block = self._prepare_next(blocks, lookahead)
            while block is not None or self._open:
                while self._open and self._open[0].finished:
                    file = self._open.popleft()
                    self._open_prompts -= len(file.prompts)
                    # Before the file is written: if all its prompts failed for temporary reasons, they must be asked
                    # again, not rejected.
                    raise_for_outage([result.reply for result in file.results if result], unpaid_allowed=True)
                    self._add_needed(settle(file))
                    finish(file)
                # Once the budget is spent, no further prompt is sent: those left are unasked, unless those in progress
                # may be enough. Else send the next block if there is room, or handle the next result. If nothing is in
                # progress there is room: a file may exceed the window.
                if block is not None and self._budget_spent and self._most != 0:
                    self._add_unasked(block.file, block.prompts[block.sent_count :])
                    for file, prompts in blocks:
                        self._add_unasked(file, prompts)
                    block = None
                    session.submit((), more_follow=False)  # a batch job that is not full must not wait for more
                elif (
                    block is not None
                    and (self._has_room or not session.open_count)
                    and (block.items.done() or not session.has_result)
                    and (self._most is None or self._most > 0)
                ):
                    current, items = block, block.items.result()[block.sent_count :][: self._most]
                    current.sent_count += len(items)
                    if current.sent_count == len(current.prompts):
                        block = self._prepare_next(blocks, lookahead)
                    self._send(session, current.file, items, more_follow=block is not None)
                elif session.open_count:
                    key, result = session.next_result(self._on_wait)
                    open_prompt, sample = cast(tuple[_OpenPrompt, int | None], key)
                    if isinstance(result, ReplyVerdict):
                        self._handle_verdict(open_prompt, result)
                    else:
                        self._handle_reply(session, open_prompt, sample, result)
                elif block is not None:
                    # As many documents as are needed are accepted, unless one of them repeats another.
                    self._add_needed(sum(map(settle, self._open)))
                    if not self._most:
                        self._leave_out(block, blocks)
                        block = None

    @property
    def _most(self) -> int | None:
        """How many prompts may be sent now: as many as documents are missing if all in progress become one."""
        return None if self._needed is None else self._needed - self._pending_count

    def _add_needed(self, count: int) -> None:
        if self._needed is not None:
            self._needed += count

    def _leave_out(self, block: _PreparedBlock, blocks: Iterator[tuple[OpenFile, list[Prompt]]]) -> None:
        """Leave out the prompts of the open file that were not sent; nothing if none of its prompts was."""
        if not self._open:
            return
        self._add(block.file, len(block.prompts) - block.sent_count)
        block.file.unneeded += block.prompts[block.sent_count :]
        for file, prompts in blocks:
            if file is not block.file:
                break
            self._add(file, len(prompts))
            file.unneeded += prompts

    @property
    def _has_room(self) -> bool:
        return self._open_prompts < (self._size if self._judged_count >= FIRST_JUDGED else self._first_size)

    def _prepare_next(
        self, blocks: Iterator[tuple[OpenFile, list[Prompt]]], lookahead: ThreadPoolExecutor
    ) -> _PreparedBlock | None:
        """Start to prepare the next block in the thread of `lookahead`; None if there is no further block."""
        if (next_prompts := next(blocks, None)) is None:
            return None
        file, prompts = next_prompts
        return _PreparedBlock(file, prompts, lookahead.submit(self._teachers.prepare, prompts))

    def _send(self, session: AskSession, file: OpenFile, items: Sequence[PreparedPrompt], *, more_follow: bool) -> None:
        """Open the window for a block of prompts: send their probes, or their teachers' requests without probes."""
        self._add(file, len(items))
        requests: list[tuple[tuple[_OpenPrompt, int | None], ChatRequest]] = []
        for item in items:
            probes = self._teachers.probe_requests(item)
            open_prompt = _OpenPrompt(file, len(file.results), item, [None] * len(probes))
            file.results.append(None)
            file.pending_count += 1
            self._pending_count += 1
            if probes:
                requests += [((open_prompt, sample), request) for sample, request in enumerate(probes)]
            else:
                open_prompt.task = self._teachers.first_task(item, [])
                requests.append(((open_prompt, None), open_prompt.task.request))
        # In a full window no prompt follows until some have ended, and a batch endpoint that waited for more to fill
        # its job would wait for ever.
        session.submit(requests, more_follow=more_follow and self._has_room and self._most != 0)

    def _handle_reply(
        self, session: AskSession, open_prompt: _OpenPrompt, sample: int | None, reply: AskResult
    ) -> None:
        """Handle a reply of a probe (number `sample`) or of a teacher (None), and send the next request, if any."""
        if isinstance(reply, ChatFailure):
            if reply.reason in ("misconfigured", "outage") or (reply.unfinished and reply.own is False):
                raise_for_outage([reply])
            self._budget_spent = self._budget_spent or reply.reason == "budget"
        # The next task: the first teacher's after all probes have answered, or another teacher's after a failure.
        probe_replies = open_prompt.probe_replies
        if sample is None:
            assert open_prompt.task is not None
            next_task = self._teachers.next_task(open_prompt.task, reply)
        else:
            probe_replies[sample] = reply
            if None in probe_replies:
                return
            next_task = self._teachers.first_task(open_prompt.item, cast(list[AskResult], probe_replies))
        if next_task is not None:
            open_prompt.task = next_task
            session.submit([((open_prompt, None), next_task.request)])
            return
        task = open_prompt.task
        assert task is not None
        if isinstance(reply, ChatFailure):
            probes = cast(list[AskResult], probe_replies)
            self._finish(open_prompt, self._teachers.failure_result(task, reply, probes))
            return
        # A teacher's reply: check it here, or in a worker process whose verdict comes back through the session.
        open_prompt.reply = reply
        config = self._teachers.config
        arguments = (reply.text, reply.finish, task.prompt, task.neighbours, task.template, config)
        if self._processes is None:
            self._handle_verdict(open_prompt, judge_reply(*arguments))
        else:
            session.expect((open_prompt, None), self._processes.submit(judge_reply, *arguments))

    def _handle_verdict(self, open_prompt: _OpenPrompt, verdict: ReplyVerdict) -> None:
        assert open_prompt.task is not None
        assert open_prompt.reply is not None
        probes = cast(list[AskResult], open_prompt.probe_replies)
        self._finish(open_prompt, self._teachers.reply_result(open_prompt.task, open_prompt.reply, probes, verdict))

    def _finish(self, open_prompt: _OpenPrompt, result: PromptResult) -> None:
        open_prompt.file.results[open_prompt.index] = result
        open_prompt.file.pending_count -= 1
        self._pending_count -= 1
        self._add_needed(-1 if result.reason is None else 0)
        self._judged_count += 1
        self._on_verdict(result)

    def _add_unasked(self, file: OpenFile, prompts: Sequence[Prompt]) -> None:
        self._add(file, len(prompts))
        file.unasked += prompts

    def _add(self, file: OpenFile, count: int) -> None:
        if not self._open or self._open[-1] is not file:
            self._open.append(file)
        self._open_prompts += count


def _blocks(paths: Sequence[Path]) -> Iterator[tuple[OpenFile, list[Prompt]]]:
    """The prompts of all files in blocks: (file, its next prompts)."""
    for path in paths:
        file = OpenFile(read_prompts(path))
        for begin in range(0, len(file.prompts), BLOCK):
            yield file, file.prompts[begin : begin + BLOCK]


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
