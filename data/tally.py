"""What came of a distillation: counts by reason and teacher, cost, samples."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from configs.emit import Emit
from configs.schema import DistillConfig, EndpointConfig, TeacherConfig
from configs.section import ConfigError
from data.calls import ChatFailure, ChatReply, ChatRequest, dollars
from data.endpoints import EndpointPool
from data.local_endpoint import STAND_IN
from data.prompts import Prompt
from data.retrieval import Neighbour
from data.teacher import Draft, Template, template_for

SHOWN = 48  # documents, good and bad, reported as samples


@dataclass(frozen=True)
class Task:
    """A prompt, and how it is asked."""

    prompt: Prompt
    neighbours: list[Neighbour]
    difficulty: float
    teacher: TeacherConfig
    template: Template
    request: ChatRequest


@dataclass(frozen=True)
class Outcome:
    """What became of it: the document, or the reason why there is none (`draft`: what the teacher had written)."""

    task: Task
    reply: ChatReply | ChatFailure
    draft: Draft | None
    reason: str | None


@dataclass
class Tally:
    """Counts over all prompts of a run."""

    prompts: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)  # by teacher
    kept: Counter[str] = field(default_factory=Counter)
    tokens_in: Counter[str] = field(default_factory=Counter)
    tokens_out: Counter[str] = field(default_factory=Counter)
    dollars: float = 0.0
    uncounted: int = 0  # replies whose tokens the endpoint did not say
    difficulty: float = 0.0  # their sum
    samples: list[dict[str, Any]] = field(default_factory=list)

    @property
    def accepted(self) -> int:
        return sum(self.kept.values())

    def add(self, outcome: Outcome, endpoint: EndpointConfig, emit: Emit) -> None:
        """Count one outcome; the first ones become samples."""
        name = outcome.task.teacher.endpoint
        self.prompts += 1
        self.asked[name] += 1
        self.difficulty += outcome.task.difficulty
        if outcome.reason is None:
            self.kept[name] += 1
        else:
            self.rejected[outcome.reason] += 1
        if isinstance(outcome.reply, ChatReply):
            cost = dollars(endpoint, outcome.reply.tokens_in, outcome.reply.tokens_out)
            self.dollars += cost or 0.0
            self.uncounted += outcome.reply.tokens_in is None or outcome.reply.tokens_out is None
            self.tokens_in[name] += outcome.reply.tokens_in or 0
            self.tokens_out[name] += outcome.reply.tokens_out or 0
        if self.prompts <= SHOWN:
            row = _shown(outcome)
            self.samples.append(row)
            emit("sample", index=self.prompts - 1, set="documents", **row)


def facts(tally: Tally, config: DistillConfig, pool: EndpointPool) -> dict[str, Any]:
    """The counts as plain data, named for people."""
    used = [pool.config(teacher.endpoint) for teacher in config.teachers]
    stand_ins = [STAND_IN if c.kind == "embedded" else f"{c.model}, in place of a teacher" for c in used if c.stand_in]
    teachers = {
        teacher.endpoint: {
            "model": pool.config(teacher.endpoint).model,
            "template": template_for(teacher, pool.config(teacher.endpoint)).name,
            "up_to": teacher.up_to,
            "asked": tally.asked[teacher.endpoint],
            "kept": tally.kept[teacher.endpoint],
            "tokens_in": tally.tokens_in[teacher.endpoint],
            "tokens_out": tally.tokens_out[teacher.endpoint],
        }
        for teacher in config.teachers
    }
    mean = tally.difficulty / tally.prompts if tally.prompts else None
    return {
        "prompts": tally.prompts,
        "documents": tally.accepted,
        "accepted_share": round(tally.accepted / tally.prompts, 4) if tally.prompts else None,
        "rejected": dict(tally.rejected.most_common()),
        "teachers": teachers,
        "dollars": round(tally.dollars, 6),
        "replies_without_token_counts": tally.uncounted,
        "mean_difficulty": None if mean is None else round(mean, 4),
        "prompt_source": config.prompt_source,
        "neighbours": config.neighbours,
        "budget_exhausted": tally.rejected["failed_budget"] > 0,
        "stand_in": "; ".join(dict.fromkeys(stand_ins)) or None,
    }


def by_reason(tally: Tally) -> dict[str, list[dict[str, Any]]]:
    """The samples, grouped: those kept under "kept", the others under their reason."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for sample in tally.samples:
        groups[sample["rejected"] or "kept"].append(sample)
    return dict(groups)


def refuse_if_poor(config: DistillConfig, tally: Tally) -> None:
    """Raise `ConfigError` if nothing was kept, or too little."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in tally.rejected.most_common(4))
    if not tally.accepted:
        raise ConfigError(f"distill: not one of {tally.prompts} documents was kept ({reasons}); see rejected.jsonl")
    share = 1 - tally.accepted / tally.prompts
    if share > config.max_rejected_share:
        raise ConfigError(
            f"distill.max_rejected_share is {config.max_rejected_share:g}, but {share:.3f} of {tally.prompts} "
            f"documents were rejected ({reasons}); take another teacher or raise it"
        )


def _shown(outcome: Outcome) -> dict[str, Any]:
    draft = outcome.draft
    return {
        "query": outcome.task.prompt.query,
        "reasoning": draft.reasoning if draft else None,
        "answer": draft.answer if draft else None,
        "teacher": outcome.task.teacher.endpoint,
        "rejected": outcome.reason,
    }
