"""The default run with several seeds: does each reinforcement stage gain over the one before it?

    python bench/rl/ladder.py [--seeds 1 100001 200001 ...] [--config local] [--store .nautile/ladder]
        [--out docs/results]

Runs the whole pipeline of a configuration once for each seed, in one store; after a stop it continues. A seed changes
everything that is drawn: data, weights, samples, the held-out problems. The gain of a stage is measured on the same
problems before and after it, greedily, with its 95 % interval and McNemar's exact p. All seeds are reported. They lie
far apart, because problem i of seed s + 1 is problem i + 1 of seed s. The settings were chosen on problems of the guard
split (docs/log.md), which are other problems.
"""

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from common.errors import ConfigError
from common.files import read_json
from configs.load import load
from evals.running.rows import read_rows
from evals.tables.ladder import Ladder, gain_with_interval, ladder, p_value
from evals.tables.results import with_interval
from flows.dag import build_dag
from store.artifacts import Store

ROOT = Path(__file__).parents[2]
STAGES = ("pretrain", "align", "reason", "self_distill")


@dataclass(frozen=True)
class SeedResult:
    """The ladder of one seed, and the seconds of its run without reused steps."""

    seed: int
    ladder: Ladder
    seconds: float

    @property
    def gains(self) -> list[dict[str, Any]]:
        """The paired test of each stage against the one before it."""
        return [entry["test"] for entry in self.ladder["stages"][1:]]


def run_seed(config: str, seed: int, store: Store) -> SeedResult:
    """Run the pipeline with one seed, reusing what is finished. Raises `CalledProcessError` if it fails."""
    path = store.root / f"ladder-{seed}.toml"
    base = config if "/" not in config else str(Path(config).absolute())
    # A file per seed and not `--set`, so that the command in a message of this run works as it is.
    path.write_text(f'extends = "{base}"\nname = "ladder-{seed}"\nseed = {seed}\n', encoding="utf-8")
    start = time.perf_counter()
    environment = os.environ | {"NAUTILE_STORE": str(store.root)}
    subprocess.run([sys.executable, "-m", "flows.cli.main", "run", str(path)], cwd=ROOT, env=environment, check=True)
    seconds = time.perf_counter() - start
    # By key and not "the newest": the store holds the evaluations of all seeds.
    keys = {step.label: step.key for step in build_dag(load(str(path)))}
    evaluations = {stage: store.get(f"evaluation/{keys[f'evaluate:{stage}']}").path for stage in STAGES}
    seed_ladder = ladder(
        {stage: read_json(path / "scores.json") for stage, path in evaluations.items()},
        {stage: read_rows(path / "rows.jsonl") for stage, path in evaluations.items()},
    )
    if seed_ladder is None:
        raise ConfigError(f"{config}: [evaluate] asks no benchmark of Table 1 and no held-out problems")
    return SeedResult(seed, seed_ladder, seconds)


def markdown(results: list[SeedResult]) -> str:
    """The table of all seeds, and for each stage how many of them gain beyond their interval."""
    count = results[0].ladder["stages"][0]["score"]["n"]
    lines = [
        f"Percent of {count:,} held-out problems solved greedily (strict grader), with 95 % intervals: Wilson for "
        "the start, paired by problem for the gains.",
        "",
        "| seed | pretrained | align, points | reason, points | self_distill, points | at the end |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        first, last = result.ladder["stages"][0]["score"], result.ladder["stages"][-1]["score"]
        gains = [f"{gain_with_interval(test)}, p {p_value(test)}" for test in result.gains]
        cells = [str(result.seed), with_interval(first), *gains, f"{100 * last['accuracy']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    for number, stage in enumerate(STAGES[1:]):
        beyond = sum(result.gains[number]["low"] > 0 for result in results)
        lines.append(f"- {stage}: the gain exceeds its interval with {beyond} of {len(results)} seeds.")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="local")
    parser.add_argument("--store", default=".nautile/ladder")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 100_001, 200_001, 300_001, 400_001])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    arguments = parser.parse_args()
    store = Store(Path(arguments.store).absolute())
    store.prepare()
    results = []
    for seed in arguments.seeds:
        results.append(run_seed(arguments.config, seed, store))
        text = markdown(results)
        (arguments.out / "ladder.md").write_text(text, encoding="utf-8")
        print(text, flush=True)
        print(f"seed {seed}: {results[-1].seconds:.0f} s, without reused steps", flush=True)


if __name__ == "__main__":
    main()
