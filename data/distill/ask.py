"""Prepare prompts (neighbours, difficulty), build requests to probes and teachers, turn replies into results."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nautile.configs.distill import DistillConfig, TeacherConfig
from nautile.data.distill.difficulty import (
    blend_probe,
    choose_teacher,
    next_teacher,
    probe_disagreement,
    prompt_difficulty,
)
from nautile.data.distill.parse_reply import parse_reply
from nautile.data.distill.prompts import Prompt
from nautile.data.distill.teacher_prompt import teacher_request, template_for
from nautile.data.distill.types import UNASKED, PaidReply, PromptResult, TeacherTask
from nautile.data.distill.verdicts import ReplyVerdict, injection_signs
from nautile.data.endpoints.chat_types import UNPAID, ChatFailure, ChatReply, ChatRequest
from nautile.data.endpoints.pool import EndpointPool
from nautile.data.endpoints.session import AskResult
from nautile.data.retrieval.exemplar_index import ExemplarIndex, Neighbour


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
        """The result of a task without a reply."""
        # The budget was spent, so nobody has judged this prompt: it is counted apart, without signs of injection.
        if failure.reason in UNPAID:
            return PromptResult(task, failure, None, UNASKED, _paid(probe_replies))
        signs = injection_signs(task.prompt, task.neighbours, "")
        return PromptResult(task, failure, None, f"failed_{failure.reason}", _paid(probe_replies), signs)

    def reply_result(
        self, task: TeacherTask, reply: ChatReply, probe_replies: Sequence[AskResult], verdict: ReplyVerdict
    ) -> PromptResult:
        """The result of a task with a reply, after its checks."""
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
    """Query, reasoning and answer of a result as one text."""
    query, document = result.task.prompt.query, result.document
    return query if document is None else f"{query}\n{document.reasoning}\n{document.answer}"
