"""Data types of a distillation: the task of a teacher, its paid replies and its result, and the JSON rows on disk."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nautile.configs.distill import TeacherConfig
from nautile.configs.endpoint import EndpointConfig
from nautile.data.distill.parse_reply import ParsedDocument
from nautile.data.distill.prompts import Prompt
from nautile.data.distill.teacher_prompt import Template
from nautile.data.endpoints.chat_types import ChatFailure, ChatReply, ChatRequest
from nautile.data.records import SynthRecord, to_dict
from nautile.data.retrieval.exemplar_index import Neighbour

UNASKED = "failed_budget"  # the reason of a prompt that was not sent to a teacher because the budget was spent


@dataclass(frozen=True)
class TeacherTask:
    """A prompt with its teacher and request. `probe`: disagreement of the probes, which `difficulty` includes."""

    prompt: Prompt
    neighbours: list[Neighbour]
    difficulty: float
    probe: float | None
    teacher: TeacherConfig
    template: Template
    request: ChatRequest

    def without_messages(self) -> "TeacherTask":
        """A copy without messages, for results, which stay in memory until a file is full."""
        return replace(self, request=replace(self.request, messages=()))


@dataclass(frozen=True)
class PaidReply:
    """A reply that was paid for on behalf of a prompt. `purpose`: "probe" or "teacher"."""

    purpose: str
    reply: ChatReply


@dataclass(frozen=True)
class PromptResult:
    """The result of a task. `reason`: why the document is rejected, None if it is accepted.

    `document` is set for most rejected replies too; `evidence` supports the rejection; `signs`: signs of prompt
    injection in the request or the reply.
    """

    task: TeacherTask
    reply: ChatReply | ChatFailure
    document: ParsedDocument | None
    reason: str | None
    paid: tuple[PaidReply, ...] = ()
    signs: Sequence[str] = ()
    evidence: dict[str, Any] = field(default_factory=dict)

    @property
    def unanswered(self) -> bool:
        """Whether the request failed for a temporary reason: neither accepted nor rejected, it may be asked again."""
        return isinstance(self.reply, ChatFailure) and self.reply.unfinished


def result_row(result: PromptResult, endpoint: EndpointConfig, digest: str) -> str:
    """The JSON line of a document or a rejected reply. `endpoint`: that of the reply; `digest`: that of the request."""
    task, reply = result.task, result.reply
    provenance: dict[str, Any] = {
        "prompt": task.prompt.id,
        "set": task.prompt.set,
        "neighbours": [neighbour.id for neighbour in task.neighbours],
        "similarities": [neighbour.similarity for neighbour in task.neighbours],
        "difficulty": task.difficulty,
        "probe": task.probe,
        "teacher": task.teacher.endpoint,
        "model": endpoint.model,
        "template": task.template.name,
        "request": digest,
        "mark": None,  # always null: documents keep the field, so that their bytes stay comparable between versions
    }
    row: dict[str, Any]
    if result.reason is None and result.document is not None:
        row = {**to_dict(record_of(task.prompt, result.document, endpoint.model)), "provenance": provenance}
    else:
        answer = {"reply": reply.text} if isinstance(reply, ChatReply) else {"failure": reply.message}
        row = {"reason": result.reason, "query": task.prompt.query, **answer, **result.evidence}
        row["provenance"] = provenance
    return json.dumps(row, ensure_ascii=True) + "\n"


def unasked_row(prompt: Prompt) -> str:
    """The JSON line of a prompt that was not sent to a teacher because the budget was spent."""
    row = {"reason": UNASKED, "query": prompt.query, "provenance": {"prompt": prompt.id, "set": prompt.set}}
    return json.dumps(row, ensure_ascii=True) + "\n"


def record_of(prompt: Prompt, document: ParsedDocument, model: str) -> SynthRecord:
    """The document as a record in SYNTH's schema."""
    return SynthRecord(
        query=prompt.query,
        synthetic_reasoning=document.reasoning,
        synthetic_answer=document.answer,
        exercise=prompt.kind,
        synth_id=f"distilled/{prompt.id}",
        language="en" if prompt.url else None,
        model=model,
        query_seed_url=prompt.url,
        query_seed_text=prompt.passage,
        seed_license=prompt.license,
    )
