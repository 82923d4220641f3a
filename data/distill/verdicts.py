"""Check replies, in worker processes if there are enough replies to pay for starting them.

A check takes 1 to 2 ms of a core, half of it language identification, and a request another 1.5 to 2 ms, so one process
that did both would handle only some 300 replies a second.
"""

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from types import TracebackType

from nautile.common.processes import die_with_parent
from nautile.configs.distill import DistillConfig
from nautile.data.distill.checks import reject_reason
from nautile.data.distill.parse_reply import ParsedDocument, read_reply
from nautile.data.distill.prompts import Prompt
from nautile.data.distill.teacher_prompt import Template
from nautile.data.endpoints.outgoing import hostile_signs
from nautile.data.retrieval.exemplar_index import Neighbour

WORTH_PROCESSES = 4096  # prompts; two processes take 2 s of a core to start
MOST_PROCESSES = 4

_config: DistillConfig | None = None  # set in the worker processes of `VerdictProcesses`


@dataclass(frozen=True)
class ReplyVerdict:
    """A reply's document, why it is rejected (None: accepted), and signs of prompt injection (`injection_signs`)."""

    document: ParsedDocument | None
    reason: str | None
    signs: list[str]


def judge_reply(
    text: str, finish: str, prompt: Prompt, neighbours: Sequence[Neighbour], template: Template, config: DistillConfig
) -> ReplyVerdict:
    """Parse and check a reply. `finish`: why the endpoint ended it, see `ChatReply`."""
    result = read_reply(text)
    document = result if isinstance(result, ParsedDocument) else None
    reason: str | None
    if finish in ("refusal", "content_filter"):
        reason = "refusal"
    elif isinstance(result, str) and finish != "length":
        reason = result
    else:
        reason = reject_reason(document, finish, prompt, neighbours, template, config)
    return ReplyVerdict(document, reason, injection_signs(prompt, neighbours, text))


def injection_signs(prompt: Prompt, neighbours: Sequence[Neighbour], reply: str) -> list[str]:
    """Signs of prompt injection in the request or the reply, each as "sign/where"."""
    records = [neighbour.record for neighbour in neighbours]
    texts = {
        "query": prompt.query,
        "passage": prompt.passage or "",
        "exemplars": "\n".join(f"{r.query}\n{r.synthetic_reasoning}\n{r.synthetic_answer}" for r in records),
        "reply": reply,
    }
    return [f"{sign}/{where}" for where, text in texts.items() for sign in hostile_signs(text)]


class VerdictProcesses:
    """A pool of processes that run `judge_reply`; a context manager. They end with this process."""

    def __init__(self, config: DistillConfig) -> None:
        self._executor = ProcessPoolExecutor(
            min(MOST_PROCESSES, os.cpu_count() or 1),
            # Not "fork": the pool's event loop runs in a thread of this process, and a fork would copy its locks as
            # they are.
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
        """Run `judge_reply` in a worker. The future fails only if a worker process dies."""
        return self._executor.submit(_judge, text, finish, prompt, neighbours, template)


def _initialise(parent: int, config: str) -> None:
    global _config
    die_with_parent(parent)
    _config = DistillConfig.model_validate_json(config)


def _judge(text: str, finish: str, prompt: Prompt, neighbours: Sequence[Neighbour], template: Template) -> ReplyVerdict:
    assert _config is not None
    return judge_reply(text, finish, prompt, neighbours, template, _config)
