"""The prompts in progress: a window that slides over the files of prompts, so that no endpoint waits for another.

Prompts are prepared in blocks, in a thread, and sent as soon as there is room in the window. Prompts of a slow teacher
stay in the window while others pass through. A file is finished when all its prompts are; files are finished in order,
because of two duplicate documents the one in the earlier file is accepted. A prompt in progress takes tens of
kilobytes: its exemplars, and its messages or its reply.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from nautile.data.distill.ask import PreparedPrompt, Teachers
from nautile.data.distill.collect_prompts import read_prompts
from nautile.data.distill.prompts import Prompt
from nautile.data.distill.stats import FIRST_JUDGED
from nautile.data.distill.types import PromptResult, TeacherTask
from nautile.data.distill.verdicts import WORTH_PROCESSES, ReplyVerdict, VerdictProcesses, judge_reply
from nautile.data.endpoints.chat_types import ChatFailure, ChatReply, ChatRequest
from nautile.data.endpoints.pool import raise_for_outage
from nautile.data.endpoints.session import AskResult, AskSession

BLOCK = 256  # prompts prepared together
OnVerdict = Callable[[PromptResult], None]  # called for each result


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
    """Sends files of prompts to the teachers. `judged_count`: results so far, including those of earlier processes.

    `on_wait` is called every few seconds while there is no result.

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
        self._processes: VerdictProcesses | None = None

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
                self._processes = stack.enter_context(VerdictProcesses(self._teachers.config))
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
        if self._processes is None:
            config = self._teachers.config
            verdict = judge_reply(reply.text, reply.finish, task.prompt, task.neighbours, task.template, config)
            self._handle_verdict(open_prompt, verdict)
        else:
            future = self._processes.judge(reply.text, reply.finish, task.prompt, task.neighbours, task.template)
            session.expect((open_prompt, None), future)

    def _handle_verdict(self, open_prompt: _OpenPrompt, verdict: ReplyVerdict) -> None:
        assert open_prompt.task is not None
        assert open_prompt.reply is not None
        probes = cast(list[AskResult], open_prompt.probe_replies)
        self._finish(open_prompt, self._teachers.reply_result(open_prompt.task, open_prompt.reply, probes, verdict))

    def _finish(self, open_prompt: _OpenPrompt, result: PromptResult) -> None:
        """Store the result of a prompt in its file, and report it."""
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
