"""Statistics of a distillation: counts, distributions, cost and samples, added up file by file.

They are saved with each output file, so that a resumed run includes the files it skips.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from nautile.common.errors import ConfigError
from nautile.common.events import Emit
from nautile.common.text import most_common_reasons
from nautile.configs.distill import DistillConfig
from nautile.data.distill.ask import UNASKED, PromptResult
from nautile.data.distill.teacher_prompt import template_for
from nautile.data.endpoints.chat_types import ChatFailure, ChatReply, reply_cost
from nautile.data.endpoints.own_server import stand_in_of
from nautile.data.endpoints.pool import EndpointPool
from nautile.data.screening.language import detect_language

SAMPLE_ROWS = 48  # results that become sample rows of the run
SAMPLES_KEPT = 6  # samples in the statistics, of accepted documents and of each reason for rejection
BINS = 20  # of the histograms of difficulty and probe disagreement
SAMPLE_CHARACTERS = 1200
FIRST_JUDGED = 200  # replies before `max_rejected_share` is first checked
ASK_AGAIN = "`nautile run CONFIG --only distill --force` asks again"
FALSE_ALARM = 1e-6  # probability per check of stopping although the true share of rejects is within the limit


@dataclass
class DistillStats:
    """Counts over the prompts of one output file, or of a run. Histograms: counts by the lower edge of a bin.

    The field names are those of the saved JSON.
    """

    prompts: int = 0
    difficulty: float = 0.0  # sum over the `judged` prompts
    uncounted: int = 0  # replies without token counts
    unprobed: int = 0  # prompts whose probes all failed
    reused: int = 0  # replies that another execution paid for
    unasked: int = 0  # prompts that were not sent to a teacher, because the budget was spent
    unneeded: int = 0  # prompts of a file that were not asked because enough documents were accepted; not in `prompts`
    unanswered: Counter[str] = field(default_factory=Counter)  # prompts without a reply for a temporary reason, by it
    rejected: Counter[str] = field(default_factory=Counter)  # by reason
    contaminated: Counter[str] = field(default_factory=Counter)  # by benchmark
    asked: Counter[str] = field(default_factory=Counter)  # prompts by teacher
    kept: Counter[str] = field(default_factory=Counter)  # accepted documents by teacher
    sets: Counter[str] = field(default_factory=Counter)  # prompts by set
    sets_kept: Counter[str] = field(default_factory=Counter)  # accepted documents by set
    kinds: Counter[str] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)  # of documents; "?": not recognised
    tokens_in: Counter[str] = field(default_factory=Counter)  # by the endpoint that answered
    tokens_out: Counter[str] = field(default_factory=Counter)
    tokens_reasoning: Counter[str] = field(default_factory=Counter)  # a part of `tokens_out`, where it is stated
    dollars: Counter[str] = field(default_factory=Counter)  # by purpose
    difficulties: Counter[str] = field(default_factory=Counter)
    probes: Counter[str] = field(default_factory=Counter)
    reasoning_words: Counter[str] = field(default_factory=Counter)  # of documents, in powers of two
    answer_words: Counter[str] = field(default_factory=Counter)
    hostile: Counter[str] = field(default_factory=Counter)  # prompts with "sign/where", see `injection_signs`
    hostile_kept: Counter[str] = field(default_factory=Counter)  # of them, those that became documents
    curve: list[list[float]] = field(default_factory=list)  # points [unix time, dollars since the previous point]
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # "kept", or the reason

    @property
    def accepted(self) -> int:
        return sum(self.kept.values())

    @property
    def judged(self) -> int:
        """Prompts that a teacher has answered or refused; each gave a document or was rejected."""
        return self.prompts - self.unasked - self.unanswered.total()

    @property
    def cost(self) -> float:
        """Dollars, including probes."""
        return sum(self.dollars.values())

    def add(self, result: PromptResult, pool: EndpointPool) -> None:
        task, teacher = result.task, result.task.teacher.endpoint
        self._add_cost(result, pool)
        if result.reason == UNASKED:
            self.add_unasked(Counter([task.prompt.set]))
            return
        if isinstance(result.reply, ChatFailure) and result.unanswered:
            self.prompts += 1
            self.sets[task.prompt.set] += 1
            self.unanswered[result.reply.reason] += 1
            return
        # The prompt: its teacher, set, kind and difficulty.
        self.prompts += 1
        self.asked[teacher] += 1
        self.sets[task.prompt.set] += 1
        self.kinds[task.prompt.kind] += 1
        self.difficulty += task.difficulty
        self.difficulties[_bin(task.difficulty)] += 1
        if task.probe is not None:
            self.probes[_bin(task.probe)] += 1
        # The outcome: the accepted document, or the reason for its rejection.
        if result.reason is None and result.document is not None:
            self.kept[teacher] += 1
            self.sets_kept[task.prompt.set] += 1
            self.reasoning_words[_power(result.document.reasoning)] += 1
            self.answer_words[_power(result.document.answer)] += 1
            self.languages[detect_language(f"{task.prompt.query}\n{result.document.answer}") or "?"] += 1
        else:
            self.rejected[result.reason or "unparsable"] += 1
        if result.reason == "contaminated":
            self.contaminated[result.evidence["benchmark"]] += 1
        for sign in result.signs:
            self.hostile[sign] += 1
            self.hostile_kept[sign] += result.reason is None
        group = self.samples.setdefault(result.reason or "kept", [])
        if len(group) < SAMPLES_KEPT:
            group.append(sample_of(result))

    def add_unasked(self, sets: Counter[str]) -> None:
        """Add prompts, counted by set, that were not sent because the budget was spent; they are not rejected."""
        self.prompts += sets.total()
        self.unasked += sets.total()
        self.sets += sets

    def merge(self, other: "DistillStats") -> None:
        for stat in fields(self):
            value, other_value = getattr(self, stat.name), getattr(other, stat.name)
            if stat.name == "samples":
                for reason, rows in other_value.items():
                    self.samples[reason] = (self.samples.get(reason, []) + rows)[:SAMPLES_KEPT]
            elif isinstance(value, Counter):
                value.update(other_value)
            else:
                setattr(self, stat.name, value + other_value)

    def to_json(self) -> dict[str, Any]:
        values = {stat.name: getattr(self, stat.name) for stat in fields(self)}
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in values.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "DistillStats":
        values = {stat.name: data[stat.name] for stat in fields(cls) if stat.name in data}
        for name, value in values.items():
            if isinstance(value, dict) and name != "samples":
                values[name] = Counter(value)
        return cls(**values)

    def _add_cost(self, result: PromptResult, pool: EndpointPool) -> None:
        """Add the tokens and dollars of all replies that were paid for on behalf of a prompt."""
        digests: set[str] = set()  # a probe's reply that became the document is paid for only once
        for paid in result.paid:
            reply = paid.reply
            if reply.digest in digests:
                continue
            digests.add(reply.digest)
            cost = reply_cost(pool.config(reply.endpoint), reply.tokens_in, reply.tokens_out)
            dollars = 0.0 if reply.reused else cost or 0.0
            self.dollars[paid.purpose] += dollars  # type: ignore[assignment]  # typeshed: a Counter counts in int only
            self.reused += reply.reused
            self.uncounted += reply.tokens_in is None or reply.tokens_out is None
            self.tokens_in[reply.endpoint] += reply.tokens_in or 0
            self.tokens_out[reply.endpoint] += reply.tokens_out or 0
            if reply.tokens_reasoning is not None:
                self.tokens_reasoning[reply.endpoint] += reply.tokens_reasoning


def distill_facts(stats: DistillStats, config: DistillConfig, pool: EndpointPool) -> dict[str, Any]:
    stand_ins = [
        stand_in_of(endpoint.kind, endpoint.model)
        for endpoint in map(pool.config, config.endpoints)
        if endpoint.stand_in
    ]
    teachers = {
        teacher.endpoint: {
            "model": pool.config(teacher.endpoint).model,
            "template": template_for(teacher, pool.config(teacher.endpoint)).name,
            "up_to": teacher.up_to,
            "asked": stats.asked[teacher.endpoint],
            "kept": stats.kept[teacher.endpoint],
            "tokens_in": stats.tokens_in[teacher.endpoint],
            "tokens_out": stats.tokens_out[teacher.endpoint],
            "tokens_reasoning": stats.tokens_reasoning.get(teacher.endpoint),
        }
        for teacher in config.teachers
    }
    return {
        "prompts": stats.prompts,
        "documents": stats.accepted,
        "unasked": stats.unasked,
        **({"wanted": config.accepted} if config.accepted else {}),
        "unanswered": dict(stats.unanswered.most_common()),
        "accepted_share": round(stats.accepted / stats.judged, 4) if stats.judged else None,
        "rejected": dict(stats.rejected.most_common()),
        "teachers": teachers,
        "dollars": round(stats.cost, 6),
        "dollars_unknown": round(pool.unknown, 6),
        "dollars_by_purpose": {name: round(cost, 6) for name, cost in sorted(stats.dollars.items())},
        "replies_reused": stats.reused,
        "replies_without_token_counts": stats.uncounted,
        "mean_difficulty": round(stats.difficulty / stats.judged, 4) if stats.judged else None,
        "prompts_without_probe": stats.unprobed if config.probe else None,
        "languages": dict(stats.languages.most_common()),
        "neighbours": config.neighbours,
        "budget_exhausted": stats.unasked > 0,
        "stand_in": "; ".join(dict.fromkeys(stand_ins)) or None,
    }


def check_running_reject_share(
    config: DistillConfig, judged_count: int, rejected_counts: Counter[str], dollars: float
) -> None:
    """Raise `ConfigError` if the rejects so far show that the run as a whole would exceed `max_rejected_share`.

    Called at every reply, so that only some hundreds of replies of a poor teacher are paid for.
    """
    limit, count = config.max_rejected_share, rejected_counts.total()
    if judged_count >= FIRST_JUDGED and chance_of_rejects(count, judged_count, limit) < FALSE_ALARM:
        raise ConfigError(
            f"distill.max_rejected_share is {limit:g}, but {count} of the first {judged_count} replies were rejected "
            f"({most_common_reasons(rejected_counts)}), so no more are asked for; ${dollars:.4f} are spent. "
            f"{_advice(rejected_counts)}Use another teacher or raise the limit: what is paid for is kept"
        )


def chance_of_rejects(rejected_count: int, judged_count: int, share: float) -> float:
    """Upper bound on the probability of this many rejects or more, if each reply is rejected with probability `share`.

    The Chernoff bound exp(-n KL(observed share || share)), which is tight enough at a few hundred replies.
    """
    observed = rejected_count / judged_count
    if observed <= share:
        return 1.0  # no more rejects than are allowed
    if share == 0:
        return 0.0  # none is allowed, and one was rejected
    divergence = observed * math.log(observed / share)
    if observed < 1:
        divergence += (1 - observed) * math.log((1 - observed) / (1 - share))
    return math.exp(-judged_count * divergence)


def check_final_reject_share(config: DistillConfig, stats: DistillStats, rejected: Path) -> None:
    """Raise `ConfigError` if no document was accepted, or if more were rejected than `max_rejected_share` allows.

    `rejected`: where the replies without a document are, for the message.
    """
    if not stats.judged and stats.unanswered:
        raise ConfigError(
            f"distill: {unanswered_message(stats)}. The endpoint answers other requests, so see {rejected}"
        )
    if not stats.judged:
        raise ConfigError(
            f"distill: the budget pays for none of {stats.prompts} prompts; raise distill.budget_dollars or "
            "budget_tokens, or those of the endpoint"
        )
    reasons = most_common_reasons(stats.rejected)
    if not stats.accepted:
        advice = _advice(stats.rejected)
        raise ConfigError(
            f"distill: none of {stats.judged} documents was accepted ({reasons}). {advice}All of them: see {rejected}"
        )
    share = (stats.judged - stats.accepted) / stats.judged  # 1 - 7 / 10 would be above 0.3
    if share > config.max_rejected_share:
        raise ConfigError(
            f"distill.max_rejected_share is {config.max_rejected_share:g}, but {share:.3f} of {stats.judged} "
            f"documents were rejected ({reasons}; see {rejected}). {_advice(stats.rejected)}Use another teacher or "
            "raise the limit"
        )


def _advice(rejected: Counter[str]) -> str:
    """What helps where the token limit has cut most of what was rejected; "" elsewhere."""
    thinking, in_reply = rejected["cut_while_thinking"], rejected["cut_in_reply"]
    if 2 * (thinking + in_reply) <= rejected.total():
        return ""
    effort = ' or set extra = { reasoning_effort = "low" } of the endpoint' if thinking else ""
    return f"The token limit cut most of them: raise distill.max_tokens{effort}. "


def unanswered_message(stats: DistillStats) -> str:
    count = stats.unanswered.total()
    return f"{count} of {stats.prompts} prompts got no reply ({most_common_reasons(stats.unanswered)}); {ASK_AGAIN}"


def emit_samples(results: list[PromptResult], first_index: int, emit: Emit) -> None:
    """Emit the first results of a run as sample rows; `first_index`: number of results before these."""
    for index, result in enumerate(results[: max(0, SAMPLE_ROWS - first_index)], first_index):
        emit("sample", index=index, set="documents", **sample_of(result))


def sample_of(result: PromptResult) -> dict[str, Any]:
    document, reply = result.document, result.reply
    row: dict[str, Any] = {
        "query": result.task.prompt.query[:SAMPLE_CHARACTERS],
        "reasoning": document.reasoning[:SAMPLE_CHARACTERS] if document else None,
        "answer": document.answer[:SAMPLE_CHARACTERS] if document else None,
        "teacher": result.task.teacher.endpoint,
        "difficulty": result.task.difficulty,
        "rejected": result.reason,
    }
    if result.evidence:
        row["evidence"] = result.evidence
    if document is None:
        row["reply"] = reply.text[:SAMPLE_CHARACTERS] if isinstance(reply, ChatReply) else reply.message
    return row


def _bin(share: float) -> str:
    """The histogram bin of a number from 0 to 1, by its lower edge."""
    return f"{min(BINS - 1, int(share * BINS)) / BINS:.2f}"


def _power(text: str) -> str:
    """The histogram bin of a text's number of words: the largest power of two up to it."""
    return str(2 ** int(math.log2(max(1, len(text.split())))))
