"""What came of a distillation: counts, distributions, cost and samples, added up file by file.

A part's tally is kept beside its file, so that a resumed run counts what it does not do again.
"""

import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from common.errors import ConfigError
from common.events import Emit
from configs.distill import DistillConfig
from data.distill.teacher_prompt import template_for
from data.distill.types import PromptResult
from data.endpoints.chat_types import ChatReply, reply_cost
from data.endpoints.embedded import STAND_IN
from data.endpoints.pool import EndpointPool
from data.screening.language import detect_language

SHOWN = 48  # documents, good and bad, that become sample rows
MOST = 6  # kept in the tally of the documents and of each reason
BINS = 20  # of difficulty
CUT = 1200  # characters of a sample's text


@dataclass
class DistillStats:
    """Counts over the prompts of a part, or of a run. Histograms are counts by the lower edge of a bin."""

    prompts: int = 0
    difficulty: float = 0.0  # their sum, over the prompts that were `planned`
    planned: int = 0
    uncounted: int = 0  # replies whose tokens the endpoint did not say
    unprobed: int = 0  # prompts whose probes all failed
    rejected: Counter[str] = field(default_factory=Counter)
    contaminated: Counter[str] = field(default_factory=Counter)  # by benchmark
    asked: Counter[str] = field(default_factory=Counter)  # by teacher
    kept: Counter[str] = field(default_factory=Counter)
    sets: Counter[str] = field(default_factory=Counter)  # prompts by set
    sets_kept: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)  # of documents; "?": not to be told
    tokens_in: Counter[str] = field(default_factory=Counter)  # by endpoint that answered
    tokens_out: Counter[str] = field(default_factory=Counter)
    dollars: Counter[str] = field(default_factory=Counter)  # by purpose
    difficulties: Counter[str] = field(default_factory=Counter)
    probes: Counter[str] = field(default_factory=Counter)
    reasoning_words: Counter[str] = field(default_factory=Counter)  # of documents, in powers of two
    answer_words: Counter[str] = field(default_factory=Counter)
    curve: list[list[float]] = field(default_factory=list)  # [unix time, dollars since the one before]
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # "kept", or the reason

    @property
    def accepted(self) -> int:
        return sum(self.kept.values())

    @property
    def cost(self) -> float:
        """Dollars, of probes and judges too."""
        return sum(self.dollars.values())

    def add(self, outcome: PromptResult, pool: EndpointPool) -> None:
        """Count one outcome."""
        task, teacher = outcome.task, outcome.task.teacher.endpoint
        self.prompts += 1
        self.planned += 1
        self.asked[teacher] += 1
        self.sets[task.prompt.set] += 1
        self.kinds[task.prompt.kind] += 1
        self.difficulty += task.difficulty
        self.difficulties[_bin(task.difficulty)] += 1
        if task.probe is not None:
            self.probes[_bin(task.probe)] += 1
        if outcome.reason is None and outcome.draft is not None:
            self.kept[teacher] += 1
            self.sets_kept[task.prompt.set] += 1
            self.reasoning_words[_power(outcome.draft.reasoning)] += 1
            self.answer_words[_power(outcome.draft.answer)] += 1
            self.languages[detect_language(f"{task.prompt.query}\n{outcome.draft.answer}") or "?"] += 1
        else:
            self.rejected[outcome.reason or "unparsable"] += 1
        if outcome.reason == "contaminated":
            self.contaminated[outcome.said["benchmark"]] += 1
        self._pay(outcome, pool)
        group = self.samples.setdefault(outcome.reason or "kept", [])
        if len(group) < MOST:
            group.append(shown(outcome))

    def add_unasked(self, reason: str, sets: Counter[str]) -> None:
        """Count prompts that nobody was asked about."""
        self.prompts += sets.total()
        self.rejected[reason] += sets.total()
        self.sets += sets

    def mark_time(self, spent: float) -> None:
        """A point of the curve of cost."""
        self.curve.append([round(time.time(), 3), spent])

    def merge(self, other: "DistillStats") -> None:
        """Add another part's counts."""
        for one in fields(self):
            mine, theirs = getattr(self, one.name), getattr(other, one.name)
            if one.name == "samples":
                for reason, rows in theirs.items():
                    self.samples[reason] = (self.samples.get(reason, []) + rows)[:MOST]
            elif isinstance(mine, Counter):
                mine.update(theirs)
            else:
                setattr(self, one.name, mine + theirs)

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in values.items()}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> "DistillStats":
        """What `plain` gave."""
        kept = {one.name: plain[one.name] for one in fields(cls)}
        return cls(**{k: Counter(v) if isinstance(v, dict) and k != "samples" else v for k, v in kept.items()})

    def _pay(self, outcome: PromptResult, pool: EndpointPool) -> None:
        counted: set[str] = set()  # a probe's reply that became the document was paid for once
        for paid in outcome.paid:
            reply = paid.reply
            if reply.digest in counted:
                continue
            counted.add(reply.digest)
            cost = reply_cost(pool.config(reply.endpoint), reply.tokens_in, reply.tokens_out)
            self.dollars[paid.purpose] += cost or 0.0
            self.uncounted += reply.tokens_in is None or reply.tokens_out is None
            self.tokens_in[reply.endpoint] += reply.tokens_in or 0
            self.tokens_out[reply.endpoint] += reply.tokens_out or 0


def distill_facts(tally: DistillStats, config: DistillConfig, pool: EndpointPool) -> dict[str, Any]:
    """The counts as plain data, named for people."""
    used = [pool.config(name) for name in config.endpoints]
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
    return {
        "prompts": tally.prompts,
        "documents": tally.accepted,
        "accepted_share": round(tally.accepted / tally.prompts, 4) if tally.prompts else None,
        "rejected": dict(tally.rejected.most_common()),
        "teachers": teachers,
        "dollars": round(tally.cost, 6),
        "dollars_by_purpose": {name: round(cost, 6) for name, cost in sorted(tally.dollars.items())},
        "replies_without_token_counts": tally.uncounted,
        "mean_difficulty": round(tally.difficulty / tally.planned, 4) if tally.planned else None,
        "prompts_without_probe": tally.unprobed if config.probe else None,
        "languages": dict(tally.languages.most_common()),
        "neighbours": config.neighbours,
        "budget_exhausted": tally.rejected["failed_budget"] > 0,
        "stand_in": "; ".join(dict.fromkeys(stand_ins)) or None,
    }


def refuse_if_poor(config: DistillConfig, tally: DistillStats) -> None:
    """Raise `ConfigError` if nothing was kept, or too little."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in tally.rejected.most_common(4))
    if not tally.accepted:
        raise ConfigError(f"distill: not one of {tally.prompts} documents was kept ({reasons}); see rejected-*.jsonl")
    share = 1 - tally.accepted / tally.prompts
    if share > config.max_rejected_share:
        raise ConfigError(
            f"distill.max_rejected_share is {config.max_rejected_share:g}, but {share:.3f} of {tally.prompts} "
            f"documents were rejected ({reasons}); take another teacher or raise it"
        )


def emit_samples(tally: DistillStats, outcomes: list[PromptResult], emit: Emit) -> None:
    """Report the first outcomes of a run as sample rows; `tally` holds what came before these."""
    for index, outcome in enumerate(outcomes[: max(0, SHOWN - tally.prompts)], tally.prompts):
        emit("sample", index=index, set="documents", **shown(outcome))


def shown(outcome: PromptResult) -> dict[str, Any]:
    """A document, good or bad, for people to look at."""
    draft, reply = outcome.draft, outcome.reply
    row = {
        "query": outcome.task.prompt.query[:CUT],
        "reasoning": draft.reasoning[:CUT] if draft else None,
        "answer": draft.answer[:CUT] if draft else None,
        "teacher": outcome.task.teacher.endpoint,
        "difficulty": outcome.task.difficulty,
        "rejected": outcome.reason,
    }
    if draft is None:
        row["reply"] = reply.text[:CUT] if isinstance(reply, ChatReply) else reply.message
    return row


def _bin(share: float) -> str:
    return f"{min(BINS - 1, int(share * BINS)) / BINS:.2f}"


def _power(text: str) -> str:
    return str(2 ** int(math.log2(max(1, len(text.split())))))
