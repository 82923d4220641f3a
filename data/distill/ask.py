"""One round of prompts through the teachers: neighbours, difficulty, probes, the teacher's replies, checks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from configs.distill import DistillConfig, TeacherConfig
from data.distill.checks import reject_reason
from data.distill.collect_prompts import BenchmarkScreen
from data.distill.difficulty import blend_probe, choose_teacher, probe_disagreement, prompt_difficulty
from data.distill.parse_reply import parse_reply
from data.distill.prompts import Prompt
from data.distill.teacher_prompt import teacher_request, template_for
from data.distill.types import PaidReply, PromptResult, TeacherTask
from data.endpoints.chat_types import ChatFailure, ChatReply, ChatRequest
from data.endpoints.pool import EndpointPool, raise_for_outage
from data.retrieval.exemplar_index import ExemplarIndex, Neighbour

OnVerdict = Callable[[str | None], None]  # called as each result comes in: the reason for its rejection, or None


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt with its nearest exemplars and the difficulty computed from both."""

    prompt: Prompt
    neighbours: list[Neighbour]
    difficulty: float


@dataclass
class TeacherRound:
    """Turns prompts into documents or reasons for rejection. `screen` finds texts that overlap a benchmark."""

    config: DistillConfig
    pool: EndpointPool
    index: ExemplarIndex
    seed: int
    screen: BenchmarkScreen | None

    def prepare(self, prompts: Sequence[Prompt]) -> list[PreparedPrompt]:
        """Neighbours and difficulty of each prompt. Uses no endpoint, so it can run while another round waits."""
        neighbours = self.index.nearest([prompt.query for prompt in prompts], self.config.neighbours)
        return [
            PreparedPrompt(p, near, prompt_difficulty(p, near)) for p, near in zip(prompts, neighbours, strict=True)
        ]

    def run(self, prepared: Sequence[PreparedPrompt], on_verdict: OnVerdict) -> list[PromptResult]:
        """The result of each prompt, in order; duplicates are not looked for here.

        Raises `ConfigError` and `Retryable` when an endpoint as a whole fails.
        """
        probes, probe_replies = self._probe(prepared)
        tasks = [self._task(item, probe) for item, probe in zip(prepared, probes, strict=True)]
        results = [
            replace(result, paid=(*paid, *result.paid))
            for result, paid in zip(self._ask(tasks, on_verdict), probe_replies, strict=True)
        ]
        return self._reject_contaminated(results)

    def _request(self, teacher: TeacherConfig, item: PreparedPrompt, sample: int) -> ChatRequest:
        config = self.config
        return teacher_request(
            template_for(teacher, self.pool.config(teacher.endpoint)),
            item.prompt,
            item.neighbours,
            teacher.endpoint,
            config.max_tokens,
            config.temperature,
            self.seed + sample,
        )

    def _probe(self, prepared: Sequence[PreparedPrompt]) -> tuple[list[float | None], list[tuple[PaidReply, ...]]]:
        """Ask the probes; for each prompt how far their answers disagree (None if none answered), and the replies.

        A probe gets exactly the request that a teacher would: if its endpoint is then chosen as the teacher, the reply
        comes from the cache.
        """
        probe = self.config.probe
        if probe is None:
            return [None] * len(prepared), [()] * len(prepared)
        teachers = {teacher.endpoint: teacher for teacher in self.config.teachers}
        probes = [teachers.get(name, TeacherConfig(endpoint=name)) for name in probe.endpoints]
        samples = [(teacher, sample) for teacher in probes for sample in range(probe.samples)]
        requests = [
            replace(self._request(teacher, item, sample), purpose="probe")
            for item in prepared
            for teacher, sample in samples
        ]
        replies = self.pool.ask(requests)
        raise_for_outage(replies)
        # One group of replies a prompt.
        groups = [replies[at : at + len(samples)] for at in range(0, len(replies), len(samples))]
        disagreements = []
        for item, group in zip(prepared, groups, strict=True):
            documents = [parse_reply(reply.text) if isinstance(reply, ChatReply) else None for reply in group]
            answers = [document.answer if document else None for document in documents]
            disagreements.append(probe_disagreement(answers, item.prompt.reference))
        paid = [tuple(PaidReply("probe", reply) for reply in group if isinstance(reply, ChatReply)) for group in groups]
        return disagreements, paid

    def _task(self, item: PreparedPrompt, probe: float | None) -> TeacherTask:
        """Choose the teacher by difficulty, and write the request."""
        weight = self.config.probe.weight if self.config.probe else 0.0
        difficulty = blend_probe(item.difficulty, probe, weight)
        teacher = choose_teacher(self.config.teachers, difficulty)
        template = template_for(teacher, self.pool.config(teacher.endpoint))
        request = self._request(teacher, item, 0)
        return TeacherTask(item.prompt, item.neighbours, difficulty, probe, teacher, template, request)

    def _ask(self, tasks: Sequence[TeacherTask], on_verdict: OnVerdict) -> list[PromptResult]:
        results: dict[int, PromptResult] = {}

        def check(index: int, reply: ChatReply | ChatFailure) -> None:
            task = tasks[index]
            if isinstance(reply, ChatFailure):
                results[index] = PromptResult(task, reply, None, f"failed_{reply.reason}")
            else:
                document = parse_reply(reply.text)
                reason = reject_reason(document, reply.finish, task.prompt, task.neighbours, task.template, self.config)
                results[index] = PromptResult(task, reply, document, reason, (PaidReply("teacher", reply),))
            on_verdict(results[index].reason)

        raise_for_outage(self.pool.ask([task.request for task in tasks], check))
        return [results[index] for index in range(len(tasks))]

    def _reject_contaminated(self, results: list[PromptResult]) -> list[PromptResult]:
        """Reject documents that overlap a benchmark; the benchmark, example and words are kept as evidence."""
        if self.screen is None:
            return results
        accepted = [index for index, result in enumerate(results) if result.reason is None]
        hits = self.screen([document_text(results[index]) for index in accepted])
        for index, hit in zip(accepted, hits, strict=True):
            if hit:
                evidence = {"benchmark": hit[0].benchmark, "example": hit[0].example, "words": hit[0].words}
                results[index] = replace(results[index], reason="contaminated", evidence=evidence)
        return results


def document_text(result: PromptResult) -> str:
    """The document as one text, its query first."""
    query, document = result.task.prompt.query, result.document
    return query if document is None else f"{query}\n{document.reasoning}\n{document.answer}"
