"""Surveys with real people, answered by a checkpoint in their place, beside every baseline and humans themselves.

    python bench/uses/surveys.py CHECKPOINT [--people 80] [--seeds 3] [--write docs/results/uses-surveys.md]

Of each survey (ANES 1996, Redbook 1974) half of the people are held out, anew for each seed; `--people` of them are
asked, and every arm is judged on these. The regression and the forest are fitted on the other half. A measurement that
is done is kept in the folder `--work`, so that a stopped bench goes on.
"""

import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from safetensors import safe_open
from scipy.stats import t as student

from bench.measure import options
from common.files import write_json
from common.text import markdown_table
from configs.survey import SimulateConfig
from data.surveys.reading import choose_people, load_survey, read_respondents
from evals.opinions.comparison import compare
from evals.opinions.probabilities import OpinionScorer, position_bias
from evals.opinions.tables import ARMS, FIGURES
from model.weights.files import WEIGHTS

GROUPS = {"anes96": ("age", "college", "income_from"), "fair": ("age", "has_children", "education")}
WIDTH = 0.95  # of intervals


def main():
    parser = options(__doc__, people=80, seeds=3, write=None, work="")
    parser.add_argument("checkpoint", type=Path)
    asked = parser.parse_args()
    work = Path(asked.work or tempfile.mkdtemp())
    work.mkdir(parents=True, exist_ok=True)
    parts = []
    for name in GROUPS:
        runs = []
        for seed in range(asked.seeds):
            kept = work / f"{name}-{seed}.json"
            if not kept.exists():
                write_json(kept, measured(asked.checkpoint, name, seed, asked.people, work))
            runs.append(json.loads(kept.read_text(encoding="utf-8")))
        parts += tables(name, runs)
    lines = [
        "# Surveys: a small model in the place of real people",
        "",
        f"Measured by `python bench/uses/surveys.py`: {runs[0]['model']} ({runs[0]['parameters']:,} parameters), "
        f"{asked.people} held-out people of each survey, {asked.seeds} seeds (of who is held out, the orders, the "
        f"forest), {os.cpu_count()} CPU cores with other programs beside it. Mean over the seeds, and its 95 % "
        "interval (Student's t). All arms of a seed are judged on the same people.",
        "",
        *parts,
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if asked.write:
        Path(asked.write).write_text(text, encoding="utf-8")


def measured(checkpoint, name, seed, people, work):
    """The scores of all arms for one survey and seed, the position bias, and processor seconds."""
    survey = load_survey(name).model_copy(update={"split_seed": seed})
    config = SimulateConfig(n=people, by=GROUPS[name], seed=seed)
    respondents = read_respondents(survey, work)
    chosen, places = choose_people(survey, config, respondents, work)
    scorer = OpinionScorer(checkpoint, survey, config)
    started = time.process_time()
    opinions = scorer.opinions(chosen)
    seconds = time.process_time() - started
    by_order = [np.stack([row[number].by_order for row in opinions]) for number in range(len(survey.questions))]
    summary = compare(survey, config, chosen, [orders.mean(axis=1) for orders in by_order], respondents, places)
    bias = [position_bias(values, orders) for values, orders in zip(by_order, scorer.orders, strict=True)]
    return {
        "model": scorer.name,
        "parameters": weights_in(checkpoint),
        "title": survey.title,
        "scores": summary["scores"],
        "train": summary["humans"]["train"],
        "bias": float(np.mean([entry["bias"] for entry in bias])),
        "spread": float(np.mean([entry["spread"] for entry in bias])),
        "prompts": sum(len(orders) for orders in scorer.orders) * len(chosen),
        "seconds": seconds,
    }


def weights_in(folder):
    """How many numbers a checkpoint holds."""
    with safe_open(folder / WEIGHTS, framework="numpy") as tensors:
        return sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118


def tables(name, runs):
    """Markdown lines of one survey."""
    shown = [figure for figure in FIGURES if any(run["scores"]["model"].get(figure) for run in runs)]
    rows = [[ARMS[arm], *(over_seeds(runs, arm, figure) for figure in shown)] for arm in ARMS]
    bias, spread = (np.mean([run[field] for run in runs]) for field in ("bias", "spread"))
    seconds = ", ".join(f"{run['seconds']:.0f}" for run in runs)
    ahead = [
        ARMS[arm].partition(":")[0]
        for arm in ARMS
        if arm not in ("model", "humans")
        and mean(runs, arm, "group_similarity") >= mean(runs, "model", "group_similarity")
    ]
    verdict = f"At least as close to humans as the model, by group: {'; '.join(ahead)}." if ahead else ""
    return [
        f"## {runs[0]['title']}",
        "",
        markdown_table(["", *(FIGURES[figure] for figure in shown)], rows),
        "",
        verdict or "By group the model is closer to humans than every baseline.",
        f"Groups by {', '.join(GROUPS[name])}; baselines know {runs[0]['train']:,} other people. Position bias of the "
        f"model {bias:.3f}, spread between orders {spread:.3f}. {runs[0]['prompts']:,} prompts a seed took "
        f"{seconds} processor seconds, compilation included.",
        "",
    ]


def over_seeds(runs, arm, figure):
    values = values_of(runs, arm, figure)
    if not values:
        return "–"
    if len(values) == 1:
        return f"{values[0]:.3f}"
    half = student.ppf((1 + WIDTH) / 2, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values))
    return f"{np.mean(values):.3f} ± {half:.3f}"


def mean(runs, arm, figure):
    return float(np.mean(values_of(runs, arm, figure)))


def values_of(runs, arm, figure):
    return [run["scores"][arm][figure]["value"] for run in runs if run["scores"][arm].get(figure)]


if __name__ == "__main__":
    main()
