"""Topics of Wikipedia articles by a tuned checkpoint, every method beside its baselines on the same rows.

    python bench/uses_labels.py --checkpoint FOLDER [--work FOLDER] [--seeds 3] [--asked 400] [--write docs]

Eleven topics, articles held out; the shots and the order of the rows are drawn anew for each seed, and all arms learn
from the same rows of a seed. Intervals: 95 %, over seeds and test rows. An arm that is done is a file of the work
folder with its scores, its speed and the conditions that it ran under (load, processor seconds), so that a run that was
stopped continues, and an arm is measured again by removing its file. Rows per second: of processor time, which is one
core's, after a first call. Writes results-uses-labels.md and .json.
"""

import json
import os
import time
from pathlib import Path

from measure import options

from common.files import write_json
from common.text import markdown_table
from configs.tune import TuneConfig
from data.labelled.splits import read_splits
from evals.labelling.baselines import baseline
from evals.labelling.predictor import LabelPredictor
from evals.labelling.titles import TITLES, interval, shots_shown
from evals.labelling.tuner import LabelTuner, LabelTuning, draw_shots
from model.weights.files import load_weights

SHOTS = (8, 64)
TIMED = 100  # texts
TRAINED = {"epochs": 3, "batch_rows": 16, "longest": 80, "instructions": "Topic?"}
OPTIMIZER = {"final_learning_rate": 0.0, "weight_decay": 0.0, "warmup_steps": 10}
ARMS = {
    "head on the last state": {"method": "head", "pooling": "last", "baselines": ("majority", "tfidf", "minilm")},
    "head on the mean state": {"method": "head", "pooling": "mean"},
    "labels' likelihood": {"method": "verbalised", "shots": (0,)},
    "all weights": {"method": "full", **TRAINED, "optimizer": {"learning_rate": 1e-3, **OPTIMIZER}},
    "LoRA": {"method": "lora", **TRAINED, "optimizer": {"learning_rate": 5e-3, **OPTIMIZER}},
}


def main():
    parser = options(__doc__, checkpoint=None, work=Path("uses-labels"), seeds=3, asked=400, write=None)
    asked = parser.parse_args()
    params, model, tokenizer = load_weights(Path(asked.checkpoint))
    arms = []
    for name, fields in ARMS.items():
        work = Path(asked.work) / name.replace(" ", "-")
        work.mkdir(parents=True, exist_ok=True)
        kept = work / "arm.json"
        if not kept.is_file():
            write_json(kept, measured(name, fields, params, model, tokenizer, work, asked))
        arms.append(json.loads(kept.read_text(encoding="utf-8")))
        print(name, arms[-1]["conditions"], flush=True)
    result = {
        "rows": [row for arm in arms for row in arm["rows"]],
        "speeds": {title: speed for arm in arms for title, speed in arm["speeds"].items()},
        "conditions": {name: arm["conditions"] for name, arm in zip(ARMS, arms, strict=True)},
        "splits": arms[0]["splits"],
    }
    page = report(result, asked.seeds)
    print(page)
    if asked.write:
        (Path(asked.write) / "results-uses-labels.json").write_text(json.dumps(result, indent=1) + "\n")
        (Path(asked.write) / "results-uses-labels.md").write_text(page)


def measured(name, fields, params, model, tokenizer, work, asked):
    """The scores and speeds of one arm, with its baselines, and what the machine did meanwhile."""
    began = time.time(), time.process_time(), os.getloadavg()[0]
    config = TuneConfig.model_validate(
        {"data": "wikipedia_topics", "longest": 96, "shots": SHOTS, "seeds": asked.seeds, "most_asked": asked.asked,
         "baselines": (), **fields}
    )  # fmt: skip
    splits = read_splits(config, work, {})
    run = LabelTuning(params, model, tokenizer, config, splits, work, {"bench": name})
    tuner = LabelTuner(run, work / "checkpoint")
    runs = tuner.arms()
    tuner.finish(runs)
    rows, speeds = [], {}
    for scores in tuner.scores(runs):
        own = scores["arm"] == config.method
        rows.append({"title": f"this model: {name}" if own else TITLES[scores["arm"]], **scores})
        print(rows[-1]["title"], scores["shots"], interval(scores["accuracy"]), flush=True)
    texts = [row.text for row in tuner.test[:TIMED]]
    predictor = LabelPredictor(work / "checkpoint", config.rows_at_once)
    size = sum(file.stat().st_size for file in (work / "checkpoint").glob("*.safetensors"))
    speeds[f"this model: {name}"] = (*timed(predictor.probabilities, texts), size)
    for other in config.baselines:
        fitted = baseline(other, None)
        learnt = draw_shots(splits.train, max(SHOTS), 0)
        fitted.fit([row.text for row in learnt], tuner.targets(learnt), len(splits.labels))
        speeds[TITLES[other]] = (*timed(fitted.logits, texts), fitted.size)
    conditions = {
        "cores": os.cpu_count(),
        "load": [round(began[2], 1), round(os.getloadavg()[0], 1)],
        "wall_s": round(time.time() - began[0]),
        "cpu_s": round(time.process_time() - began[1]),
    }
    counts = {part: len(getattr(splits, part)) for part in ("train", "test")}
    return {"rows": rows, "speeds": speeds, "conditions": conditions, "splits": counts}


def timed(call, texts):
    """(rows per second of processor time, of the clock), after a first call that compiles."""
    call(texts)
    began = time.process_time(), time.perf_counter()
    call(texts)
    ended = time.process_time(), time.perf_counter()
    return tuple(len(texts) / max(end - begin, 1e-6) for begin, end in zip(began, ended, strict=True))


def report(result, seeds):
    """The page of the results, best macro-F1 first within each number of shots."""
    columns = ["Arm", "Shots of each label", "Accuracy", "Macro-F1", "Calibration error", "before", "Accuracy covered"]
    ordered = sorted(result["rows"], key=lambda row: (row["shots"], -row["macro_f1"]["value"]))
    lines = [
        [
            row["title"], shots_shown(row), interval(row["accuracy"]), interval(row["macro_f1"]),
            f"{100 * row['ece']:.1f}", f"{100 * row['ece_uncalibrated']:.1f}",
            "—" if row["accuracy_covered"] is None else f"{100 * row['accuracy_covered']:.1f}",
        ]
        for row in ordered
    ]  # fmt: skip
    speeds = [[title, f"{cpu:,.0f}", f"{size / 2**20:,.2f}"] for title, (cpu, _, size) in result["speeds"].items()]
    conditions = [
        [name, *(f"{load:.1f}" for load in arm["load"]), f"{arm['wall_s']:,}", f"{arm['cpu_s']:,}"]
        for name, arm in result["conditions"].items()
    ]
    cores = next(iter(result["conditions"].values()))["cores"]
    counts = result["splits"]
    return f"""# Topics of articles: the tuned model and its baselines

Measured by `python bench/uses_labels.py` with the checkpoint of `make run` (0.9 M parameters): 11 topics of
{counts["train"]:,} articles to draw shots from, {result["rows"][0]["rows"]} of {counts["test"]:,} held-out articles
asked, {seeds} seeds, each with shots and an order of its own. 95 % intervals over seeds and articles. Every arm is
calibrated by one temperature fitted on the validation articles; "before" is without it. "Accuracy covered": of the
articles over the threshold that lets 80 % of the validation articles through. A head and the likelihoods see the first
96 tokens of an article, all weights and LoRA 80, the baselines all of it. The articles are in part what the checkpoint
was pretrained on.

{markdown_table(columns, lines)}

Rows per second of processor time (one core), {TIMED} articles after a first call, and what has to be kept to answer:

{markdown_table(["Arm", "Rows / s", "MiB"], speeds)}

What each arm ran under, on {cores} cores; the first has the baselines:

{markdown_table(["Arm", "Load before", "Load after", "Seconds", "CPU s"], conditions)}
"""


if __name__ == "__main__":
    main()
