"""A prompt on its way to a document: how it is asked, what came back, and what became of it."""

import json
from dataclasses import dataclass, field
from typing import Any

from configs.distill import TeacherConfig
from configs.endpoint import EndpointConfig
from data.distill.parse_reply import ParsedDocument
from data.distill.prompts import Prompt
from data.distill.teacher_prompt import Template
from data.endpoints.chat_types import ChatFailure, ChatReply, ChatRequest
from data.records import SynthRecord, to_dict
from data.retrieval.exemplar_index import Neighbour


@dataclass(frozen=True)
class TeacherTask:
    """A prompt, and how it is asked. `difficulty` counts the `probe` in: what cheap teachers disagreed by, or None."""

    prompt: Prompt
    neighbours: list[Neighbour]
    difficulty: float
    probe: float | None
    teacher: TeacherConfig
    template: Template
    request: ChatRequest


@dataclass(frozen=True)
class PaidReply:
    """A reply that was paid for on behalf of a prompt, whether or not it became the document."""

    purpose: str
    reply: ChatReply


@dataclass(frozen=True)
class PromptResult:
    """What became of a task: the document, or the reason why there is none (`draft`: what the teacher had written).

    `mark`: a judge's; `said`: what the reason rests on, for people to look at (a benchmark's example, shares).
    """

    task: TeacherTask
    reply: ChatReply | ChatFailure
    draft: ParsedDocument | None
    reason: str | None
    paid: tuple[PaidReply, ...] = ()
    mark: int | None = None
    said: dict[str, Any] = field(default_factory=dict)


def result_row(outcome: PromptResult, endpoint: EndpointConfig, digest: str) -> str:
    """The JSON line of a document, or of what was rejected and why. `endpoint`: the one that answered."""
    task, reply = outcome.task, outcome.reply
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
        "mark": outcome.mark,
    }
    if outcome.reason is None and outcome.draft is not None:
        row = {**to_dict(record_of(task.prompt, outcome.draft, endpoint.model)), "provenance": provenance}
    else:
        told = {"reply": reply.text} if isinstance(reply, ChatReply) else {"failure": reply.message}
        row = {"reason": outcome.reason, "query": task.prompt.query, **told, **outcome.said, "provenance": provenance}
    return json.dumps(row, ensure_ascii=True) + "\n"


def unasked_row(prompt: Prompt, reason: str) -> str:
    """The JSON line of a prompt that nobody was asked about."""
    row = {"reason": reason, "query": prompt.query, "provenance": {"prompt": prompt.id, "set": prompt.set}}
    return json.dumps(row, ensure_ascii=True) + "\n"


def record_of(prompt: Prompt, draft: ParsedDocument, model: str) -> SynthRecord:
    """The document in SYNTH's own schema."""
    return SynthRecord(
        query=prompt.query,
        synthetic_reasoning=draft.reasoning,
        synthetic_answer=draft.answer,
        exercise=prompt.kind,
        synth_id=f"distilled/{prompt.id}",
        language="en" if prompt.url else None,
        model=model,
        query_seed_url=prompt.url,
        query_seed_text=prompt.passage,
        seed_license=prompt.license,
    )
