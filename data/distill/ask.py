"""Prepare prompts (neighbours, difficulty), build requests to probes and teachers, turn replies into results."""

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nautile.configs.distill import DistillConfig, TeacherConfig
from nautile.configs.endpoint import EndpointConfig
from nautile.data.distill.checks import ReplyVerdict, injection_signs
from nautile.data.distill.parse_reply import ParsedDocument, parse_reply
from nautile.data.distill.prompts import Prompt
from nautile.data.distill.teacher_prompt import Template, teacher_request, template_for
from nautile.data.endpoints.chat_types import UNPAID, ChatFailure, ChatReply, ChatRequest
from nautile.data.endpoints.pool import AskResult, EndpointPool
from nautile.data.records import SynthRecord, to_dict
from nautile.data.retrieval.exemplar_index import ExemplarIndex, Neighbour

KIND_WEIGHT, LENGTH_WEIGHT, STEPS_WEIGHT = 0.4, 0.2, 0.4
MAX_WORDS, MAX_STEPS = 1000, 20
KINDS = {"fact": 0.1, "definition": 0.2, "person": 0.2, "place": 0.2, "explanation": 0.4}
SAME_ANSWER = 0.6  # agreement from which two answers count as the same
_DEMANDING = re.compile(
    r"\b(?:prove|derive|calculate|compute|solve|how many|how much|implement|program|algorithm|function|optimi[sz]e"
    r"|why|compare|analy[sz]e|step by step|essay|story|poem|translate)\b",
    re.IGNORECASE,
)
# A full stop counts before white space only: "3.5" is one number, "3.5. Then 4." two steps.
_STEP = re.compile(r"[.!?](?:\s|$)|\n")
_WORD = re.compile(r"\w+")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def prompt_difficulty(prompt: Prompt, neighbours: Sequence[Neighbour]) -> float:
    """Difficulty from 0 (easiest) to 1, rounded to four digits (paper §3.3): 0.4 kind + 0.2 length + 0.4 steps.

    `kind` is a value for what the question asks for, `length` the logarithm of its number of words (1 for 1,000 words
    and more), `steps` the mean number of steps in the neighbours' reasoning (1 for 20 steps and more).
    """
    kind = KINDS.get(prompt.kind)
    if kind is None:  # an open instruction: count the demanding words in it
        # 0.3 without such a word, the maximum with two different ones.
        kind = min(1.0, 0.3 + 0.35 * len({word.lower() for word in _DEMANDING.findall(prompt.query)}))
    words = len(prompt.query.split())
    length = min(1.0, math.log(max(1, words)) / math.log(MAX_WORDS))
    counts = [count_steps(neighbour.record.synthetic_reasoning) for neighbour in neighbours]
    steps = min(1.0, sum(counts) / len(counts) / MAX_STEPS) if counts else 0.0
    return round(KIND_WEIGHT * kind + LENGTH_WEIGHT * length + STEPS_WEIGHT * steps, 4)


def count_steps(reasoning: str) -> int:
    """Sentences or lines of a reasoning."""
    return sum(1 for part in _STEP.split(reasoning) if part.strip())


def blend_probe(difficulty: float, probe: float | None, weight: float) -> float:
    """Blend the probes' disagreement into the difficulty; unchanged if no probe answered."""
    return difficulty if probe is None else round((1 - weight) * difficulty + weight * probe, 4)


def choose_teacher(teachers: Sequence[TeacherConfig], difficulty: float) -> TeacherConfig:
    """The teacher with the lowest `up_to` that is at least the difficulty; the one with the highest if none is."""
    ranked = sorted(teachers, key=lambda teacher: teacher.up_to)
    return next((teacher for teacher in ranked if difficulty <= teacher.up_to), ranked[-1])


def next_teacher(teachers: Sequence[TeacherConfig], after: TeacherConfig) -> TeacherConfig | None:
    """The teacher with the next higher `up_to` than `after`; None if there is none."""
    ranked = sorted(teachers, key=lambda teacher: teacher.up_to)
    return next(iter(ranked[ranked.index(after) + 1 :]), None)


def probe_disagreement(answers: Sequence[str | None], reference: str | None) -> float | None:
    """Disagreement of the probes' answers (None: no answer), from 0 to 1; None if there is no answer at all.

    With a known answer it is the share of probes that miss it, else 1 - mean pairwise agreement.
    """
    if all(answer is None for answer in answers):
        return None
    if reference is not None:
        right = sum(answer is not None and agreement(answer, reference) >= SAME_ANSWER for answer in answers)
        return round(1 - right / len(answers), 4)
    return round(1 - mean_agreement(answers), 4)


def agreement(answer: str, other: str) -> float:
    """Agreement of two answers, from 0 to 1.

    1 for the same words. If both contain numbers, whether their last numbers are equal, because worked exercises end in
    their result. Else the F1 score of their words.
    """
    words, other_words = ([word.lower() for word in _WORD.findall(text)] for text in (answer, other))
    if words == other_words:
        return 1.0
    last_numbers = [
        float(numbers[-1].replace(",", "")) for text in (answer, other) if (numbers := _NUMBER.findall(text))
    ]
    if len(last_numbers) == 2:
        return float(last_numbers[0] == last_numbers[1])
    if not words or not other_words:
        return 0.0
    overlap = (Counter(words) & Counter(other_words)).total()
    return 2 * overlap / (len(words) + len(other_words))


def mean_agreement(answers: Sequence[str | None]) -> float:
    """Mean agreement of all pairs of at least two answers; a missing answer agrees with none."""
    pairs = [(a, b) for i, a in enumerate(answers) for b in answers[i + 1 :]]
    return sum(0.0 if a is None or b is None else agreement(a, b) for a, b in pairs) / len(pairs)


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


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt with its nearest exemplars, and the difficulty computed from both."""

    prompt: Prompt
    neighbours: list[Neighbour]
    difficulty: float


@dataclass(frozen=True)
class Teachers:
    """The teachers and probes of a distillation: builds their requests and evaluates their replies."""

    config: DistillConfig
    pool: EndpointPool
    index: ExemplarIndex
    seed: int

    def prepare(self, prompts: Sequence[Prompt]) -> list[PreparedPrompt]:
        """Find the neighbours and the difficulty of each prompt. Uses no endpoint, so it can run beside requests."""
        neighbours = self.index.nearest([prompt.query for prompt in prompts], self.config.neighbours)
        return [
            PreparedPrompt(p, near, prompt_difficulty(p, near)) for p, near in zip(prompts, neighbours, strict=True)
        ]

    def probe_requests(self, item: PreparedPrompt) -> list[ChatRequest]:
        """The requests to the probes; an empty list without probes.

        A probe gets exactly the same request as a teacher. If its endpoint is then chosen as the teacher, the reply
        comes from the cache.
        """
        probe = self.config.probe
        if probe is None:
            return []
        teachers = {teacher.endpoint: teacher for teacher in self.config.teachers}
        requests = []
        for name in probe.endpoints:
            request = self._request(teachers.get(name, TeacherConfig(endpoint=name)), item, "probe")
            # The first sample has the seed of a teacher's request, so that it can serve as the document; the others
            # differ from it in nothing but the seed.
            requests += [request, *(replace(request, seed=self.seed + sample) for sample in range(1, probe.samples))]
        return requests

    def first_task(self, item: PreparedPrompt, probe_replies: Sequence[AskResult]) -> TeacherTask:
        """Choose the teacher by difficulty, including the disagreement of the probes (paper §3.3)."""
        probe = None
        if self.config.probe is not None:
            # A probe that failed, or whose reply is no document, has the answer None: it agrees with nobody.
            documents = [parse_reply(reply.text) if isinstance(reply, ChatReply) else None for reply in probe_replies]
            answers = [document.answer if document else None for document in documents]
            probe = probe_disagreement(answers, item.prompt.reference)
        weight = self.config.probe.weight if self.config.probe else 0.0
        item = replace(item, difficulty=blend_probe(item.difficulty, probe, weight))
        return self._task(item, probe, choose_teacher(self.config.teachers, item.difficulty))

    def next_task(self, task: TeacherTask, reply: AskResult) -> TeacherTask | None:
        """If the task's teacher has spent its own budget, the same task for the teacher of harder prompts, else None.

        There is no fallback to a teacher of easier prompts: a prompt for the last teacher stays without a document.
        """
        if not isinstance(reply, ChatFailure) or reply.reason != "endpoint_budget":
            return None
        teacher = next_teacher(self.config.teachers, task.teacher)
        item = PreparedPrompt(task.prompt, task.neighbours, task.difficulty)
        return None if teacher is None else self._task(item, task.probe, teacher)

    def failure_result(
        self, task: TeacherTask, failure: ChatFailure, probe_replies: Sequence[AskResult]
    ) -> PromptResult:
        # The budget was spent, so nobody has judged this prompt: it is counted apart, without signs of injection.
        if failure.reason in UNPAID:
            return PromptResult(task, failure, None, UNASKED, _paid(probe_replies))
        signs = injection_signs(task.prompt, task.neighbours, "")
        return PromptResult(task, failure, None, f"failed_{failure.reason}", _paid(probe_replies), signs)

    def reply_result(
        self, task: TeacherTask, reply: ChatReply, probe_replies: Sequence[AskResult], verdict: ReplyVerdict
    ) -> PromptResult:
        paid = (*_paid(probe_replies), PaidReply("teacher", reply))
        return PromptResult(task.without_messages(), reply, verdict.document, verdict.reason, paid, verdict.signs)

    def _request(self, teacher: TeacherConfig, item: PreparedPrompt, purpose: str) -> ChatRequest:
        config = self.config
        return teacher_request(
            template_for(teacher, self.pool.config(teacher.endpoint)),
            item.prompt,
            item.neighbours,
            teacher.endpoint,
            config.max_tokens,
            config.temperature,
            self.seed,
            purpose,
        )

    def _task(self, item: PreparedPrompt, probe: float | None, teacher: TeacherConfig) -> TeacherTask:
        template = template_for(teacher, self.pool.config(teacher.endpoint))
        request = self._request(teacher, item, "teacher")
        return TeacherTask(item.prompt, item.neighbours, item.difficulty, probe, teacher, template, request)


def _paid(probe_replies: Sequence[AskResult]) -> tuple[PaidReply, ...]:
    return tuple(PaidReply("probe", reply) for reply in probe_replies if isinstance(reply, ChatReply))


def document_text(result: PromptResult) -> str:
    query, document = result.task.prompt.query, result.document
    return query if document is None else f"{query}\n{document.reasoning}\n{document.answer}"
