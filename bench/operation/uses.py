"""`nautile classify` on 50,000 rows and `nautile simulate` with 2,000 personas: rows a second, memory, and a kill.

    nice -n 15 python bench/operation/uses.py CHECKPOINT [--rows 50000] [--personas 2000] [--others 5000]
        [--parts others tenth whole]

CHECKPOINT is a folder; a head is tuned on it first if it has none. All processes of a command are killed by SIGKILL
when half of the rows are saved, and the same command resumes; a tenth of the rows is also done undisturbed, and must be
the same bytes. Memory is the peak of the step's process. Beside classify, on `--others` of the same rows: TF-IDF with a
logistic regression of scikit-learn, and the head's export to onnxruntime at 32 and at 8 bits. Rows a second are of
processor time, which other programs change little.
"""

import csv
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.measure import argument_parser, print_rows, write_results
from nautile.data.label_set import LABELS
from nautile.data.sources.wikipedia import articles
from nautile.store.artifacts import Store
from nautile.uses.labelled.config import TuneConfig
from nautile.uses.labelled.predictor import LabelPredictor
from nautile.uses.labelled.rows import read_rows
from nautile.uses.tune.splits import split_rows
from nautile.uses.tune.tuner import baseline, draw_shots

SHOTS = 16
POLL_S = 0.1
ROWS, OPINIONS = "rows.parquet", "opinions.parquet"
TUNING = f"""
[tune]
data = "wikipedia_topics"
shots = [{SHOTS}]
seeds = 1
longest = 64
most_asked = 100
baselines = []
"""
SURVEY = """
name = "parks"
title = "Parks in our town"
persona = "I am {age} years old and live in the {part} of the town."

[[questions]]
name = "more"
text = "Should there be more parks?"
options = ["no", "maybe", "yes"]
ordered = true
humans = [0.2, 0.3, 0.5]
respondents = 400
"""


def sentences(count: int) -> Iterator[str]:
    """`count` different texts: the sentences of the installed articles, numbered when they are used up."""
    parts = [part.strip() for article in articles() for part in article.extract.split(". ") if len(part) > 30]
    for number in range(count):
        again, place = divmod(number, len(parts))
        yield f"{parts[place]} ({again})" if again else parts[place]


def run(words: list[Any], store: Path, kill_after: tuple[str, int] | None = None) -> dict[str, Any]:
    """Run a command; returns its exit code, output, and wall and processor seconds and peak memory of its step.

    `kill_after`: (glob of files in the store, how many lines or files): once there are so many, all is killed.
    """
    environment = {**os.environ, "NAUTILE_STORE": str(store)}
    command = [sys.executable, "-m", "nautile.flows.cli.main", *map(str, words)]
    start, peak, seconds = time.monotonic(), 0, 0.0
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while process.poll() is None:
        time.sleep(POLL_S)
        for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
            try:
                status = Path(f"/proc/{child.pid}/status").read_text().partition("VmHWM:")[2].split()
                times = child.cpu_times()
            except (OSError, psutil.Error):
                continue
            peak = max(peak, int(status[0]) * 1024 if status else 0)
            seconds = max(seconds, times.user + times.system)
        if kill_after is not None and process.poll() is None and saved(store, *kill_after):
            for child in psutil.Process(process.pid).children(recursive=True):
                os.kill(child.pid, signal.SIGKILL)
            process.kill()
            break
    out, err = process.communicate()
    result = {"code": process.returncode, "out": out, "err": err, "wall_s": time.monotonic() - start}
    if process.returncode and kill_after is None:
        raise SystemExit(f"{' '.join(command)}: {err}")
    return result | {"processor_s": seconds, "peak_mib": peak / 2**20}


def saved(store: Path, pattern: str, enough: int) -> bool:
    """Whether the files of a pattern are so many, or one has so many lines."""
    files = list(store.glob(pattern))
    return len(files) >= enough or any(file.read_bytes().count(b"\n") >= enough for file in files)


def figures(
    words: list[Any], count: int, store: Path, rows: str, kill_after: Any = None
) -> tuple[dict[str, Any], bytes]:
    """(figures, the published file `rows`) of a command in a store; with `kill_after` killed and resumed."""
    parts = [run(words, store, kill_after)] if kill_after else []
    parts.append(run(words, store))
    file = Store(store).get(json.loads(parts[-1]["out"])["artifact"]).path / rows
    numbers = pq.read_table(file).column("persona" if rows == OPINIONS else "number").to_pylist()
    return {
        "rows": count,
        "rows_per_processor_second": round(count / sum(part["processor_s"] for part in parts), 1),
        "wall_s": [round(part["wall_s"], 1) for part in parts],
        "peak_mib": [round(part["peak_mib"]) for part in parts],
        "each_row_once": len(numbers) == len(set(numbers)) == count,
    }, file.read_bytes()


def others(checkpoint: Path, texts: list[str], folder: Path) -> list[dict[str, Any]]:
    """Rows a second of processor time of scikit-learn, this model and its exports, and the share of equal labels."""
    splits = split_rows(
        read_rows(TuneConfig.model_validate({"data": "wikipedia_topics"}).data, "label", folder), None, None,
        validation_share=0.1, test_share=0.2, leakage="refuse", labelled=True,
    )  # fmt: skip
    learnt = draw_shots(splits.train, SHOTS, 0)
    regression = baseline("tfidf", folder).fit([row.text for row in learnt], [row.target for row in learnt])
    arms: dict[str, Any] = {"TF-IDF + logistic regression (scikit-learn)": regression.predict_proba}
    folders = {"head (JAX, float32)": checkpoint}
    for bits in (32, 8):
        folders[f"head (onnxruntime, {bits} bits)"] = folder / f"onnx-{bits}"
        run(["export", checkpoint, folder / f"onnx-{bits}", "--format", "onnx", "--bits", bits], folder / "none")
    arms |= {name: LabelPredictor(place, 16).probabilities for name, place in folders.items()}
    results, reference = [], None
    for name, answer in arms.items():
        answer(texts)  # compiles a program for each length
        start = time.process_time()
        given = answer(texts).argmax(axis=1)
        seconds = time.process_time() - start
        if name.startswith("head (JAX"):
            reference = given
        equal = None if reference is None else round(float((given == reference).mean()), 4)
        results.append(
            {"arm": name, "rows": len(texts), "rows_per_processor_second": round(len(texts) / seconds, 1),
             "label_of_jax": equal}
        )  # fmt: skip
    return results


def main() -> None:
    parser = argument_parser(__doc__ or "", rows=50_000, personas=2000, others=5000, parts=["others", "tenth", "whole"])
    parser.add_argument("checkpoint", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        stores = [folder / "whole", folder / "killed"]
        (folder / "tune.toml").write_text(TUNING)
        (folder / "survey.toml").write_text(SURVEY)
        tables = {}
        for count in (options.rows // 10, options.rows):
            tables[count] = folder / f"rows-{count}.csv"
            with tables[count].open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([("text",), *((text,) for text in sentences(count))])
        people = folder / "people.csv"
        with people.open("w", newline="") as file:
            rows = [(number, 18 + number % 70, ("north", "south")[number % 2]) for number in range(options.personas)]
            csv.writer(file).writerows([("id", "age", "part"), *rows])
        for store in stores:
            Store(store).prepare()
            added = json.loads(run(["store", "add", options.checkpoint, "--json"], store)["out"])
        start = added[0]["id"]
        head = options.checkpoint
        if not (head / LABELS).exists():
            words = ["tune", folder / "tune.toml", "--set", f"tune.start={start}", "--json"]
            head = Store(stores[0]).get(json.loads(run(words, stores[0])["out"])["checkpoint"]).path
        [added] = json.loads(run(["store", "add", head, "--json"], stores[1])["out"])
        run(["store", "add", head], stores[0])  # by its content, so of the same name in both
        few, many = tables
        log, chunks = "staging/*/scratch/rows.jsonl", "staging/*/scratch/chunks/*.parquet"
        classify, simulate = (
            ["classify", added["id"]],
            ["simulate", folder / "survey.toml", start, "--personas", people],
        )
        some = options.personas // 10
        if "others" in options.parts:
            results["other ways"] = others(head, list(sentences(options.others)), folder)
            print_rows({"other ways": results["other ways"]})
        if "tenth" in options.parts:
            for name, words, count, rows, pattern, enough in (
                ("classify", [*classify, tables[few]], few, ROWS, log, few // 2),
                ("simulate", [*simulate, "-n", some], some, OPINIONS, chunks, some // 64 // 2 or 1),
            ):
                whole, content = figures([*words, "--json"], count, stores[0], rows)
                parts, again = figures([*words, "--json"], count, stores[1], rows, (pattern, enough))
                results[f"{name}, a tenth"] = whole
                results[f"{name}, a tenth, killed and resumed"] = parts | {"the_same_bytes": content == again}
                print_rows({title: results[title] for title in list(results)[-2:]})
        if "whole" in options.parts:
            for name, words, count, rows, pattern, enough in (
                ("classify", [*classify, tables[many]], many, ROWS, log, many // 2),
                ("simulate", simulate, options.personas, OPINIONS, chunks, options.personas // 64 // 2),
            ):
                title = f"{name}, killed and resumed"
                results[title], _ = figures([*words, "--json"], count, stores[1], rows, (pattern, enough))
                print_rows({title: results[title]})
    write_results(results, options.json)


if __name__ == "__main__":
    main()
