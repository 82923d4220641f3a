"""Cost forecast for calls to paid endpoints, before a run starts: requests, tokens and dollars per endpoint.

Token counts are averages of earlier calls of the same model and purpose in this store, or, without such calls, the
maximum that the configuration allows. Stored replies cost nothing, but are not subtracted here.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nautile.common.errors import ConfigError
from nautile.configs.distill import DistillConfig
from nautile.configs.endpoint import EndpointConfig
from nautile.configs.evaluation import EvaluateConfig
from nautile.configs.training import AlignConfig
from nautile.data.distill.teacher_prompt import TEMPLATES, template_for
from nautile.data.endpoints.chat_types import reply_cost
from nautile.evals.benchmarks.catalogue import BENCHMARKS, COMPOSITES
from nautile.flows.dag import Step
from nautile.rl.calibration import KINDS
from nautile.store.artifacts import Store
from nautile.store.catalog import Catalog, CatalogBusy

CHARACTERS_PER_TOKEN = 4  # a usual average for English; only where nothing was measured
RUBRIC_TOKENS = 600  # an estimate of the judge's instructions around what it marks
LONGEST_QUERY = 1500  # assumed tokens of a prompt and its passage, without measured calls
_MEASURED = """
SELECT model, purpose, count(*) AS calls, avg(tokens_in) AS tokens_in, avg(tokens_out) AS tokens_out,
    quantile_cont(tokens_out, 0.1) AS low_out, quantile_cont(tokens_out, 0.9) AS high_out,
    quantile_cont(tokens_in, 0.1) AS low_in, quantile_cont(tokens_in, 0.9) AS high_in
FROM calls WHERE status = 'ok' AND NOT cached AND tokens_in IS NOT NULL AND tokens_out IS NOT NULL GROUP BY ALL
"""


@dataclass(frozen=True)
class _Calls:
    """Requests of a step to an endpoint: expected number, maximum, and the maximum (tokens in, tokens out) of one."""

    purpose: str
    endpoint: str
    expected: float
    most: int
    tokens: tuple[int, int]


@dataclass(frozen=True)
class CallForecast:
    """The calls of a step to an endpoint.

    `dollars`: (low, expected, high), at the 10 % quantile, the mean and the 90 % quantile of the measured lengths.
    Without measured replies (`measured` 0) all three use the maximum lengths that the configuration allows.
    """

    label: str
    endpoint: str
    model: str
    purpose: str
    requests: int
    tokens_in: int
    tokens_out: int
    dollars: tuple[float, float, float]
    measured: int
    budget_dollars: float  # of the step; 0: no budget


def forecast_calls(steps: Iterable[Step], store: Store) -> list[CallForecast]:
    """Forecast the calls of every step that uses endpoints."""
    measured = _measured_lengths(store)
    forecasts = []
    for step in steps:
        endpoints = {
            n: EndpointConfig.model_validate(fields) for n, fields in step.section.get("endpoints", {}).items()
        }
        for calls in _calls_of(step, endpoints) if endpoints else ():
            config = endpoints[calls.endpoint]
            row = measured.get((config.model, calls.purpose))
            lengths = [calls.tokens] * 3  # (tokens in, tokens out) of a request: low, expected, high
            if row is not None:
                lengths = [
                    (row["low_in"], row["low_out"]),
                    (row["tokens_in"], row["tokens_out"]),
                    (row["high_in"], row["high_out"]),
                ]
            # The upper end also takes the highest number of requests: refilled rollout groups ask the judge again.
            requests = (calls.expected, calls.expected, calls.most)
            dollars = [
                reply_cost(config, round(count * tokens_in), round(count * tokens_out)) or 0.0
                for count, (tokens_in, tokens_out) in zip(requests, lengths, strict=True)
            ]
            tokens_in, tokens_out = (round(calls.expected * tokens) for tokens in lengths[1])
            forecasts.append(
                CallForecast(
                    label=step.label,
                    endpoint=calls.endpoint,
                    model=config.model,
                    purpose=calls.purpose,
                    requests=round(calls.expected),
                    tokens_in=tokens_in,
                    tokens_out=tokens_out,
                    dollars=(dollars[0], dollars[1], dollars[2]),
                    measured=row["calls"] if row else 0,
                    budget_dollars=(step.section.get(step.stage.name) or {}).get("budget_dollars", 0.0),
                )
            )
    return forecasts


def asks_paid_endpoints(step: Step) -> bool:
    """Whether the step has an endpoint with a price."""
    endpoints = step.section.get("endpoints", {}).values()
    return any(fields["dollars_per_million_in"] or fields["dollars_per_million_out"] for fields in endpoints)


def forecast_lines(forecasts: Sequence[CallForecast]) -> list[str]:
    """A line for each endpoint that costs money, and the total; empty if none does."""
    paid = [forecast for forecast in forecasts if forecast.dollars[2] > 0]
    if not paid:
        return []
    lines = ["expected calls to paid endpoints (replies that are in the store already cost nothing):"]
    for row in paid:
        budget = f"; the step's budget is ${row.budget_dollars:,.2f}" if row.budget_dollars else ""
        lines.append(
            f"  {row.label}, {row.endpoint} ({row.purpose}): {row.requests:,} requests, {row.tokens_in:,} tokens in, "
            f"{row.tokens_out:,} out: {_cost([row])}{budget}"
        )
    return [*lines, f"  in all {_cost(paid)}"]


def forecast_text(forecasts: Sequence[CallForecast]) -> str:
    """The expected dollars of a step and their basis in a few words; "" if it pays nobody."""
    paid = [forecast for forecast in forecasts if forecast.dollars[2] > 0]
    return _cost(paid) if paid else ""


def _cost(paid: Sequence[CallForecast]) -> str:
    """The dollars of calls in one sentence, with what the figure rests on.

    Without measured replies it is a range from the expected to the highest number of requests, of replies that are all
    as long as they may be; with some, an expected sum and its spread.
    """
    low, expected, high = (sum(row.dollars[index] for row in paid) for index in range(3))
    measured = sum(row.measured for row in paid)
    if not measured:
        spread = f"${low:,.2f}" + ("" if low == high else f" to ${high:,.2f}")
        return f"{spread} if every reply is as long as it may be; none is measured yet"
    spread = f"${expected:,.2f}" + ("" if low == expected == high else f" (${low:,.2f} to ${high:,.2f})")
    longest = "" if all(row.measured for row in paid) else ", others as long as they may be"
    return f"{spread} by {measured:,} measured replies{longest}"


def _calls_of(step: Step, endpoints: dict[str, EndpointConfig]) -> Iterator[_Calls]:
    """The requests of a step, from its section. Only distill, align and evaluations of endpoints have any."""
    section: dict[str, Any] = step.section
    if step.stage.name == "distill":
        yield from _distill_calls(DistillConfig.model_validate(section["distill"]), endpoints)
    elif step.stage.name == "align":
        align = AlignConfig.model_validate(section["align"])
        rollout, judge = align.rollout, align.judge
        rollouts = align.policy.steps * rollout.prompts * rollout.group
        # Calibration items are balanced over the kinds of flaw, hostile items come in pairs.
        calibration = judge.calibration_items // len(KINDS) * len(KINDS)
        calibration += judge.hostile_items // 2 * 2 if calibration else 0
        tokens = (RUBRIC_TOKENS + rollout.prompt_length + rollout.max_tokens, judge.max_tokens)
        # Every group may be refilled as often as the configuration allows, if all of its answers get equal marks.
        most = rollouts * (1 + align.policy.refill) + calibration
        yield _Calls("judge", judge.endpoint, rollouts + calibration, most, tokens)
    elif step.stage.name == "evaluate" and "model_under_test" in section:
        evaluate = EvaluateConfig.model_validate(section["evaluate"])
        count = evaluate.held_out.count if evaluate.held_out else 0
        for benchmark in evaluate.benchmarks:
            parts = COMPOSITES.get(benchmark.name, (benchmark.name,))
            sizes = [BENCHMARKS[part].size if part in BENCHMARKS else 0 for part in parts]
            count += benchmark.items or sum(sizes)
        tokens = (evaluate.prompt_length, evaluate.max_tokens)
        yield _Calls("evaluate", section["model_under_test"]["endpoint"], count, count, tokens)


def _distill_calls(config: DistillConfig, endpoints: dict[str, EndpointConfig]) -> Iterator[_Calls]:
    """The requests of a distillation to its teachers and its difficulty probe.

    A teacher gets the prompts between the previous teacher's threshold of difficulty and its own; difficulty is assumed
    to be uniform in 0..1. With `accepted`, at least so many prompts are asked and at most all.
    """
    least = config.accepted or config.prompts

    def longest(name: str) -> tuple[int, int]:
        teacher = next((teacher for teacher in config.teachers if teacher.endpoint == name), config.teachers[0])
        template = template_for(teacher, endpoints[name])
        exemplar_characters = config.neighbours * sum(TEMPLATES[template.name].exemplar)
        return exemplar_characters // CHARACTERS_PER_TOKEN + LONGEST_QUERY, config.max_tokens

    below = 0.0
    for teacher in config.teachers:
        share, below = max(0.0, teacher.up_to - below), max(below, teacher.up_to)
        most = round(config.prompts * share)
        yield _Calls("teacher", teacher.endpoint, least * share, most, longest(teacher.endpoint))
    for name in config.probe.endpoints if config.probe else ():
        assert config.probe is not None
        samples = config.probe.samples
        yield _Calls("probe", name, least * samples, config.prompts * samples, longest(name))


def _measured_lengths(store: Store) -> dict[tuple[str, str], dict[str, Any]]:
    """(model, purpose) -> token counts of earlier replies; empty while another process writes the catalog."""
    try:
        catalog = Catalog(store)
        catalog.ingest(patience=1.0)
        return {(row["model"], row["purpose"]): row for row in catalog.query(_MEASURED, patience=1.0)}
    except (CatalogBusy, ConfigError):
        return {}
