"""The default run over several seeds, beside three controls: what does each stage gain, and would something else?

    python bench/studies/ladder.py [--sweep configs/local_controls.toml] [--store .nautile/ladder] [--out docs/results]
        [--report]

Runs the sweep (`nautile sweep`), which resumes after a stop, and writes `ladder.md`. A seed draws data, weights and
samples; the test problems are the same for all. Means and leads are over seeds, with Student's t intervals
(`evals.scoring.over_seeds`). The settings were chosen on problems of the guard split, which are others
(docs/decisions.md). `--report` only writes the table of the runs that are finished.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.measure import ROOT, argument_parser, run_sweep
from nautile.common.files import read_json
from nautile.configs.load import load
from nautile.configs.stages import TRAINED
from nautile.data.sources.reasoning_gym import Statement
from nautile.data.sources.slips import FactTable, Slips, fact_of
from nautile.evals.benchmarks.stand_ins import HELD_OUT
from nautile.evals.running.rows import SampleRow, read_rows
from nautile.evals.scoring.over_seeds import SeedLead, SeedSummary, lead, summary_of_shares
from nautile.store.artifacts import Store
from nautile.store.catalog import Catalog

_STATEMENT = re.compile(r"(-?\d+) ([-+*]) (-?\d+) = (-?\d+)")
# Processor seconds of an execution: the cores in use, measured every few seconds, times the time since the measurement
# before, which is longer than a minute only where the execution was interrupted.
PROCESSOR = """
SELECT sum(value * least(seconds, 60)) AS seconds FROM (
  SELECT value, step - coalesce(lag(step) OVER (ORDER BY step), 0) AS seconds FROM metrics
  WHERE name = 'system/cpu_cores' AND execution = ?
)
"""
_FACTOR = "SELECT value FROM metrics WHERE name = 'balance_factor' AND execution = ?"


@dataclass(frozen=True)
class StageFigures:
    """One seed's figures after a stage: shares of the held-out problems, and of statements of misconceived facts."""

    accuracy: float
    with_steps: float
    accuracy_given_steps: float
    finished: float
    misconceived_wrong: float
    processor_seconds: float | None
    factors: tuple[float, ...]  # the balance factor of each step


StageSeeds = Mapping[str, Mapping[int, StageFigures]]  # stage -> seed
Figures = dict[str, dict[str, dict[int, StageFigures]]]  # arm -> stage -> seed


def figures_of(rows: Sequence[SampleRow], table: FactTable) -> dict[str, float]:
    """The shares of `StageFigures` for the rows of an evaluation."""
    asked = [row for row in rows if row["benchmark"] == HELD_OUT and row["left_out"] is None]
    worked = [(row, statements) for row in asked if (statements := statements_of(row["reasoning"] or ""))]
    of_misconceived = [s for _, statements in worked for s in statements if fact_of(s) in table.misconceptions]
    return {
        "accuracy": fmean(row["strict"] for row in asked),
        "with_steps": len(worked) / len(asked),
        "accuracy_given_steps": fmean(row["strict"] for row, _ in worked) if worked else float("nan"),
        "finished": fmean(row["finished"] for row in asked),
        "misconceived_wrong": fmean(not s.is_right for s in of_misconceived) if of_misconceived else float("nan"),
    }


def statements_of(text: str) -> list[Statement]:
    """The arithmetic statements in a text."""
    return [Statement(int(a), operator, int(b), int(c)) for a, operator, b, c in _STATEMENT.findall(text)]


def read_figures(store: Store, record: Mapping[str, list], table: FactTable) -> Figures:
    """The figures of every finished evaluation of the sweep's record."""
    figures: Figures = defaultdict(lambda: defaultdict(dict))
    catalog = Catalog(store)
    catalog.ingest()
    for run in record["runs"]:
        keys = {step["label"]: step["key"] for step in run["steps"]}
        for stage in TRAINED:
            if f"evaluate:{stage}" not in keys:  # an arm that leaves the stage out
                continue
            evaluation = store.find("evaluation", keys[f"evaluate:{stage}"])
            checkpoint = store.find("checkpoint", keys[stage])
            if evaluation is None or checkpoint is None:  # not finished yet
                continue
            rows = read_rows(evaluation.path / "rows.jsonl")
            (processor,) = catalog.query(PROCESSOR, (checkpoint.recorded_execution,))
            factors = tuple(row["value"] for row in catalog.query(_FACTOR, (checkpoint.recorded_execution,)))
            figures[run["arm"]][stage][run["seed"]] = StageFigures(
                **figures_of(rows, table), processor_seconds=processor["seconds"], factors=factors
            )
    return figures


def markdown(figures: Figures, ends: Mapping[str, str], bound: float, problems: int) -> str:
    """The tables: the stages of the first arm, the ends of all arms, and each seed.

    `ends`: the stage after which an arm is compared; an arm without a finished evaluation there is left out.
    """
    ladder_arm, *controls = [arm for arm in figures if ends[arm] in figures[arm]]
    stages = figures[ladder_arm]
    parts = [
        f"Percent of {problems:,} held-out problems solved (greedy, strict grader): mean over seeds with the 95 % t "
        "interval over seeds. The same problems for every seed and arm, none of which was used to choose a setting. "
        f"A perfect learner of the text solves {100 * bound:.1f} %.",
        _stage_table(stages, problems),
        _arm_table(figures, {arm: ends[arm] for arm in (ladder_arm, *controls)}, problems),
    ]
    factors = [factor for f in stages.get("reason", {}).values() for factor in f.factors]
    if factors:
        span = f"{min(factors):.2f} to {max(factors):.2f}, median {median(factors):.2f}"
        parts.append(f"Balance factor of `reason`, all seeds and steps: {span}.")
    columns = (*stages.values(), *(figures[arm][ends[arm]] for arm in controls))
    rows = [
        [str(seed), *(f"{100 * by_seed[seed].accuracy:.1f}" if seed in by_seed else "–" for by_seed in columns)]
        for seed in sorted({seed for by_seed in stages.values() for seed in by_seed})
    ]
    parts.append(_table(["seed", *stages, *(f"{arm}: the end" for arm in controls)], rows))
    return "\n\n".join(parts) + "\n"


def _stage_table(stages: StageSeeds, problems: int) -> str:
    heads = ["after", "solved", "least, most", "gain over the stage before", "with steps", "solved of those with steps",
             "finished", "misconceived facts stated wrongly", "processor s"]  # fmt: skip
    shares = ("with_steps", "accuracy_given_steps", "finished", "misconceived_wrong")
    rows, before = [], None
    for stage, by_seed in stages.items():
        accuracies = {seed: f.accuracy for seed, f in by_seed.items()}
        gain = _lead_text(_lead(stages[before], by_seed, problems, len(stages) - 1)) if before else ""
        span = f"{100 * min(accuracies.values()):.1f}, {100 * max(accuracies.values()):.1f}"
        means = [_mean(getattr(f, name) for f in by_seed.values()) for name in shares]
        rows.append(
            [stage, _summary_text(summary_of_shares(accuracies)), span, gain, *means, _seconds(by_seed.values())]
        )
        before = stage
    return _table(heads, rows)


def _arm_table(figures: Figures, ends: Mapping[str, str], problems: int) -> str:
    ladder_arm, *controls = ends
    stages, rows = figures[ladder_arm], []
    for arm, end in ends.items():
        by_seed = figures[arm][end]
        against_first = _lead(stages[ends[ladder_arm]], by_seed, problems, max(1, len(controls)))
        solved = _summary_text(summary_of_shares({seed: f.accuracy for seed, f in by_seed.items()}))
        lead_text = "" if arm == ladder_arm else _lead_text(against_first)
        rows.append([arm, str(len(by_seed)), solved, lead_text, _own_seconds(figures[arm], stages)])
    heads = ["arm", "seeds", "at the end", "against the first arm", "processor s beyond the pretraining of the first"]
    return _table(heads, rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows))


def _lead(first: Mapping[int, StageFigures], other: Mapping[int, StageFigures], problems: int, tests: int) -> SeedLead:
    accuracies = [{seed: f.accuracy for seed, f in by_seed.items()} for by_seed in (first, other)]
    return lead(accuracies[0], accuracies[1], tests=tests, problems=problems)


def _lead_text(seed_lead: SeedLead) -> str:
    text = f"{100 * seed_lead.lead:+.1f}"
    if seed_lead.low is None or seed_lead.high is None or seed_lead.detectable is None:
        return text
    p = "<0.0001" if seed_lead.p is not None and seed_lead.p < 1e-4 else f"{seed_lead.p:.2g}"
    interval = f"[{100 * seed_lead.low:+.1f}, {100 * seed_lead.high:+.1f}]"
    return f"{text} {interval}, p {p}; could have found {100 * seed_lead.detectable:.1f}"


def _summary_text(of: SeedSummary) -> str:
    interval = ""
    if of.low is not None and of.high is not None:
        interval = f" [{100 * of.low:.1f}, {100 * of.high:.1f}]"
    return f"{100 * of.mean:.1f}{interval}"


def _mean(values: Iterable[float]) -> str:
    known = [value for value in values if value == value]
    return f"{100 * fmean(known):.1f}" if known else "–"


def _seconds(figures: Iterable[StageFigures]) -> str:
    seconds = _processor_seconds(figures)
    return f"{seconds:.0f}" if seconds is not None else "–"


def _own_seconds(arm: Mapping[str, Mapping[int, StageFigures]], first: Mapping[str, Mapping[int, StageFigures]]) -> str:
    """Processor seconds of an arm's training, less those of the first arm's pretraining."""
    stages = [_processor_seconds(by_seed.values()) for by_seed in (*arm.values(), first["pretrain"])]
    known = [seconds for seconds in stages if seconds is not None]
    return f"{sum(known[:-1]) - known[-1]:.0f}" if len(known) == len(stages) else "–"


def _processor_seconds(figures: Iterable[StageFigures]) -> float | None:
    """The median over seeds: a run that was stopped and resumed has a measurement that spans its pause."""
    known = [f.processor_seconds for f in figures if f.processor_seconds is not None]
    return median(known) if known else None


def main() -> None:
    paths = {"sweep": ROOT / "configs/local_controls.toml", "out": ROOT / "docs/results"}
    arguments = argument_parser(__doc__, store=Path(".nautile/ladder"), report=False, **paths).parse_args()
    store = Store(arguments.store.absolute())
    if not arguments.report:
        run_sweep(arguments.sweep, store.root)
    record = read_json(store.sweeps / f"{arguments.sweep.stem}.json")
    config = load(record["config"])
    (table,) = {id(t): t for source in config.ingest.sources for t in Slips(source.tasks).tables.values()}.values()
    held_out = config.evaluate.held_out
    assert held_out is not None
    ends = {run["arm"]: run["after"].removeprefix("evaluate:") for run in record["runs"]}
    text = markdown(read_figures(store, record, table), ends, table.greedy_accuracy(), held_out.count)
    (arguments.out / "ladder.md").write_text(f"# The ladder of the default run\n\n{text}", encoding="utf-8")
    print(text, flush=True)


if __name__ == "__main__":
    main()
