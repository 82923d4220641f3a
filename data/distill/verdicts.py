"""Checks of replies in processes of their own, where there are enough of them to pay for starting these.

A check takes 2 to 4 ms of a core, most of it language identification and the comparison with the exemplars, so one
process that also talks to the endpoints would keep up with some 300 replies a second.
"""

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from types import TracebackType

from common.processes import die_with_parent
from configs.distill import DistillConfig
from data.distill.checks import reject_reason
from data.distill.parse_reply import ParsedDocument, parse_reply, reason_without_document
from data.distill.prompts import Prompt
from data.distill.teacher_prompt import Template
from data.retrieval.exemplar_index import Neighbour

WORTH_PROCESSES = 4096  # prompts; two processes take 2 s of a core to start
MOST_PROCESSES = 4

_config: DistillConfig | None = None  # in a process of `VerdictProcesses`


@dataclass(frozen=True)
class ReplyVerdict:
    """A reply's document, and why it is rejected (None: it is kept)."""

    document: ParsedDocument | None
    reason: str | None


def judge_reply(
    text: str, finish: str, prompt: Prompt, neighbours: Sequence[Neighbour], template: Template, config: DistillConfig
) -> ReplyVerdict:
    """Parse and check a reply."""
    document = parse_reply(text)
    if finish in ("refusal", "content_filter"):
        return ReplyVerdict(document, "refusal")
    if document is None and finish != "length":
        return ReplyVerdict(None, reason_without_document(text))
    return ReplyVerdict(document, reject_reason(document, finish, prompt, neighbours, template, config))


class VerdictProcesses:
    """Processes that run `judge_reply`; a context manager. They end with this process."""

    def __init__(self, config: DistillConfig) -> None:
        self._executor = ProcessPoolExecutor(
            min(MOST_PROCESSES, os.cpu_count() or 1),
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_initialise,
            initargs=(os.getpid(), config.model_dump_json()),
        )

    def __enter__(self) -> "VerdictProcesses":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._executor.shutdown(cancel_futures=True)

    def judge(
        self, text: str, finish: str, prompt: Prompt, neighbours: Sequence[Neighbour], template: Template
    ) -> "Future[ReplyVerdict]":
        """As `judge_reply`. The future's error is that of a process that died, if one did."""
        return self._executor.submit(_judge, text, finish, prompt, neighbours, template)


def _initialise(parent: int, config: str) -> None:
    global _config
    die_with_parent(parent)
    _config = DistillConfig.model_validate_json(config)


def _judge(text: str, finish: str, prompt: Prompt, neighbours: Sequence[Neighbour], template: Template) -> ReplyVerdict:
    assert _config is not None
    return judge_reply(text, finish, prompt, neighbours, template, _config)
