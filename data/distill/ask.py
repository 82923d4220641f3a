"""One round of prompts through the teachers: neighbours, difficulty, probes, the teacher's replies, checks, marks."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from configs.distill import DistillConfig, TeacherConfig
from data.distill.checks import mark_of, quality_request, reject_reason
from data.distill.collect_prompts import BenchmarkScreen
from data.distill.difficulty import ALIKE, agreement, blended, choose, difficulty, majority, mean_agreement
from data.distill.parse_reply import parse_reply
from data.distill.prompts import Prompt
from data.distill.teacher_prompt import teacher_request, template_for
from data.distill.types import PaidReply, PromptResult, TeacherTask
from data.endpoints.chat_types import ChatFailure, ChatReply, ChatRequest
from data.endpoints.pool import EndpointPool, raise_for_outage
from data.retrieval.exemplar_index import ExemplarIndex, Neighbour

log = logging.getLogger(__name__)

OnVerdict = Callable[[bool], None]  # is called with each prompt's verdict as its reply comes in
Reply = ChatReply | ChatFailure


@dataclass(frozen=True)
class RoutedPrompt:
    """A prompt with its nearest exemplars and the difficulty worked out from both."""

    prompt: Prompt
    neighbours: list[Neighbour]
    difficulty: float


@dataclass
class TeacherRound:
    """What every round needs. `screen`: tells texts that overlap a benchmark; None: nothing is held out."""

    config: DistillConfig
    pool: EndpointPool
    index: ExemplarIndex
    seed: int
    screen: BenchmarkScreen | None

    def plan(self, prompts: Sequence[Prompt]) -> list[RoutedPrompt]:
        """Neighbours and difficulty of each prompt. Needs no endpoint, so it can be done while others are asked."""
        config = self.config
        queries = [prompt.query for prompt in prompts]
        found = self.index.nearest(queries, config.neighbours)
        return [RoutedPrompt(p, near, difficulty(p, near)) for p, near in zip(prompts, found, strict=True)]

    def run(self, planned: Sequence[RoutedPrompt], tell: OnVerdict) -> list[PromptResult]:
        """What becomes of each, but for copies. Raises `ConfigError` and `Retryable` for what ails an endpoint."""
        probes, probed = self._probe(planned)
        tasks = [self._task(one, probe) for one, probe in zip(planned, probes, strict=True)]
        outcomes = [
            replace(outcome, paid=(*paid, *outcome.paid))
            for outcome, paid in zip(self._ask(tasks, tell), probed, strict=True)
        ]
        return self._mark(self._screen(outcomes))

    def _request(self, teacher: TeacherConfig, one: RoutedPrompt | TeacherTask, turn: int) -> ChatRequest:
        config = self.config
        template = template_for(teacher, self.pool.config(teacher.endpoint))
        return teacher_request(
            template,
            one.prompt,
            one.neighbours,
            teacher.endpoint,
            config.max_tokens,
            config.temperature,
            self.seed + turn,
        )

    def _probe(self, planned: Sequence[RoutedPrompt]) -> tuple[list[float | None], list[tuple[PaidReply, ...]]]:
        """How far the probes' answers are apart, or miss the reference; None where no probe answered.

        They are asked just as a teacher is: where one of them is chosen then, its reply is there already.
        """
        probe = self.config.probe
        if probe is None:
            return [None] * len(planned), [()] * len(planned)
        known = {teacher.endpoint: teacher for teacher in self.config.teachers}
        asked = [known.get(name, TeacherConfig(endpoint=name)) for name in probe.endpoints]
        turns = [(teacher, turn) for teacher in asked for turn in range(probe.samples)]
        requests = [replace(self._request(t, one, turn), purpose="probe") for one in planned for t, turn in turns]
        replies = self.pool.ask(requests)
        raise_for_outage(replies)
        groups = [replies[at : at + len(turns)] for at in range(0, len(replies), len(turns))]
        values = [_apart(one.prompt, group) for one, group in zip(planned, groups, strict=True)]
        return values, [_paid("probe", group) for group in groups]

    def _task(self, one: RoutedPrompt, probe: float | None) -> TeacherTask:
        weight = self.config.probe.weight if self.config.probe else 0.0
        score = blended(one.difficulty, probe, weight)
        teacher = choose(self.config.teachers, score)
        template = template_for(teacher, self.pool.config(teacher.endpoint))
        request = self._request(teacher, one, 0)
        return TeacherTask(one.prompt, one.neighbours, score, probe, teacher, template, request)

    def _ask(self, tasks: Sequence[TeacherTask], tell: OnVerdict) -> list[PromptResult]:
        asks = self.config.consistency.asks if self.config.consistency else 1
        requests = [self._request(task.teacher, task, turn) for task in tasks for turn in range(asks)]
        replies: list[Reply | None] = [None] * len(requests)
        outcomes: dict[int, PromptResult] = {}

        def take(index: int, reply: Reply) -> None:
            replies[index] = reply
            at = index // asks
            group = [one for one in replies[at * asks : (at + 1) * asks] if one is not None]
            if len(group) == asks:
                outcomes[at] = self._judged(tasks[at], group)
                tell(outcomes[at].reason is None)

        raise_for_outage(self.pool.ask(requests, take))
        return [outcomes[at] for at in range(len(tasks))]

    def _judged(self, task: TeacherTask, replies: Sequence[Reply]) -> PromptResult:
        """The first reply, or of several the first of the majority among those that are fit to be kept."""
        drafted = [self._checked(task, reply) for reply in replies]
        paid = _paid("teacher", replies)
        if self.config.consistency is None:
            return replace(drafted[0], paid=paid)
        answers = [one.draft.answer if one.reason is None and one.draft else None for one in drafted]
        chosen, share = majority(answers)
        if chosen is None:
            return replace(drafted[0], paid=paid)
        outcome = replace(drafted[chosen], paid=paid)
        if share < self.config.consistency.share:
            return replace(outcome, reason="inconsistent", said={"agreed": round(share, 3)})
        return outcome

    def _checked(self, task: TeacherTask, reply: Reply) -> PromptResult:
        if isinstance(reply, ChatFailure):
            return PromptResult(task, reply, None, f"failed_{reply.reason}")
        draft = parse_reply(reply.text)
        return PromptResult(
            task,
            reply,
            draft,
            reject_reason(draft, reply.finish, task.prompt, task.neighbours, task.template, self.config),
        )

    def _screen(self, outcomes: list[PromptResult]) -> list[PromptResult]:
        """Documents that overlap a benchmark are not kept; which, and in what words, is kept with them."""
        if self.screen is None:
            return outcomes
        held = [at for at, one in enumerate(outcomes) if one.reason is None]
        hits = self.screen([text_of(outcomes[at]) for at in held])
        for at, found in zip(held, hits, strict=True):
            if found:
                said = {"benchmark": found[0].benchmark, "example": found[0].example, "words": found[0].words}
                outcomes[at] = replace(outcomes[at], reason="contaminated", said=said)
        return outcomes

    def _mark(self, outcomes: list[PromptResult]) -> list[PromptResult]:
        """A judge's mark for each document that is left; without one, or below the least, it is not kept."""
        config = self.config.quality
        if config is None:
            return outcomes
        held = [at for at, one in enumerate(outcomes) if one.reason is None and one.draft is not None]
        requests = [quality_request(outcomes[at].task.prompt, outcomes[at].draft, config, self.seed) for at in held]
        replies = self.pool.ask(requests)
        raise_for_outage(replies)
        for at, reply in zip(held, replies, strict=True):
            mark = mark_of(reply.text) if isinstance(reply, ChatReply) else None
            reason = "unmarked" if mark is None else "poor" if mark < config.least else None
            paid = (*outcomes[at].paid, *_paid("quality", [reply]))
            outcomes[at] = replace(outcomes[at], reason=reason, mark=mark, paid=paid)
        return outcomes


def text_of(outcome: PromptResult) -> str:
    """What the document says, its query first."""
    query, draft = outcome.task.prompt.query, outcome.draft
    return query if draft is None else f"{query}\n{draft.reasoning}\n{draft.answer}"


def _apart(prompt: Prompt, replies: Sequence[Reply]) -> float | None:
    drafts = [parse_reply(reply.text) if isinstance(reply, ChatReply) else None for reply in replies]
    answers = [draft.answer if draft else None for draft in drafts]
    if all(answer is None for answer in answers):
        return None
    if prompt.reference is not None:
        right = sum(answer is not None and agreement(answer, prompt.reference) >= ALIKE for answer in answers)
        return round(1 - right / len(answers), 4)
    return round(1 - mean_agreement(answers), 4)


def _paid(purpose: str, replies: Sequence[Reply]) -> tuple[PaidReply, ...]:
    return tuple(PaidReply(purpose, reply) for reply in replies if isinstance(reply, ChatReply))
