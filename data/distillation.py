"""Retrieval-guided distillation (paper §3.2, §3.3): every prompt becomes one document, or one rejected record.

A prompt is shown to a teacher with its nearest exemplars; the teacher follows from its difficulty; the reply is parsed
and validated. Everything but the replies is worked out anew after a crash, and the pool remembers those, so a resumed
run asks only what was never answered and writes the same files.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.emit import Emit
from configs.schema import DistillConfig
from data.calls import ChatFailure, ChatReply, request_digest
from data.deduplicate import text_hash
from data.difficulty import choose, difficulty
from data.embeddings import Encoder
from data.endpoints import EndpointPool, raise_for_outage
from data.prompts import Prompt, prompts
from data.records import SynthRecord, to_dict
from data.retrieval import ExemplarIndex
from data.tally import Outcome, Tally, Task, refuse_if_poor
from data.teacher import Draft, parse, teacher_request, template_for
from data.validation import verdict

CHUNK = 1024  # prompts under way together: bounds memory, and what an outage throws away
DOCUMENTS, REJECTED = "documents.jsonl", "rejected.jsonl"


def distil(
    config: DistillConfig,
    pool: EndpointPool,
    index: ExemplarIndex,
    encoder: Encoder,
    out: Path,
    seed: int,
    emit: Emit,
) -> Tally:
    """Ask about all prompts; write `out`/documents.jsonl (SYNTH records with provenance) and `out`/rejected.jsonl.

    Raises `ConfigError` if an endpoint cannot be used or too many documents are rejected, `Retryable` on an outage.
    """
    asked = prompts(config, seed)
    tally, seen = Tally(), set[int]()
    progress = _Progress(len(asked), emit)
    progress.show()
    files = [out / f".{name}.tmp" for name in (DOCUMENTS, REJECTED)]
    out.mkdir(parents=True, exist_ok=True)
    with files[0].open("w", encoding="utf-8") as kept, files[1].open("w", encoding="utf-8") as rejected:
        for start in range(0, len(asked), CHUNK):
            tasks = plan(config, pool, index, encoder, asked[start : start + CHUNK], seed)
            for outcome in _without_duplicates(_ask(config, pool, tasks, progress), seen):
                tally.add(outcome, pool.config(outcome.task.teacher.endpoint), emit)
                (kept if outcome.reason is None else rejected).write(_line(outcome, pool))
        for file in (kept, rejected):
            file.flush()
            os.fsync(file.fileno())
    for path, name in zip(files, (DOCUMENTS, REJECTED), strict=True):
        path.replace(out / name)
    refuse_if_poor(config, tally)
    return tally


def plan(
    config: DistillConfig,
    pool: EndpointPool,
    index: ExemplarIndex,
    encoder: Encoder,
    asked: Sequence[Prompt],
    seed: int,
) -> list[Task]:
    """Neighbours, difficulty, teacher and request of each prompt."""
    found = index.nearest([prompt.query for prompt in asked], encoder, config.neighbours)
    tasks = []
    for prompt, neighbours in zip(asked, found, strict=True):
        score = difficulty(prompt, neighbours)
        teacher = choose(config.teachers, score)
        template = template_for(teacher, pool.config(teacher.endpoint))
        request = teacher_request(
            template, prompt, neighbours, teacher.endpoint, config.max_tokens, config.temperature, seed
        )
        tasks.append(Task(prompt, neighbours, score, teacher, template, request))
    return tasks


@dataclass
class _Progress:
    """Moves the bar as replies come in."""

    total: int
    emit: Emit
    done: int = 0
    good: int = 0

    def show(self, *, good: bool | None = None) -> None:
        if good is not None:
            self.done, self.good = self.done + 1, self.good + good
        note = f"{self.good / self.done:.0%} accepted" if self.done else ""
        self.emit("progress", done=self.done, total=self.total, unit="prompts", note=note)


def _ask(config: DistillConfig, pool: EndpointPool, tasks: list[Task], progress: _Progress) -> list[Outcome]:
    """All replies of a chunk, judged, in the order of the prompts."""
    outcomes: dict[int, Outcome] = {}

    def take(index: int, reply: ChatReply | ChatFailure) -> None:
        outcomes[index] = _judged(tasks[index], reply, config.overlap_limit)
        progress.show(good=outcomes[index].reason is None)

    raise_for_outage(pool.ask([task.request for task in tasks], take))
    return [outcomes[index] for index in range(len(tasks))]


def _judged(task: Task, reply: ChatReply | ChatFailure, overlap_limit: float) -> Outcome:
    if isinstance(reply, ChatFailure):
        return Outcome(task, reply, None, f"failed_{reply.reason}")
    draft = parse(reply.text)
    reason = verdict(draft, reply.finish, task.prompt, task.neighbours, task.template, overlap_limit)
    return Outcome(task, reply, draft, reason)


def _without_duplicates(outcomes: list[Outcome], seen: set[int]) -> Iterator[Outcome]:
    """A document that says what an earlier one says is rejected."""
    for outcome in outcomes:
        if outcome.reason is None and outcome.draft is not None:
            digest = text_hash(f"{outcome.draft.reasoning}\x00{outcome.draft.answer}")
            if digest in seen:
                outcome = Outcome(outcome.task, outcome.reply, outcome.draft, "duplicate")
            seen.add(digest)
        yield outcome


def _line(outcome: Outcome, pool: EndpointPool) -> str:
    """The JSON line of a document, or of what was rejected and why."""
    task, reply = outcome.task, outcome.reply
    endpoint = pool.config(task.teacher.endpoint)
    provenance = {
        "prompt": task.prompt.id,
        "neighbours": [neighbour.id for neighbour in task.neighbours],
        "similarities": [neighbour.similarity for neighbour in task.neighbours],
        "difficulty": task.difficulty,
        "teacher": task.teacher.endpoint,
        "model": endpoint.model,
        "template": task.template.name,
        "request": request_digest(task.request, endpoint),
    }
    if outcome.reason is None and outcome.draft is not None:
        row = {**to_dict(_record(task.prompt, outcome.draft, endpoint.model)), "provenance": provenance}
    else:
        said = {"reply": reply.text} if isinstance(reply, ChatReply) else {"failure": reply.message}
        row = {"reason": outcome.reason, "query": task.prompt.query, **said, "provenance": provenance}
    return json.dumps(row, ensure_ascii=True) + "\n"


def _record(prompt: Prompt, draft: Draft, model: str) -> SynthRecord:
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
