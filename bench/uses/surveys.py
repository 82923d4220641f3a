"""Surveys of real people, answered by a checkpoint in their place, beside every baseline and the people themselves.

    python bench/uses/surveys.py CHECKPOINT [--people 80] [--seeds 3] [--write docs/results/uses-surveys.md]

Half of the respondents of each survey (ANES 1996, Redbook 1974) are held out, drawn again for each seed; every arm is
evaluated on `--people` of them. The regression and the forest are fitted on the other half. Finished measurements are
stored in the folder `--work`, so that a stopped bench continues.
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

from bench.measure import argument_parser
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
    parser = argument_parser(__doc__, people=80, seeds=3, write=None, work="")
    parser.add_argument("checkpoint", type=Path)
    arguments = parser.parse_args()
    work = Path(arguments.work or tempfile.mkdtemp())
    work.mkdir(parents=True, exist_ok=True)
    parts = []
    for name in GROUPS:
        runs = []
        for seed in range(arguments.seeds):
            seed_file = work / f"{name}-{seed}.json"
            if not seed_file.exists():
                write_json(seed_file, measure_seed(arguments.checkpoint, name, seed, arguments.people, work))
            runs.append(json.loads(seed_file.read_text(encoding="utf-8")))
        parts += tables(name, runs)
    lines = [
        "# Surveys: a small model in the place of real people",
        "",
        f"Measured by `python bench/uses/surveys.py`: {runs[0]['model']} ({runs[0]['parameters']:,} parameters), "
        f"{arguments.people} held-out people of each survey, {arguments.seeds} seeds (of who is held out, the orders, "
        f"the forest), {os.cpu_count()} CPU cores shared with other programs. Mean over the seeds, and its 95 % "
        "interval (Student's t). All arms of a seed are evaluated on the same people.",
        "",
        *parts,
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.write:
        Path(arguments.write).write_text(text, encoding="utf-8")


def measure_seed(checkpoint, name, seed, people, work):
    """Scores of all arms for one survey and seed, the position bias, and processor seconds."""
    survey = load_survey(name).model_copy(update={"split_seed": seed})
    config = SimulateConfig(n=people, by=GROUPS[name], seed=seed)
    respondents = read_respondents(survey, work)
    chosen, places = choose_people(survey, config, respondents, work)
    scorer = OpinionScorer(checkpoint, survey, config)
    start = time.process_time()
    opinions = scorer.opinions(chosen)
    seconds = time.process_time() - start
    # Kept per order of the options, because the position bias is what differs between the orders; their mean is the
    # answer.
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
    """The number of parameters in a checkpoint."""
    with safe_open(folder / WEIGHTS, framework="numpy") as tensors:
        return sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118


def tables(name, runs):
    """The Markdown lines of one survey."""
    columns = [figure for figure in FIGURES if any(run["scores"]["model"].get(figure) for run in runs)]
    rows = [[ARMS[arm], *(over_seeds(runs, arm, figure) for figure in columns)] for arm in ARMS]
    bias, spread = (np.mean([run[field] for run in runs]) for field in ("bias", "spread"))
    seconds = ", ".join(f"{run['seconds']:.0f}" for run in runs)
    better_baselines = [
        ARMS[arm].partition(":")[0]
        for arm in ARMS
        # The humans are the ceiling and no baseline.
        if arm not in ("model", "humans")
        and mean(runs, arm, "group_similarity") >= mean(runs, "model", "group_similarity")
    ]
    verdict = (
        f"At least as close to humans as the model, by group: {'; '.join(better_baselines)}."
        if better_baselines
        else ""
    )
    return [
        f"## {runs[0]['title']}",
        "",
        markdown_table(["", *(FIGURES[figure] for figure in columns)], rows),
        "",
        verdict or "By group the model is closer to humans than every baseline.",
        f"Groups by {', '.join(GROUPS[name])}; baselines use the answers of {runs[0]['train']:,} other people. "
        f"Position bias of the model {bias:.3f}, spread between orders {spread:.3f}. {runs[0]['prompts']:,} "
        f"prompts a seed took {seconds} processor seconds, compilation included.",
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
