"""Does the gradient balance help, or any smaller weight on the negatives, or more training? Rates, then arms by seed.

    python bench/studies/reinforce.py rates|arms|table|staleness|report [--seeds 1 2] [--store .nautile/reinforce]
        [--results bench/studies/results/reinforce.json] [--figure docs/results/rl-balance.svg] [--first 3]

Each cell is a run of `nautile sweep` (bench/studies/reinforce.toml), which resumes after a stop. Finished cells are
kept in the results file; a later machine without the store goes on from it and repeats no whole seed. A seed draws the
text, its table of wrong facts, the weights, the problems of training and the samples; the test problems are the same
for all.

Decided before any cell ran (docs/results/rl.md has the outcome):

1. Rate. Plain and balanced over the group, at 1e-4, 2e-4 and 4e-4, seeds 1 and 2, 150 updates. A cell counts by its
   greedy accuracy on 1,000 problems of the guard split, the mean of the readings after 100 and 150 updates. All arms of
   policy gradients have one rate, that with the highest mean over both arms and seeds. If it is at an end of the grid,
   one rate more is run beyond that end, by a factor of two, and the choice is made among the four. No test problem
   enters the choice. If the best rate of plain alone is another and plain gains two points or more by it, the page says
   so beside every comparison with plain. Self-distillation and supervised training keep the default run's rates.
2. Dose control. Objective "constant" with the weight that is the median of the balance's factor over all groups and
   updates of the two balanced cells of the chosen rate, rounded to two decimals.
   Added before any cell ran, for lack of processor time: the arms may begin when seed 1 alone has its rates. The rate
   and the weight then stay for all seeds of the arms, and the page says what seed 2 would have chosen.
3. Primary contrast: balanced over the group against its dose control, mean@8 at temperature 1 on 4,000 fixed problems
   after 300 updates, over ten seeds, paired, by Student's t (`evals.scoring.over_seeds`). Smallest effect of interest:
   one point. The balance helps if the interval is above 0, hurts if it is below 0, makes no difference that matters if
   the interval lies within one point of 0, and else the question is open. With fewer than five seeds there is no
   verdict.
4. Secondary, one family corrected by Holm: each other arm's lead over plain in mean@8. Greedy accuracy, pass@8, the
   length of the update, the factor, entropy, lengths by sign and the share of live groups are shown and not tested.
5. All arms of a seed run before the next seed begins, so that a stop leaves whole seeds, in the order of the tables'
   priority: the primary contrast first. Whatever has not run is said.
   Added when three arms of seed 1 had run, for lack of processor time: `--first 3` runs the first three arms of each
   seed alone (balanced over the group, its dose control, plain), so that the primary contrast has its seeds soonest.

Two further questions, five seeds each, 100 updates at the rate of the arms, mean@8 on 1,000 problems; decided before
any of their cells ran:

6. `table`, the cheap explanation: {embedding table trained, frozen} × {sampled at 1, at 0.5 against a learner at 1} ×
   {plain, balanced over the group}. The table explains a failure of plain if plain, sampled at 0.5 with the table
   trained, ends below the start in the mean over seeds, and freezing the table makes that good by three points or more.
7. `staleness`: the sampler copied every 1, 10 and 40 updates × {plain, balanced over the group, positives alone}.
   Staleness hurts an arm if its lead at 40 over itself at 1 has an interval below 0; TOPR's clamp follows only then.
   Both families are corrected by Holm, each within itself.
   Added when two seeds had run, in which every arm ended lower at 40, and before a cell of it: TOPR's clamp (objective
   `tapered`) at 40, tested over plain at 40. It helps if that interval is above 0.
"""

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.measure import ROOT, argument_parser, run_sweep
from bench.studies.ladder import PROCESSOR
from nautile.common.figures import COLOURS, draw
from nautile.common.files import read_json, write_json
from nautile.common.text import markdown_table
from nautile.evals.benchmarks.stand_ins import HELD_OUT
from nautile.evals.scoring.intervals import holm
from nautile.evals.scoring.over_seeds import lead, summary_of_shares
from nautile.store.artifacts import Artifact, Store
from nautile.store.catalog import Catalog

RATES = (1e-4, 2e-4, 4e-4)
RATE_SEEDS = (1, 2)
RATE_STEPS, READINGS = 150, (100, 150)  # updates; those after which the guard's readings count
PROBLEMS, SAMPLES = 4000, 8
LEAST_SEEDS, SMALLEST_EFFECT = 5, 0.01
GROUP = ('reason.objective="balanced"', 'reason.balance_over="group"')
RATE_ARMS = {"plain": ('reason.objective="plain"',), "balanced over the group": GROUP}
PLAIN, PRIMARY, CONTROL, SUPERVISED = "plain", "balanced over the group", "constant at the median factor", "supervised"
START = "the start"
# Positions of more text for about the processor time of 300 updates; its rate begins far below that of the start's.
SUPERVISED_ARM = (
    'pretrain.phases=[{name = "synth", tokens = 1600000, mixture = {synth = 1.0}}]',
    "pretrain.optimizer.learning_rate=1e-3",
)

Cell = dict[str, Any]


def policy_arms(dose: float) -> dict[str, tuple[str, ...]]:
    """The arms of policy gradients: name -> settings. `dose`: the weight of the control."""
    return {
        PRIMARY: GROUP,
        CONTROL: ('reason.objective="constant"', f"reason.negative_weight={dose}"),
        PLAIN: RATE_ARMS["plain"],
        "positives alone": ('reason.objective="positives"',),
        "constant 0.5": ('reason.objective="constant"', "reason.negative_weight=0.5"),
        "balanced over the step": ('reason.objective="balanced"', 'reason.balance_over="step"'),
    }


FURTHER_SEEDS = (1, 2, 3, 4, 5)
FURTHER = {"table": "The embedding table", "staleness": "Stale samplers"}  # phase -> heading
FURTHER_STEPS, FURTHER_PROBLEMS = 100, 1000
COPIED = (1, 10, 40)  # updates between copies of the policy to the sampler
TAPERED = f"TOPR's clamp, copied every {COPIED[-1]}"


def further_arms(phase: str) -> dict[str, tuple[str, ...]]:
    """The arms of rules 6 and 7: name -> settings."""
    objectives = {PLAIN: RATE_ARMS[PLAIN], PRIMARY: GROUP}
    if phase == "staleness":
        objectives["positives alone"] = ('reason.objective="positives"',)
        arms = {
            f"{name}, copied every {steps}": (*own, f"reason.policy.sync_every={steps}")
            for name, own in objectives.items()
            for steps in COPIED
        }
        return arms | {TAPERED: ('reason.objective="tapered"', f"reason.policy.sync_every={COPIED[-1]}")}
    tables = {"trained": (), "frozen": ('reason.policy.train=["blocks"]',)}
    sampled = {"1": (), "0.5": ("reason.rollout.temperature=0.5", "reason.policy.temperature=1.0")}
    return {
        f"{name}, table {table}, sampled at {temperature}": (*own, *trained, *drawn)
        for name, own in objectives.items()
        for table, trained in tables.items()
        for temperature, drawn in sampled.items()
    }


def baseline_of(phase: str, arm: str) -> str:
    """The arm over which an arm's lead is tested: plain; of the further questions, itself without the change."""
    if phase == "table":
        return arm.replace("table frozen", "table trained")
    if arm == TAPERED:
        return f"{PLAIN}, copied every {COPIED[-1]}"
    return PLAIN if phase == "arms" else f"{arm.partition(', copied')[0]}, copied every 1"


FROM_START = 'self_distill.start="pretrain"'
TRACE_ARMS = {
    "self-distillation": (FROM_START,),
    "self-distillation, unweighted": (FROM_START, 'self_distill.weights="ones"'),
}


def sweep_text(seed: int, shared: Sequence[str], arms: Mapping[str, Sequence[str]], until: str) -> str:
    """The sweep file of a seed's arms. An arm of `TRACE_ARMS` ends with its own evaluation."""
    settings = [f"seed={seed}", *(f"ingest.sources.1.tasks.{n}.slips.seed={seed}" for n in (0, 1)), *shared]
    lines = [f'config = "{ROOT}/bench/studies/reinforce.toml"', f'until = "{until}"', f"set = {_toml(settings)}"]
    for name, own in arms.items():
        lines += ["", "[[arms]]", f'name = "{name}"', f"set = {_toml(own)}"]
        lines += ['after = "self_distill"'] if name in TRACE_ARMS else []
    return "\n".join(lines) + "\n"


def _toml(settings: Sequence[str]) -> str:
    return "[" + ", ".join(f"'{setting}'" for setting in settings) + "]"


def sweep(store: Store, name: str, text: str) -> None:
    """Write the file of a sweep and run it to its end."""
    store.root.mkdir(parents=True, exist_ok=True)
    file = store.root / f"{name}.toml"
    file.write_text(text, encoding="utf-8")
    run_sweep(file, store.root)


def recorded(store: Store, name: str) -> list[Mapping[str, Any]]:
    """The runs of a sweep's record."""
    runs: list[Mapping[str, Any]] = read_json(store.sweeps / f"{name}.json")["runs"]
    return runs


def collect(store: Store, cells: list[Cell], file: Path) -> None:
    """Add the finished runs of this store's sweeps to the cells, and write them to the results file."""
    known = {(cell["phase"], cell["seed"], cell["arm"], cell["rate"]) for cell in cells}
    for path in sorted(store.sweeps.glob("*.json")):
        phase, seed, *_ = path.stem.split("-")
        for run in read_json(path)["runs"]:
            labels = [step["label"] for step in run["steps"]]
            rate = setting(run, "reason.policy.optimizer.learning_rate")
            about = {"phase": phase if phase in ("rates", *FURTHER) else "arms", "seed": int(seed), "rate": rate}
            wanted = [(run["arm"].removesuffix(f" {rate:g}"), run["after"].partition(":")[2])]
            if about["phase"] in FURTHER or (about["phase"] == "arms" and run["arm"] == PRIMARY):
                wanted.append((START, "pretrain"))
            for arm, stage in wanted:
                if (about["phase"], about["seed"], arm, rate) in known or f"evaluate:{stage}" not in labels:
                    continue
                if cell := read_cell(store, run, stage):
                    known.add((about["phase"], about["seed"], arm, rate))
                    cells.append({**about, "arm": arm, "weight": setting(run, "reason.negative_weight"), **cell})
    phases = ["rates", "arms", *FURTHER]
    cells.sort(key=lambda cell: (phases.index(cell["phase"]), cell["seed"]))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, {"cells": cells})


def setting(run: Mapping[str, Any], field: str) -> float | None:
    """The number that a run's settings give a field; None without one."""
    values = [float(text.partition("=")[2]) for text in run["settings"] if text.startswith(f"{field}=")]
    return values[-1] if values else None


def read_cell(store: Store, run: Mapping[str, Any], stage: str) -> Cell | None:
    """The figures of a run: of the checkpoint of `stage`, its metrics, its evaluation; None if it has not finished."""
    keys = {step["label"]: step["key"] for step in run["steps"]}
    checkpoint, evaluation = store.find("checkpoint", keys[stage]), store.find("evaluation", keys[f"evaluate:{stage}"])
    if checkpoint is None or evaluation is None:
        return None
    facts, scores = checkpoint.manifest["facts"], read_json(evaluation.path / "scores.json")
    kept = ("guard", "balance_factor", "distance", "updates", "groups", "no_signal", "refilled", "rounds")
    found = {name: facts[name] for name in kept if name in facts}
    for row in found.get("guard", ()):
        row.pop("outcomes", None)  # a thousand digits each
    for row in found.get("rounds", ()):
        row.pop("curriculum", None)
    return {
        "facts": found,
        "metrics": metrics_of(store, checkpoint),
        "greedy": kept_of_score(scores["benchmarks"].get(HELD_OUT)),
        "sampled": kept_of_score(scores.get("sampled", {}).get(HELD_OUT)),
    }


def kept_of_score(score: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What a cell keeps of a score."""
    names = ("n", "accuracy", "pass_at", "samples", "finished_share", "accuracy_finished", "left_out")
    return score and {name: score[name] for name in names if name in score}


def metrics_of(store: Store, checkpoint: Artifact) -> dict[str, Any]:
    """Means over the first and the last tenth of the steps of each metric, and the processor seconds of the step."""
    catalog = Catalog(store)
    catalog.ingest()
    execution = checkpoint.recorded_execution
    values: dict[str, list[float]] = defaultdict(list)
    query = "SELECT name, value FROM metrics WHERE execution = ? AND NOT starts_with(name, 'system/') ORDER BY step"
    for row in catalog.query(query, (execution,)):
        values[row["name"]].append(row["value"])
    (processor,) = catalog.query(PROCESSOR, (execution,))
    means = {
        name: [round(fmean(part), 6) for part in (series[: len(series) // 10 + 1], series[-(len(series) // 10 + 1) :])]
        for name, series in values.items()
    }
    return {"processor_seconds": processor["seconds"], **means}


def run_rates(store: Store, cells: list[Cell], file: Path, seeds: Sequence[int]) -> None:
    """Run the cells of rule 1 that are missing, and one rate more if the best is at an end of the grid."""
    rates = list(RATES)
    shared = [
        f"reason.policy.steps={RATE_STEPS}",
        "reason.policy.guard_every=50",
        "reason.policy.guard_problems=1000",
        "evaluate.held_out.count=16",
    ]
    while True:
        for seed in seeds:
            known = {(c["arm"], c["rate"]) for c in cells if c["phase"] == "rates" and c["seed"] == seed}
            missing = [(arm, rate) for rate in rates for arm in RATE_ARMS if (arm, rate) not in known]
            if missing:
                arms = {f"{arm} {rate:g}": (*RATE_ARMS[arm], _rate(rate)) for arm, rate in missing}
                sweep(store, f"rates-{seed}-{len(rates)}", sweep_text(seed, shared, arms, "evaluate:reason"))
                collect(store, cells, file)
        best = best_rate(cells)
        further = best / 2 if best == min(rates) else best * 2 if best == max(rates) else None
        if further is None or len(rates) > len(RATES):
            return
        rates.append(further)


def _rate(rate: float) -> str:
    return f"reason.policy.optimizer.learning_rate={rate}"


def guard_accuracy(cell: Cell) -> float:
    """The accuracy on the guard's problems by which rule 1 counts a cell."""
    return fmean(row["correct"] / row["n"] for row in cell["facts"]["guard"] if row["step"] in READINGS)


def by_rate(cells: Sequence[Cell], arms: Sequence[str] = tuple(RATE_ARMS)) -> dict[float, float]:
    """Rate -> mean accuracy on the guard's problems over the arms and seeds."""
    values: dict[float, list[float]] = defaultdict(list)
    for cell in cells:
        if cell["phase"] == "rates" and cell["arm"] in arms:
            values[cell["rate"]].append(guard_accuracy(cell))
    return {rate: fmean(values[rate]) for rate in sorted(values)}


def best_rate(cells: Sequence[Cell]) -> float:
    """The rate of rule 1."""
    rates = by_rate(cells)
    return max(rates, key=lambda rate: rates[rate])


def dose(cells: Sequence[Cell]) -> float:
    """The weight of rule 2. All seeds have as many groups, so the median of all is near the mean of their medians."""
    rate = best_rate(cells)
    chosen = [c for c in cells if c["phase"] == "rates" and c["arm"] == PRIMARY and c["rate"] == rate]
    return round(fmean(cell["facts"]["balance_factor"]["median"] for cell in chosen), 2)


def settled(cells: Sequence[Cell]) -> tuple[float, float]:
    """The rate and the weight of the dose control: those of the arms that have run, else by the rules."""
    for cell in cells:
        if cell["phase"] == "arms" and cell["arm"] == CONTROL:
            return cell["rate"], cell["weight"]
    return best_rate(cells), dose(cells)


def run_arms(store: Store, cells: list[Cell], file: Path, seeds: Sequence[int], first: int = 0) -> None:
    """Run the arms that are missing, seed by seed; `first`: only so many of each seed, if not 0."""
    rate, weight = settled(cells)
    shared = [_rate(rate), f"evaluate.samples={SAMPLES}", f"evaluate.held_out.count={PROBLEMS}"]
    for seed in seeds:
        known = {cell["arm"] for cell in cells if cell["phase"] == "arms" and cell["seed"] == seed}
        # All of them, also those that the results file has of another machine: the sweep's file stays the same.
        arms = dict([*policy_arms(weight).items(), *TRACE_ARMS.items()][: first or None])
        if not known >= {*arms}:
            sweep(store, f"{'first' if first else 'arms'}-{seed}", sweep_text(seed, shared, arms, "evaluate:reason"))
            collect(store, cells, file)
        if SUPERVISED not in known and not first:
            start = next(
                step["key"] for step in recorded(store, f"arms-{seed}")[0]["steps"] if step["label"] == "pretrain"
            )
            more = {SUPERVISED: (*SUPERVISED_ARM, f'pretrain.start="checkpoint/{start}"')}
            sweep(store, f"supervised-{seed}", sweep_text(seed, shared, more, "evaluate:pretrain"))
            collect(store, cells, file)


def run_further(store: Store, cells: list[Cell], file: Path, seeds: Sequence[int], phase: str) -> None:
    """Run the arms of rule 6 or 7 that are missing, seed by seed."""
    rate, _ = settled(cells)
    shared = [
        _rate(rate),
        f"reason.policy.steps={FURTHER_STEPS}",
        f"evaluate.samples={SAMPLES}",
        f"evaluate.held_out.count={FURTHER_PROBLEMS}",
    ]
    arms = further_arms(phase)
    for seed in seeds:
        if not {cell["arm"] for cell in cells if cell["phase"] == phase and cell["seed"] == seed} >= {*arms}:
            sweep(store, f"{phase}-{seed}", sweep_text(seed, shared, arms, "evaluate:reason"))
            collect(store, cells, file)


def markdown(cells: Sequence[Cell]) -> str:
    """The tables of the page: the rates, the arms over their seeds, and the primary contrast with its verdict."""
    parts = [rates_table(cells)] if any(cell["phase"] == "rates" for cell in cells) else []
    if arms := [cell for cell in cells if cell["phase"] == "arms"]:
        parts += [arms_table(arms), primary(arms)]
    for phase, heading in FURTHER.items():
        if own := [cell for cell in cells if cell["phase"] == phase]:
            parts += [f"{heading}:", arms_table(own)]
    return "\n\n".join(parts) or "no cell has run"


def rates_table(cells: Sequence[Cell]) -> str:
    """Rule 1: accuracy on the guard's problems by rate and arm, a column for each seed."""
    chosen = [cell for cell in cells if cell["phase"] == "rates"]
    seeds = sorted({cell["seed"] for cell in chosen})
    rows = []
    for arm in RATE_ARMS:
        for rate in sorted({cell["rate"] for cell in chosen}):
            own = {cell["seed"]: guard_accuracy(cell) for cell in chosen if (cell["arm"], cell["rate"]) == (arm, rate)}
            if own:
                mean = _percent(fmean(own.values()))
                rows.append([arm, f"{rate:g}", *(_percent(own.get(seed)) for seed in seeds), mean])
    table = markdown_table(["arm", "rate", *(f"seed {seed}" for seed in seeds), "mean"], rows)
    found = f"{best_rate(cells):g}; the median factor of the balanced cells there is {dose(cells)}"
    rate, weight = settled(cells)
    return f"{table}\n\nThe best rate is {found}. The arms have {rate:g}, and the dose control a weight of {weight}."


def values_of(cells: Sequence[Cell], arm: str, figure: str) -> dict[int, float]:
    """Seed -> "mean", "pass" or "greedy" accuracy of an arm; a cell that lacks it is left out."""
    found: dict[int, float] = {}
    for cell in cells:
        if cell["arm"] != arm:
            continue
        score = cell["greedy"] if figure == "greedy" else cell["sampled"]
        value = score and (score["accuracy"] if figure in ("greedy", "mean") else score["pass_at"].get(str(SAMPLES)))
        if value is not None:
            found[cell["seed"]] = value if isinstance(value, float) else value["accuracy"]
    return found


def arms_table(cells: Sequence[Cell]) -> str:
    """A row for each arm: its accuracies over seeds, its lead over its baseline, and what was seen of its updates."""
    phase = cells[0]["phase"]
    names = sorted(dict.fromkeys(cell["arm"] for cell in cells), key=lambda name: name != START)
    means = {name: values_of(cells, name, "mean") for name in names}
    baselines = {name: baseline_of(phase, name) for name in names if name != START}
    tested = [
        name for name, other in baselines.items() if name != other and set(means[name]) & set(means.get(other, {}))
    ]
    problems = PROBLEMS if phase == "arms" else FURTHER_PROBLEMS
    leads = {name: lead(means[baselines[name]], means[name], len(tested), problems) for name in tested}
    ps = {name: test.p for name, test in leads.items() if test.p is not None}
    corrected = holm(ps)
    rows = []
    for name in names:
        own = [cell for cell in cells if cell["arm"] == name]
        cell_texts = [_over_seeds(values_of(cells, name, figure)) for figure in ("mean", "greedy", "pass")]
        test = leads.get(name)
        cell_texts.append("" if test is None else _points(test.lead, test.low, test.high))
        cell_texts.append(f"{corrected[name]:.2g}" if name in corrected else "")
        cell_texts.append(_mean([cell["facts"].get("distance") for cell in own], "{:.2f}"))
        for metric in ("entropy", "length_positive", "length_negative", "live_share"):
            cell_texts.append(_mean([cell["metrics"].get(metric, [None])[-1] for cell in own], "{:.2f}"))
        cell_texts.append(_mean([cell["metrics"]["processor_seconds"] for cell in own], "{:.0f}"))
        rows.append([name, str(len(own)), *cell_texts])
    over = "plain" if phase == "arms" else "its own baseline"
    heads = ["arm", "seeds", "mean@8", "greedy", "pass@8", f"over {over}, mean@8", "p, Holm", "‖Δθ‖", "entropy",
             "length of A > 0", "of A < 0", "live groups", "processor s"]  # fmt: skip
    factors = [
        f"{name}, seed {cell['seed']}: "
        + " ".join(f"{value:.2f}" for value in cell["facts"]["balance_factor"]["deciles"])
        for name in names
        for cell in cells
        if cell["arm"] == name and "deciles" in cell["facts"].get("balance_factor", {})
    ]
    lines = [
        "",
        "Deciles of the factor over groups and updates (10 % to 90 %):",
        "",
        *(f"- {line}" for line in factors),
    ]
    return markdown_table(heads, rows) + "\n" + "\n".join(lines if factors else [])


def primary(cells: Sequence[Cell]) -> str:
    """Rule 3: the primary contrast in words, with its verdict if there are enough seeds."""
    first, other = values_of(cells, CONTROL, "mean"), values_of(cells, PRIMARY, "mean")
    if not set(first) & set(other):
        return "The primary contrast has not run."
    test = lead(first, other, 1, PROBLEMS)
    text = (
        f"{PRIMARY} over {CONTROL}: {_points(test.lead, test.low, test.high)} points of mean@8, {len(test.seeds)} seeds"
    )
    text += "" if test.detectable is None else f"; so many seeds find {100 * test.detectable:.1f} points"
    if len(test.seeds) < LEAST_SEEDS or test.low is None or test.high is None:
        return f"{text}. No verdict: fewer than {LEAST_SEEDS} seeds."
    if test.low > 0 or test.high < 0:
        return f"{text}. The balance {'helps' if test.low > 0 else 'hurts'}."
    if max(-test.low, test.high) < SMALLEST_EFFECT:
        return f"{text}. The balance makes no difference that matters."
    return f"{text}. Open."


def figure(cells: Sequence[Cell]) -> str:
    """An SVG: guard accuracy by update, arm and rate; and mean@8 of each arm and seed, where arms have run."""
    title = "Accuracy on guard problems by update, and mean@8 after 300 updates by arm"
    return draw(title, (8.4, 3.6), partial(_paint, cells))


def _paint(cells: Sequence[Cell], canvas: Any) -> None:
    readings: dict[tuple[str, float], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        if cell["phase"] == "rates":
            for row in cell["facts"]["guard"]:
                readings[cell["arm"], cell["rate"]][row["step"]].append(100 * row["correct"] / row["n"])
    arms = sorted(dict.fromkeys(cell["arm"] for cell in cells if cell["phase"] == "arms"), key=lambda arm: arm != START)
    axes, *more = canvas.subplots(1, 2 if arms else 1, squeeze=False)[0]
    rates = sorted({rate for _, rate in readings})
    for (arm, rate), by_step in sorted(readings.items(), key=lambda entry: entry[0][1]):
        line = "-" if arm == PLAIN else "--"
        colour = COLOURS[rates.index(rate) % len(COLOURS)]
        axes.plot(
            [*by_step], [fmean(values) for values in by_step.values()], line, color=colour, label=f"{arm}, {rate:g}"
        )
    axes.set(xlabel="updates", ylabel="greedy, % of 1,000 guard problems")
    axes.set_ylim(bottom=axes.get_ylim()[0] - 12)  # room for the legend below the lines
    axes.legend(frameon=False, fontsize=7, loc="lower right")
    for panel in more:
        for place, arm in enumerate(arms):
            values = values_of([cell for cell in cells if cell["phase"] == "arms"], arm, "mean")
            panel.plot([100 * value for value in values.values()], [place] * len(values), "o", color=COLOURS[0])
        panel.set(yticks=range(len(arms)), yticklabels=arms, xlabel="mean@8, % of 4,000 problems, a dot a seed")
        panel.invert_yaxis()


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"


def _over_seeds(values: Mapping[int, float]) -> str:
    if not values:
        return "–"
    found = summary_of_shares(values)
    interval = "" if found.low is None or found.high is None else f" [{100 * found.low:.1f}, {100 * found.high:.1f}]"
    return f"{_percent(found.mean)}{interval}"


def _points(value: float, low: float | None, high: float | None) -> str:
    interval = "" if low is None or high is None else f" [{100 * low:+.1f}, {100 * high:+.1f}]"
    return f"{100 * value:+.1f}{interval}"


def _mean(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    return form.format(fmean(known)) if known else "–"


def main() -> None:
    results = Path("bench/studies/results/reinforce.json")
    parser = argument_parser(
        __doc__,
        seeds=list(range(1, 11)),
        store=Path(".nautile/reinforce"),
        results=results,
        figure=ROOT / "docs/results/rl-balance.svg",
        first=0,
    )
    parser.add_argument("phase", choices=("rates", "arms", *FURTHER, "report"))
    arguments = parser.parse_args()
    store, cells = Store(arguments.store.absolute()), (read_json(arguments.results) or {"cells": []})["cells"]
    collect(store, cells, arguments.results)
    if arguments.phase == "rates":
        run_rates(store, cells, arguments.results, [seed for seed in arguments.seeds if seed in RATE_SEEDS])
    elif arguments.phase == "arms":
        run_arms(store, cells, arguments.results, arguments.seeds, arguments.first)
    elif arguments.phase in FURTHER:
        seeds = [seed for seed in arguments.seeds if seed in FURTHER_SEEDS]
        run_further(store, cells, arguments.results, seeds, arguments.phase)
    if cells:
        arguments.figure.write_text(figure(cells), encoding="utf-8")
    print(markdown(cells), flush=True)


if __name__ == "__main__":
    main()
