"""The default run with several seeds: does each reinforcement stage gain over the one before it?

    python bench/ladder.py [--seeds 1 100001 200001 ...] [--config local] [--store .nautile/ladder] [--out docs]

Runs the whole pipeline of a configuration once for each seed, in one store: stopped and started again, it
goes on where it was. A seed changes all that is drawn: data, weights, samples, the held-out problems. The gain of
a stage is taken on the same problems before and after it, greedily, with its 95 % interval and McNemar's exact p. All
seeds are reported; they lie far apart, because problem i of seed s + 1 is problem i + 1 of seed s. The settings were
chosen on problems of the guard split (docs/log.md), so none of these.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from configs.load import load
from evals.scoring.intervals import Paired, paired, wilson
from flows.dag import build_dag
from store.artifacts import Store

ROOT = Path(__file__).parents[1]
STAGES = ("pretrain", "align", "reason", "self_distill")
BENCHMARK = "held_out"


@dataclass(frozen=True)
class SeedResult:
    """Right or wrong on each held-out problem after every stage, by stage, and the seconds that the run took."""

    seed: int
    right: dict[str, list[bool]]
    seconds: float

    def gain(self, stage: str) -> Paired:
        """The gain of a stage over the one before it, problem by problem."""
        return paired(self.right[STAGES[STAGES.index(stage) - 1]], self.right[stage])


def run_seed(config: str, seed: int, store: Store) -> SeedResult:
    """Run the pipeline with one seed, reusing what is finished. Raises `CalledProcessError` if it fails."""
    path = store.root / f"ladder-{seed}.toml"
    base = config if "/" not in config else str(Path(config).absolute())
    path.write_text(f'extends = "{base}"\nname = "ladder-{seed}"\nseed = {seed}\n', encoding="utf-8")
    began = time.perf_counter()
    environment = os.environ | {"NAUTILE_STORE": str(store.root)}
    subprocess.run([sys.executable, "-m", "flows.cli.main", "run", str(path)], cwd=ROOT, env=environment, check=True)
    seconds = time.perf_counter() - began
    keys = {step.label: step.key for step in build_dag(load(str(path)))}
    right = {}
    for stage in STAGES:
        file = store.get(f"evaluation/{keys[f'evaluate:{stage}']}").path / "rows.jsonl"
        with file.open(encoding="utf-8") as lines:
            rows = [row for row in map(json.loads, lines) if row["benchmark"] == BENCHMARK]
        right[stage] = [row["strict"] for row in sorted(rows, key=lambda row: row["index"])]
    return SeedResult(seed, right, seconds)


def markdown(results: list[SeedResult]) -> str:
    """The table of all seeds, and for each stage how many of them gain beyond their interval."""
    count = len(results[0].right["pretrain"])
    lines = [
        f"Percent of {count:,} held-out problems solved greedily (strict grader), with 95 % intervals: Wilson for "
        "the start, paired by problem for the gains.",
        "",
        "| seed | pretrained | align, points | reason, points | self_distill, points | at the end |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        start = result.right["pretrain"]
        low, high = wilson(sum(start), len(start))
        gains = [_gain(result.gain(stage)) for stage in STAGES[1:]]
        end = result.right["self_distill"]
        cells = [f"{100 * sum(start) / len(start):.1f} [{100 * low:.1f}, {100 * high:.1f}]", *gains]
        lines.append(f"| {result.seed} | {' | '.join(cells)} | {100 * sum(end) / len(end):.1f} |")
    lines.append("")
    for stage in STAGES[1:]:
        beyond = sum(result.gain(stage).low > 0 for result in results)
        lines.append(f"- {stage}: the gain exceeds its interval with {beyond} of {len(results)} seeds.")
    return "\n".join(lines) + "\n"


def _gain(test: Paired) -> str:
    return f"{100 * test.lead:+.1f} [{100 * test.low:+.1f}, {100 * test.high:+.1f}], p {test.p:.2g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="local")
    parser.add_argument("--store", default=".nautile/ladder")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 100_001, 200_001, 300_001, 400_001])
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    options = parser.parse_args()
    store = Store(Path(options.store).absolute())
    store.prepare()
    results = []
    for seed in options.seeds:
        results.append(run_seed(options.config, seed, store))
        text = markdown(results)
        (options.out / "results-ladder.md").write_text(text, encoding="utf-8")
        print(text, flush=True)
        print(f"seed {seed}: {results[-1].seconds:.0f} s, what was reused included", flush=True)


if __name__ == "__main__":
    main()
