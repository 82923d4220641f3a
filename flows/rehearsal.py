"""`nautile rehearse`: a small run derived from a real configuration, which reaches everything that the real one needs.

Each stage says how it is made small (`Stage.rehearsal`); revisions, tokenizer, teachers, precision and schedules stay.
First all that is free: the Hub and the endpoints are asked (`flows.readiness`), the first rows of everything are read
by the real readers, and the stages run that pay nobody. Only if that shows no fault are paid endpoints asked, within
one limit for all of them. Nothing of it is in the store of real runs: it has one of its own (`Layout.rehearsal_store`).
"""

import asyncio
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from nautile.common.errors import ConfigError, Retryable
from nautile.common.files import read_json, write_json, writing
from nautile.common.text import visible
from nautile.configs.base import Section, fingerprint
from nautile.configs.distill import DistillConfig, EmbeddingConfig, PromptSetConfig
from nautile.configs.endpoint import EndpointConfig, with_fallbacks
from nautile.configs.evaluation import BenchmarkChoice, EvaluateConfig
from nautile.configs.ingest import IngestPart
from nautile.configs.readers import READERS
from nautile.configs.schema import DISTILLED, RunConfig
from nautile.configs.training import ProblemsConfig
from nautile.data.distill.prompts import Prompt, read_prompt_set
from nautile.data.endpoints.chat_types import CallError, ChatRequest, max_usage, reply_cost
from nautile.data.endpoints.completions import RawReply
from nautile.data.endpoints.endpoint import client_for
from nautile.data.endpoints.rate_limit import RateLimiter
from nautile.data.sources.corpus_source import list_files, read_file
from nautile.data.sources.hub import FIRST_ROWS
from nautile.evals.benchmarks.loading import items_for
from nautile.flows.dag import Step, build_dag, steps_of
from nautile.flows.device_plan import assumed_mfu
from nautile.flows.forecast import asks_paid_endpoints, forecast_calls
from nautile.flows.readiness import Answers, Reached, ask_online, price_differences, remote_endpoints
from nautile.model.capacity.flops import estimate_training
from nautile.model.capacity.topology import parse_topology
from nautile.rl.problems import TRAINING_SETS, load
from nautile.store.artifacts import Store
from nautile.store.catalog import Catalog
from nautile.store.manifest import now
from nautile.tasks.engine.attempt import run_stage
from nautile.tasks.engine.errors import StageCrash, advice, reason
from nautile.tasks.engine.stage import RunContext
from nautile.tasks.ingest import REHEARSED_ROWS

DEFAULT_LIMIT = 1.0  # dollars
OTHER_LANGUAGES = 0.05  # a larger share of the rows in other languages than most of them is named
LONG_HOURS = 24.0
# Which values of these sections a run has says nothing about whether another one would work.
_NOT_REHEARSED = {"name", "seed", "seeds", "operation", "schedule", "retention", "telemetry", "resources", "deploy"}
_SPENT = """
SELECT coalesce(sum(dollars), 0) + coalesce(sum(CAST(fields->>'unknown_dollars' AS DOUBLE)), 0) AS dollars
FROM calls WHERE NOT cached
"""

Show = Callable[[str], object]


@dataclass
class StageOutcome:
    """How a step of the rehearsal ended. `made_small`: whether its stage declares how."""

    label: str
    made_small: bool
    outcome: Literal["done", "failed", "skipped", "not reached"]
    seconds: float | None = None
    dollars: float | None = None  # None: it asks no paid endpoint
    error: str | None = None
    remedy: str | None = None
    crashed: bool = False


@dataclass
class WholeRun:
    """What a step of the whole run asks of an endpoint. `hours`: at the requests a minute that a live one allows.

    `dollars`: (low, expected, high), by the lengths of `measured` replies. With none of them by those that `like` wrote
    for the same step, and if that is empty, by the longest that are allowed.
    """

    label: str
    purpose: str
    endpoint: str
    model: str
    requests: int
    requests_per_minute: float | None  # by its headers or settings
    hours: float | None
    dollars: tuple[float, float, float]
    measured: int
    like: str = ""


@dataclass
class Rehearsal:
    """What was reached, how each stage ended, and what the whole run would need."""

    config: str
    limit_dollars: float
    dollars: float = 0.0
    seconds: float = 0.0
    reached: list[Reached] = field(default_factory=list)
    stages: list[StageOutcome] = field(default_factory=list)
    whole_run: list[WholeRun] = field(default_factory=list)
    pretrain_days: float | None = None
    notes: list[str] = field(default_factory=list)  # what works, and is worth knowing
    faults: list[str] = field(default_factory=list)
    skipped: str = ""  # why nothing was paid

    @property
    def complete(self) -> bool:
        """Whether everything was reached."""
        return not self.faults and all(stage.outcome == "done" for stage in self.stages)


def rehearsed(config: RunConfig, *, full_model: bool = False) -> RunConfig:
    """The small run of a configuration: the parts that its stages make small, on this machine, without gates."""
    settings = config.model_dump(mode="json")
    for stage in dict.fromkeys(step.stage for step in steps_of(config)):
        if stage.rehearsal is not None:
            settings |= stage.rehearsal(settings)
    if full_model:
        settings["model"] = config.model.model_dump(mode="json")
    # A batch job may take a day. That its interface answers is asked for free.
    endpoints = {name: {**fields, "mode": "live"} for name, fields in settings["endpoints"].items()}
    launch = config.launch
    settings |= {
        "endpoints": endpoints,
        "launch": {"workers": launch.workers, "niceness": launch.niceness, "topology": launch.topology},
        "operation": {},
        "telemetry": {},
    }
    return RunConfig.model_validate(settings)


def without_paid(config: RunConfig) -> RunConfig:
    """What of a small run asks no paid endpoint. A phase that is left without a source reads the first one."""
    settings = config.model_dump(mode="json")
    paid = {name for name, endpoint in config.endpoints.items() if endpoint.has_price}
    paid |= {name for name in config.endpoints if paid & set(with_fallbacks([name], config.endpoints))}
    evaluated = [model for model in settings["evaluate"]["models"] if model["endpoint"] not in paid]
    settings["evaluate"]["models"] = evaluated
    embeds = config.index is not None and config.index.embedding.dollars_per_million > 0
    if config.distill is not None and (embeds or paid & set(config.distill.endpoints)):
        settings["distill"] = None
        settings["index"] = None if embeds else settings["index"]
        for phase in settings["pretrain"]["phases"]:
            left = {name: weight for name, weight in phase["mixture"].items() if name != DISTILLED}
            phase["mixture"] = left or {config.ingest.sources[0].name: 1.0}
    if config.align is not None and paid & set(config.align.judge.endpoints):
        settings["align"] = None
        for name in ("reason", "self_distill"):
            if settings[name] and settings[name]["start"] == "align":
                settings[name]["start"] = None
    return RunConfig.model_validate(settings)


def digest_of(config: RunConfig) -> str:
    """The digest of what a rehearsal of `config` is about: equal for two runs that differ in a seed alone."""
    dump = config.model_dump(mode="json")
    return fingerprint({name: value for name, value in dump.items() if name not in _NOT_REHEARSED})


def not_rehearsed(store: Store, config: RunConfig, to_make: Sequence[Step], words: str) -> str:
    """A line if steps that pay or take over a day were never rehearsed whole; else empty."""
    paid = any(map(pays, to_make))
    days = _pretrain_days(config) if any(step.label == "pretrain" for step in to_make) else None
    if not paid and (days is None or days * 24 <= LONG_HOURS):
        return ""
    record = read_json(store.rehearsal(digest_of(config)))
    if record and record.get("complete"):
        return ""
    what = "pays endpoints" if paid else f"is planned for {days:.0f} days"
    never = "its last rehearsal did not reach everything" if record else "was never rehearsed"
    return f"this run {what}, and {never}: `nautile rehearse {words}` tries all of it in minutes, small"


def rehearse(
    config: RunConfig,
    words: str,
    store: Store,
    limit: float,
    agree: Callable[[str], str],
    show: Show,
    *,
    full_model: bool,
) -> Rehearsal:
    """Rehearse `config` for at most `limit` dollars, 0: for nothing. `agree`, asked before paying: why not, or "".

    Raises `ConfigError` for a configuration that cannot work whatever answers.
    """
    begun = time.monotonic()
    real = steps_of(config)
    for step in real:
        if isinstance(part := getattr(config, step.stage.name, None), Section):
            step.stage.check(part)
    small = rehearsed(config, full_model=full_model)
    dag = build_dag(small)
    home = Store(store.rehearsal_store)
    home.prepare()
    result = Rehearsal(config.name, limit)
    with _first_rows_alone():
        answers = ask_online(real, show)
        _look(dag, answers, show)
        result.reached, result.faults = answers.reached, [*answers.refused, *answers.silent]
        run = _Run(home, small, show)
        run.make([step for step in dag if not _needs_paid(step, dag)])
        result.faults += run.faults(result.faults)
        result.notes = [*_languages(answers, real), *_quotas(real, home, answers), *price_differences(real)]
        result.notes += answers.unclear
        for line in [*result.faults, *result.notes]:
            show(line)
        if any(map(pays, dag)):
            result.skipped = _why_not_paid(dag, home, result, agree)
        endpoints = {label: e for label, e in remote_endpoints(real).items() if label != "index.embedding"}
        if result.skipped:
            endpoints = {label: e for label, e in endpoints.items() if not e.has_price}
        run.left = limit
        asyncio.run(_ask_each(endpoints, answers, run))
        answered = [*answers.refused, *answers.silent]
        if not result.skipped and any(line not in result.faults for line in answered):
            result.skipped = "an endpoint refused its first request"
        result.faults = list(dict.fromkeys([*result.faults, *answered]))
        run.make(build_dag(without_paid(small)) if result.skipped else dag)
    result.stages = [run.outcome_of(step, result.skipped) for step in dag]
    result.faults = list(dict.fromkeys([*result.faults, *run.faults(result.faults)]))
    result.dollars = run.spent
    result.whole_run = list(_whole_run(real, dag, home, answers))
    result.pretrain_days = _pretrain_days(config)
    result.notes += [line for line in _quotas(real, home, answers) if line not in result.notes]
    result.notes += _other_models(answers, endpoints)
    result.seconds = time.monotonic() - begun
    store.prepare()
    with writing(store.root):
        write_json(store.rehearsal(digest_of(config)), {"complete": result.complete, "time": now(), "config": words})
    return result


def _why_not_paid(dag: Sequence[Step], home: Store, result: Rehearsal, agree: Callable[[str], str]) -> str:
    if result.faults:
        return "a fault was found before anything was paid"
    if not result.limit_dollars:
        return "--spend 0"
    low, high = (sum(row.dollars[index] for row in forecast_calls(dag, home)) for index in (0, 2))
    return agree(f"the rehearsal pays endpoints ${low:,.3f} to ${high:,.3f}, and at most ${result.limit_dollars:,.2f}")


@contextmanager
def _first_rows_alone() -> Iterator[None]:
    """Fetch only the first rows of files of the Hub while the block runs, here and in the stages' processes."""
    before = os.environ.get(FIRST_ROWS)
    os.environ[FIRST_ROWS] = str(REHEARSED_ROWS)
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")  # read when `datasets` is imported
    try:
        yield
    finally:
        del os.environ[FIRST_ROWS]
        os.environ |= {FIRST_ROWS: before} if before is not None else {}


def _embedding(step: Step) -> EmbeddingConfig:
    return EmbeddingConfig.model_validate((step.section.get("index") or {}).get("embedding", {}))


def pays(step: Step) -> bool:
    """Whether the step asks an endpoint that has a price, of chats or of embeddings."""
    return asks_paid_endpoints(step) or _embedding(step).dollars_per_million > 0


def _needs_paid(step: Step, dag: Sequence[Step]) -> bool:
    """Whether the step, or one that it depends on, pays."""
    steps = {other.label: other for other in dag}
    return pays(step) or any(_needs_paid(steps[need.producer], dag) for need in step.needs.values())


# Reading the first rows of everything, by the readers of the stages


def _look(dag: Sequence[Step], answers: Answers, show: Show) -> None:
    """Read a little of what the steps will read: what is found out here is not paid for."""
    known = {reached.label for reached in answers.reached if reached.fault}
    held_out = [
        choice for step in dag if step.stage.name == "held_out" for choice in step.section["held_out"]["benchmarks"]
    ]
    whole = {(choice["name"], choice["revision"], choice["path"]) for choice in held_out}  # read by a stage of its own
    for step in dag:
        for label, read in _readings(step, answers, whole):
            if label in known:
                continue
            known.add(label)
            show(f"reading the first rows of {label}")
            try:
                with tempfile.TemporaryDirectory(prefix="nautile-rehearsal-") as folder:
                    read(Path(folder))
            except (ConfigError, Retryable) as error:
                reached = next((r for r in answers.reached if r.label == label), None) or Reached(label, "")
                if reached not in answers.reached:
                    answers.reached.append(reached)
                answers.refuse(reached, error)


def _readings(
    step: Step, answers: Answers, held_out: set[tuple[str, str, str]]
) -> Iterator[tuple[str, Callable[[Path], object]]]:
    """What a step reads from outside: its label, and a function that reads a little of it, with a folder to work in."""
    section, name = step.section, step.stage.name
    if name == "ingest":
        source = IngestPart.model_validate(section["ingest"]).source
        label = f"ingest.sources {source.name!r}"
        if READERS[source.reader].needs_path:

            def count(folder: Path) -> None:
                # With exemplars every column is read, and without its filter rows of every language.
                whole = source.model_copy(update={"exemplars": 1, "languages": (), "minimum_score": None})
                batches = read_file(whole, list_files(whole, folder / "list")[0], folder / "file")
                languages = Counter(batch.record(i).language for batch in batches for i in range(len(batch)))
                reached = next((r for r in answers.reached if r.label == label), None)
                if reached is None:
                    answers.reached.append(reached := Reached(label, source.path))
                known = {code: n for code, n in languages.most_common() if code}
                total = sum(languages.values())
                reached.languages = {code: n / total for code, n in known.items()} or None

            yield label, count
    if name == "distill":
        config = DistillConfig.model_validate(section["distill"])
        for prompts in config.prompt_sets:
            yield f"distill.prompt_sets {prompts.name!r}", partial(_read_prompts, prompts, config.seed)
    if name == "evaluate":
        for choice in EvaluateConfig.model_validate(section["evaluate"]).benchmarks:
            if (choice.name, choice.revision, choice.path) not in held_out:
                yield f"evaluate.benchmarks {choice.name!r}", partial(_read_items, choice)
    for part in ("problems", "answered"):
        if fields := (section.get(name) or {}).get(part):
            problems = ProblemsConfig.model_validate(fields)
            if any(s.source in TRAINING_SETS or s.prompt_set for s in problems.sources or (problems,)):
                yield f"{name}.{part}", partial(_read_problems, problems, name == "align")


def _read_prompts(prompts: PromptSetConfig, seed: int, folder: Path) -> None:
    found = (row for row in read_prompt_set(prompts, seed, folder) if isinstance(row, Prompt))
    list(islice(found, prompts.count))


def _read_items(choice: BenchmarkChoice, _: Path) -> None:
    items_for(choice, 0, {})


def _read_problems(problems: ProblemsConfig, may_lack_answers: bool, _: Path) -> None:
    load(problems, 0, unanswered="keep" if may_lack_answers else "refuse", or_fewer=True)


def _languages(answers: Answers, steps: Iterable[Step]) -> Iterator[str]:
    """A line for each source without `languages` whose first rows are not all in one."""
    chosen = {
        f"ingest.sources {step.section['ingest']['source']['name']!r}": step.section["ingest"]["source"]["languages"]
        for step in steps
        if step.stage.name == "ingest"
    }
    for reached in answers.reached:
        shares = list((reached.languages or {}).items())
        others = sum(share for _, share in shares[1:])
        if shares and others > OTHER_LANGUAGES and not chosen.get(reached.label):
            listed = ", ".join(f"{share:.0%} {code}" for code, share in shares[:6])
            yield (
                f"{reached.label}: {others:.0%} of the rows read are in other languages ({listed}), and `languages` "
                f'is not set: `languages = ["{shares[0][0]}"]` in its section drops them'
            )


# Endpoints


async def _ask_each(endpoints: Mapping[str, EndpointConfig], answers: Answers, run: "_Run") -> None:
    """Ask every endpoint that has no fault for one short reply: what it serves, and what its headers allow."""
    reached = {r.label: r for r in answers.reached}
    for label, config in endpoints.items():
        request = ChatRequest(label, ({"role": "user", "content": "Answer with one word: are you there?"},), 16)
        cost = max_usage(config, request).dollars
        if reached[label].fault or (cost and cost > run.left):
            continue
        run.show(f"asking {label} for a reply")
        limiter = RateLimiter()
        client = client_for(config, limiter.on_headers)
        try:
            reply: RawReply | None = await client.complete(request)
        except CallError as error:
            reply = None
            # Its 16 tokens are few for one that thinks first; whether it answers, the stages show.
            if error.reason not in ("rate_limited", "invalid_reply"):
                answers.refuse(reached[label], (Retryable if error.retryable else ConfigError)(error.message))
        finally:
            await client.close()
        paid = reply_cost(config, reply.tokens_in, reply.tokens_out) if reply else None
        run.pay(cost if paid is None else paid)
        if reply is not None:
            reached[label].serves = reply.model
        reached[label].requests_per_minute = limiter.stated_per_minute or reached[label].requests_per_minute


def _other_models(answers: Answers, endpoints: Mapping[str, EndpointConfig]) -> Iterator[str]:
    """A line for each endpoint whose reply names another model; vendors add a date to a name, gateways the vendor's."""
    for reached in answers.reached:
        if reached.serves and (config := endpoints.get(reached.label)):
            served, configured = reached.serves.lower(), config.model.lower()
            if served not in configured and configured not in served:
                yield f"{reached.label}: replies are of {reached.serves!r}, and {config.model!r} is configured"


def _whole_run(real: Sequence[Step], dag: Sequence[Step], home: Store, answers: Answers) -> Iterator[WholeRun]:
    """What the whole run asks of each endpoint, by the replies and headers of the rehearsal."""
    allowed = {r.label.removeprefix("endpoints."): r.requests_per_minute for r in answers.reached}
    longest = {
        (step.label, calls.endpoint, calls.purpose): calls.tokens[0] for step in dag for calls in _calls_of(step)
    }
    longer = {
        # What the small run asked about was shorter, such as completions: their tokens are added to the prompts.
        (step.label, calls.endpoint, calls.purpose): calls.tokens[0]
        - longest.get((step.label, calls.endpoint, calls.purpose), calls.tokens[0])
        for step in real
        for calls in _calls_of(step)
    }
    forecasts = forecast_calls(real, home)
    for forecast in forecasts:
        section = next(step.section for step in real if step.label == forecast.label)
        config = EndpointConfig.model_validate(section["endpoints"][forecast.endpoint])
        more = longer[forecast.label, forecast.endpoint, forecast.purpose] if forecast.measured else 0
        added = reply_cost(config, forecast.requests * max(0, more), 0) or 0.0
        rates = [rate for rate in (allowed.get(forecast.endpoint), config.requests_per_minute) if rate]
        low, expected, high = (dollars + added for dollars in forecast.dollars)
        others = [o for o in forecasts if (o.label, o.purpose) == (forecast.label, forecast.purpose) and o.measured]
        like = others[0] if others and not forecast.measured and config.has_price else None
        if like is not None:  # a teacher of difficult prompts, of which the few had none
            share = forecast.requests / max(1, like.requests)
            expected = reply_cost(config, round(share * like.tokens_in), round(share * like.tokens_out)) or 0.0
            low, high = (expected * bound / (like.dollars[1] or 1.0) for bound in (like.dollars[0], like.dollars[2]))
        yield WholeRun(
            forecast.label,
            forecast.purpose,
            forecast.endpoint,
            config.model,
            forecast.requests,
            min(rates, default=None),
            forecast.requests / min(rates) / 60 if rates and config.mode == "live" else None,
            (low, expected, high),
            forecast.measured,
            like.endpoint if like else "",
        )


def _calls_of(step: Step) -> list[Any]:
    endpoints = {name: EndpointConfig.model_validate(e) for name, e in step.section.get("endpoints", {}).items()}
    return list(step.stage.calls(step.section, endpoints)) if endpoints else []


def _quotas(real: Sequence[Step], home: Store, answers: Answers) -> Iterator[str]:
    """A line for each step that would ask an endpoint for over a day."""
    for row in _whole_run(real, (), home, answers):
        if row.hours is not None and row.hours > LONG_HOURS:
            yield (
                f"{row.label}: {row.requests:,} requests ({row.purpose}) to {row.endpoint} take {row.hours:,.0f} h at "
                f'{row.requests_per_minute:,.0f} a minute: a higher limit, `mode = "batch"` or fewer of them would help'
            )


def _pretrain_days(config: RunConfig) -> float | None:
    """Days of pretraining by arithmetic on the chips of `launch.topology`; None for this machine's own devices."""
    if config.launch.topology == "local":
        return None
    try:
        chips, mfu = parse_topology(config.launch.topology), assumed_mfu(config, config.launch.topology)
        return estimate_training(config.pretrain, config.model, config.ingest.row_length, chips, mfu).days
    except ConfigError:
        return None


# Running the steps


class _Run:
    """Makes steps one after the other, each once, and keeps how they ended. `left`: dollars of the limit."""

    def __init__(self, home: Store, config: RunConfig, show: Show) -> None:
        self.home, self.config, self.show = home, config, show
        self.left = self.spent = 0.0
        self._id = f"rehearsal-{time.time_ns():x}"
        self._made: set[str] = set()  # keys
        self._outcomes: dict[str, StageOutcome] = {}

    def make(self, steps: Sequence[Step]) -> None:
        """Make the steps that are not made yet. One that fails stops only those that need it."""
        keys = {step.label: step.key for step in steps}
        for step in steps:
            before = self._outcomes.get(step.label)
            if step.key in self._made or (before is not None and before.error):
                continue
            missing = [need.producer for need in step.needs.values() if keys[need.producer] not in self._made]
            if missing:
                note = f"needs {', '.join(dict.fromkeys(missing))}"
                self._outcomes[step.label] = self._outcome(step, "not reached", remedy=note)
            else:
                self._outcomes[step.label] = self._make(step)

    def outcome_of(self, step: Step, skipped: str) -> StageOutcome:
        """How a step ended; one that was not tried pays, or needs one that does."""
        return self._outcomes.get(step.label) or self._outcome(step, "skipped", remedy=skipped)

    def faults(self, known: Sequence[str]) -> list[str]:
        """A line for each step that has failed, other than for what is known already."""
        reasons = [why for line in known if (why := line.partition(": ")[2])]
        failed = {o.label: o.error or "" for o in self._outcomes.values() if o.outcome == "failed"}
        return [f"{label}: {error}" for label, error in failed.items() if not any(why in error for why in reasons)]

    def pay(self, dollars: float) -> None:
        self.spent += dollars
        self.left -= dollars

    def _make(self, step: Step) -> StageOutcome:
        began, paid_before, is_paid = time.monotonic(), self._ledger(), pays(step)
        # The ledger has no prices of embeddings, so that all that they may cost counts.
        embedded = self._most_for_embeddings(step)
        if is_paid and self.left - embedded <= 0:
            return self._outcome(step, "skipped", remedy="the limit is spent: raise --spend")
        section = _limited(step, self.left - embedded) if is_paid else step.section
        context = RunContext(
            self._id, str(self.home.root), label=step.label, config=self.config.name, launch=self.config.launch
        )
        error: Exception | None = None
        try:
            run_stage(step.stage, section, step.inputs, context)
            self._made.add(step.key)
        except (ConfigError, Retryable, StageCrash) as failure:
            error = failure
        dollars = self._ledger() - paid_before + embedded if is_paid else None
        self.pay(dollars or 0.0)
        outcome = self._outcome(step, "failed" if error else "done", seconds=time.monotonic() - began, dollars=dollars)
        if error is not None:
            outcome.error, outcome.remedy = visible(reason(error)).partition("\n")[0], advice(error)
            outcome.crashed = isinstance(error, StageCrash)
            if isinstance(error, StageCrash) and error.log:
                outcome.remedy = f"its log is {error.log}"
        self.show(f"{step.label}: {outcome.error or f'{outcome.outcome} in {outcome.seconds:.0f} s'}")
        return outcome

    def _outcome(self, step: Step, outcome: Any, **more: Any) -> StageOutcome:
        return StageOutcome(step.label, step.stage.rehearsal is not None, outcome, **more)

    def _ledger(self) -> float:
        """The dollars of all attempts so far, with what those without a reply may have cost."""
        catalog = Catalog(self.home)
        catalog.ingest()
        (row,) = catalog.query(_SPENT)
        return float(row["dollars"])

    def _most_for_embeddings(self, step: Step) -> float:
        embedding = _embedding(step)
        if not embedding.dollars_per_million or step.stage.name not in ("index", "distill"):
            return 0.0
        prompts = (step.section.get("distill") or {}).get("prompts", 0)
        texts = 2 * prompts or max(source.exemplars for source in self.config.ingest.sources)
        return texts * embedding.longest / 3 * embedding.dollars_per_million / 1e6


def _limited(step: Step, dollars: float) -> dict[str, Any]:
    """The step's section with budgets that add up to `dollars`; a lower one of its own stays."""
    section = deepcopy(step.section)
    part = section[step.stage.name]
    paid = [e for e in section.get("endpoints", {}).values() if EndpointConfig.model_validate(e).has_price]
    bounded = [part] if "budget_dollars" in part else paid
    for fields in bounded:
        own = fields["budget_dollars"]
        fields["budget_dollars"] = min(dollars / len(bounded), own or dollars)
    return section


def as_json(result: Rehearsal) -> dict[str, Any]:
    """What `--json` prints."""
    return {**asdict(result), "complete": result.complete}
