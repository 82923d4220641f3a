"""`nautile plan --device`: memory, hours and dollars of every stage on a named chip, by formula and without a compiler.

What is not known is said to be: a stage without a formula is "not estimated", and its hours are None, not zero.
Completions and answers count at their full length and with every refill, so that these hours are upper bounds.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nautile.common.errors import ConfigError
from nautile.common.text import amount, counted, dollars, markdown_table
from nautile.configs.schema import RunConfig
from nautile.configs.stages import STAGES
from nautile.configs.training import MOST_GUARD, PolicyConfig, RolloutConfig
from nautile.evals.benchmarks.registry import BENCHMARKS, parts_of
from nautile.flows.dag import pipeline_steps
from nautile.flows.forecast import CallForecast, forecast_calls
from nautile.model.capacity.flops import (
    TrainingEstimate,
    estimate_training,
    forward_flops,
    parameters_by_formula,
    training_flops,
)
from nautile.model.capacity.topology import GIB, Topology, parse_device, parse_topology
from nautile.model.capacity.utilisation import DECODED_LAYER_S, UPDATE, Utilisation, utilisation
from nautile.store.artifacts import Store

# Of the memory that the formula may fill: JAX takes so much of a GPU, and the formula is up to 25 % off.
MARGIN = 0.75
INGESTED = 1.0e6  # tokens a second and core: half of what is measured, since a rented core is slower (docs/scale.md)
HOPPER = ("h100", "h200")  # on which the fused kernels may be taken: they have run on an H200
UNTRIED = 'The kernels of model.mixing = "fused" have run on an H200 alone: take "chunked" here.'


@dataclass(frozen=True)
class StagePlan:
    """A stage, or all of one kind: its work in words, hours on the chips (None: not estimated), and their dollars.

    `calls_dollars`: of paid endpoints, None without any.
    """

    stage: str
    work: str
    hours: float | None
    chip_dollars: float | None
    calls_dollars: float | None


@dataclass(frozen=True)
class DevicePlan:
    """The plan for one device. `pretraining` is at the largest micro-batch that fits, if any does."""

    device: str
    chips: int
    micro_rows: int  # as configured
    untried_kernels: bool  # the fused kernels would run, on a chip of which nobody knows whether they do
    pretraining: TrainingEstimate
    utilisation: Utilisation
    priced: str
    stages: tuple[StagePlan, ...]

    @property
    def hours(self) -> float | None:
        """Of all stages that have an estimate; None if none has."""
        known = [stage.hours for stage in self.stages if stage.hours is not None]
        return sum(known) if known else None


def plan_device(
    config: RunConfig, store: Store, device: str, price: float | None = None, mfu: float | None = None
) -> DevicePlan:
    """Plan `config` for a device by its name. `price`: dollars a chip and hour; `mfu`: the utilisation to assume.

    Raises `ConfigError` for an unknown device, or a batch that does not divide among its chips.
    """
    topology = parse_device(device)
    chip = topology.chip
    assert chip is not None
    if mfu is not None and not 0 < mfu <= 1:
        raise ConfigError(f"--mfu {mfu} must be above 0 and at most 1")
    configured = config.launch.dollars_per_chip_hour
    price = next((value for value in (price, configured, chip.price) if value is not None), None)
    used = utilisation(chip, config.model, sum(parameters_by_formula(config.model).values()))
    if mfu is not None:
        used = Utilisation(mfu, "given by --mfu", False)
    estimate = _largest_that_fits(config, topology, used.share, price)
    steps = pipeline_steps(config)
    calls = forecast_calls(steps, store)
    hours = _Hours(config, topology, used.share, estimate)
    stages = []
    uses = Counter(step.stage.name for step in steps)
    for name in (name for name in STAGES if name in uses):  # all evaluations, or sources, are one row
        work, spent = hours.of(name, uses[name])
        own = [row for row in calls if row.label.partition(":")[0] == name]
        cost = None if spent is None or price is None else spent * topology.chips * price
        stages.append(StagePlan(name, _with_calls(work, own), spent, cost, _paid(own)))
    rows = config.pretrain.rows_at_once(topology.chips)
    untried = config.model.mixing == "fused" and chip.name not in HOPPER
    listed_by = chip.priced if price == chip.price else ""
    return DevicePlan(topology.name, topology.chips, rows, untried, estimate, used, listed_by, tuple(stages))


def assumed_mfu(config: RunConfig, topology: str) -> float:
    """The utilisation to assume on named chips. Raises `ConfigError` for an unknown topology."""
    if topology == "local":
        return 0.4  # of which no estimate of time is made
    chip = parse_topology(topology).chip
    assert chip is not None
    return utilisation(chip, config.model, sum(parameters_by_formula(config.model).values())).share


def _largest_that_fits(config: RunConfig, topology: Topology, share: float, price: float | None) -> TrainingEstimate:
    """The estimate at the configured micro-batch if it fits, else at the largest that does, else at a row a chip."""
    part, chips = config.pretrain, topology.chips
    part = part.model_copy(update={"fsdp": math.gcd(part.fsdp, chips)})
    rows = part.rows_at_once(chips)
    while True:
        part = part.model_copy(update={"micro_rows": rows})
        estimate = estimate_training(part, config.model, config.ingest.row_length, topology, share, price)
        smaller = [n for n in range(chips, rows, chips) if part.batch_rows % n == 0]
        if estimate.memory <= MARGIN * estimate.memory_limit or not smaller:
            return estimate
        rows = smaller[-1]


class _Hours:
    """The work and the hours of each stage of a configuration on a topology, at a share of its peak."""

    def __init__(self, config: RunConfig, topology: Topology, share: float, estimate: TrainingEstimate) -> None:
        self.config, self.estimate, self.chips = config, estimate, topology.chips
        assert topology.chip is not None
        self.chip = topology.chip
        self.speed = self.chip.peak * share if self.chip.peak else None  # FLOP/s that a training step reaches

    def of(self, stage: str, steps: int) -> tuple[str, float | None]:
        """Work in words, and hours; None: no formula, or no peak of this chip is known."""
        config = self.config
        if stage == "ingest":
            tokens = sum(phase.tokens for phase in config.pretrain.phases)
            core_hours = tokens / INGESTED / 3600
            return f"at least {amount(tokens)} tokens, some {core_hours:,.1f} hours of a CPU core", None
        if stage == "distill" and config.distill is not None:
            return f"{config.distill.prompts:,} prompts", None
        if stage == "pretrain":
            estimate = self.estimate
            hours = None if estimate.chip_hours is None else estimate.chip_hours / self.chips
            return f"{amount(estimate.tokens)} tokens", hours
        if stage == "supervise" and (solved := config.supervise) is not None:
            rows, length = solved.problems.count * solved.epochs, solved.row_length or config.model.context
            work = f"{rows:,} rows of {length:,} tokens"
            flops = rows * length * training_flops(config.model, length)
            return work, flops / (self.speed * UPDATE * self.chips) / 3600 if self.speed else None
        if stage == "align" and config.align is not None:
            return self._policy(config.align.rollout, config.align.policy)
        if stage == "reason" and config.reason is not None:
            return self._policy(config.reason.rollout, config.reason.policy)
        if stage == "self_distill" and (part := config.self_distill) is not None:
            drawn = part.problems.count * part.rollout.group * part.rounds
            batches = math.ceil(part.problems.count / part.rollout.prompts) * part.rounds
            sampled = batches * self._decoding(part.rollout.prompts * part.rollout.group, part.rollout.max_tokens)
            return self._both(drawn, part.rollout, sampled, drawn * part.epochs)
        if stage == "evaluate":
            questions, seconds = self._evaluation()
            return f"{counted(steps, 'time')} {questions:,} questions", steps * seconds / 3600
        return "", None

    def _policy(self, rollout: RolloutConfig, policy: PolicyConfig) -> tuple[str, float | None]:
        rows = rollout.prompts * rollout.group
        draws = policy.steps * (1 + policy.refill)
        sampled = draws * self._decoding(rows, rollout.max_tokens)
        if policy.guard_every:
            readings = policy.steps // policy.guard_every + 1
            batches = math.ceil((policy.guard_problems or MOST_GUARD) / rows)
            sampled += readings * batches * self._decoding(rows, rollout.max_tokens)
        # A penalty on the divergence reads the first policy too: a forward pass beside three.
        passes = policy.inner_epochs + (1 / 3 if policy.kl else 0)
        return self._both(draws * rows, rollout, sampled, policy.steps * rows * passes)

    def _both(self, drawn: int, rollout: RolloutConfig, sampled: float, updated: float) -> tuple[str, float | None]:
        """Completions to draw in so many seconds, and rows of an update."""
        work = f"{drawn:,} completions of {rollout.max_tokens:,} tokens"
        if self.speed is None:
            return work, None
        length = rollout.prompt_length + rollout.max_tokens
        update = updated * length * training_flops(self.config.model, length) / (self.speed * UPDATE * self.chips)
        shares = f"sampling {_hours(sampled / 3600)}, updates {_hours(update / 3600)}"
        return f"{work}: {shares}", (sampled + update) / 3600

    def _decoding(self, rows: int, tokens: int) -> float:
        """Seconds of decoding a batch of `rows` by `tokens` steps; of each chip its share of the rows.

        A step launches every layer, reads the weights, and computes all rows: whichever takes longest.
        """
        model = self.config.model
        launched = DECODED_LAYER_S * model.blocks * len(model.pattern)
        read = 2 * self.estimate.parameters / self.chip.bandwidth
        flops = sum(forward_flops(model, model.context).values()) * math.ceil(rows / self.chips)
        return tokens * max(launched, read, flops / self.speed if self.speed else 0.0)

    def _evaluation(self) -> tuple[int, float]:
        """Questions of one evaluation, and its seconds: on one chip, in batches of `evaluate.batch`."""
        part, model = self.config.evaluate, self.config.model
        questions, seconds = (part.held_out.count if part.held_out else 0), 0.0
        generated = questions
        for choice in part.benchmarks:
            for entry in (BENCHMARKS[name] for name in parts_of(choice.name)):
                count = min(choice.items or entry.size, entry.size)
                questions += count
                options = round(1 / entry.chance) if entry.kind == "choice" and entry.chance else 0
                if "likelihood" in part.ways and options and self.speed:
                    flops = sum(forward_flops(model, part.prompt_length).values())
                    seconds += count * options * part.prompt_length * flops / self.speed
                generated += count if "generate" in part.ways else 0
        batches = math.ceil(generated * (1 + (part.samples or 0)) / part.batch)
        return questions, seconds + batches * self._decoding(self.chips * part.batch, part.max_tokens)


def _with_calls(work: str, calls: Sequence[CallForecast]) -> str:
    if not calls:
        return work
    requests, sent, got = (sum(getattr(row, name) for row in calls) for name in ("requests", "tokens_in", "tokens_out"))
    asked = f"{requests:,} calls, {amount(sent)} tokens in, {amount(got)} out"
    return "; ".join(filter(None, (work, asked)))


def _paid(calls: Sequence[CallForecast]) -> float | None:
    """The expected dollars of calls; without measured replies at their full length."""
    paid = [row.dollars[1] for row in calls if row.dollars[2] > 0]
    return sum(paid) if paid else None


def _hours(hours: float) -> str:
    return f"{hours:,.1f} h" if hours >= 0.1 else f"{hours * 60:.0f} min"


def device_markdown(plan: DevicePlan) -> str:
    """The plan as Markdown."""
    estimate, used = plan.pretraining, plan.utilisation
    rows = estimate.rows_per_chip
    memory = f"{estimate.memory / GIB:.1f} of {estimate.memory_limit / GIB:.1f} GiB a chip"
    fits = f"{rows * plan.chips} rows a micro-batch ({rows} a chip) take {memory}"
    basis = f"{used.source}, docs/results/device.md" if "H200" in used.source else used.source
    assumed = "" if used.measured else "; assumed here: never run on this chip"
    share = f"{used.share:.1%} of the peak, {basis}{assumed}"
    price = "no price of this chip is listed: give yours with --price"
    if estimate.dollars_per_chip_hour is not None:
        price = f"${estimate.dollars_per_chip_hour:.2f} a chip and hour ({plan.priced or 'yours'})"
    facts = [
        f"Memory of pretraining, by formula: {fits}: {'fits' if estimate.fits else 'does not fit'}"
        + (f"; set pretrain.micro_rows = {rows * plan.chips}." if rows * plan.chips != plan.micro_rows else "."),
        f"Utilisation: {share}.",
        *([UNTRIED] if plan.untried_kernels else []),
        f"Price: {price}.",
    ]
    return "\n\n".join(
        [
            f"# {amount(estimate.parameters)} parameters on {plan.device} ({counted(plan.chips, 'chip')})",
            "\n".join(f"- {fact}" for fact in facts),
            markdown_table(("stage", "work", "hours", "chips", "calls"), list(_rows(plan))),
            "Nothing was compiled or run. The hours of supervised training, reinforcement and evaluations are at "
            "most: every row and completion at full length, with all refills. So are the calls, until replies are "
            "measured.",
        ]
    )


def _rows(plan: DevicePlan) -> Iterator[list[str]]:
    for stage in plan.stages:
        hours = "not estimated" if stage.hours is None else _hours(stage.hours)
        yield [stage.stage, stage.work, hours, *(map(_money, (stage.chip_dollars, stage.calls_dollars)))]
    chips, calls = (
        [value for stage in plan.stages if (value := getattr(stage, name)) is not None]
        for name in ("chip_dollars", "calls_dollars")
    )
    hours = "not estimated" if plan.hours is None else _hours(plan.hours)
    yield ["in all", "", hours, _money(sum(chips) if chips else None), _money(sum(calls) if calls else None)]


def _money(value: float | None) -> str:
    return "" if value is None else dollars(value)
