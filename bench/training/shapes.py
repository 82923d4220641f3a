"""The paper's open question (§6): the ratio of SCA to Transformer layers, the number of spectral samples, and the grid.

    python bench/training/shapes.py [--store .nautile] [--work .nautile/shapes] [--seeds 1 2 3] [--report]

Each arm is pretrained on the same tokens, those that the default run ingests (`nautile run local --until
ingest:answers`). The feed-forward width of the Transformer layers is set so that all arms have as many parameters as
the largest. Each arm is then evaluated greedily on the held-out problems of the default run. After a stop the bench
continues; `--report` writes docs/results/shapes.md from the finished arms.
"""

import argparse
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from scipy import stats

from common.events import silent
from common.files import read_json, write_json
from configs.load import load
from configs.model import ModelConfig
from configs.schema import RunConfig
from flows.dag import build_dag
from store.artifacts import Store

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Arm:
    """Fields of the model and of the optimizer that differ from those of the default run."""

    name: str
    model: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)


ARMS = (
    Arm("2:1, M = 2 (the paper's)"),
    Arm("0:1, 4 layers", {"pattern": "A", "blocks": 4}),
    Arm("1:1, 4 layers", {"pattern": "SA", "blocks": 2}),
    Arm("3:1, 4 layers", {"pattern": "SSSA", "blocks": 1}),
    Arm("2:1, M = 1", {"spectral_samples": 1}),
    Arm("2:1, M = 4", {"spectral_samples": 4}),
    Arm("2:1, M = 2, θ at 10 times the rate", {}, {"grid_rate": 10.0}),
)


def with_equal_parameters(base: ModelConfig, changes: dict[str, Any]) -> ModelConfig:
    """`base` with `changes`, and the feed-forward width at which it has as many parameters as the largest arm."""
    from model.nautile import parameter_counts

    def size(width: int, fields: dict[str, Any]) -> int:
        return sum(parameter_counts(base.model_copy(update={**fields, "feed_forward": width})).values())

    target = max(size(base.feed_forward, arm.model) for arm in ARMS)
    # Parameters grow linearly with the feed-forward width, so two sizes give the width of the third.
    parameters_per_column = size(base.feed_forward + 1, changes) - size(base.feed_forward, changes)
    width = base.feed_forward + round((target - size(base.feed_forward, changes)) / parameters_per_column)
    return base.model_copy(update={**changes, "feed_forward": width})


def train(arm: Arm, seed: int, config: RunConfig, sources: dict[str, Path], work: Path) -> dict[str, Any]:
    """Train one arm with one seed; returns bits per byte by source, problems solved, parameters, and θ's change."""
    from bench.rl.study import Study, packed
    from data.sources.reasoning_gym import problems
    from data.tokenizer import tokenizer_for
    from model.layers.sca import spectrum
    from model.nautile import initialise
    from model.training.loop import Pretraining
    from model.training.loop import train as pretrain
    from model.weights.files import load_weights

    model = with_equal_parameters(config.model, arm.model)
    optimizer = config.pretrain.optimizer.model_copy(update=arm.optimizer)
    # No validation or samples on the way, which no figure here uses; the validation at the end stays.
    settings = config.pretrain.model_copy(
        update={"optimizer": optimizer, "validate_every": 10**6, "sample_every": 10**6, "save_every": 200}
    )
    out = work / "weights"
    pretraining = Pretraining(
        settings, model, config.tokenizer, sources, data_seed=seed, weights_seed=seed, train_on=config.train_on
    )
    facts = pretrain(pretraining, work, out, silent)
    params, _, tokenizer = load_weights(out)
    held_out_config = config.evaluate.held_out
    assert held_out_config is not None
    drawn = problems(held_out_config.tasks, config.seeds.evaluation, "held_out")
    held_out = [problem for problem, _ in zip(drawn, range(held_out_config.count), strict=False)]
    # Only the evaluation of the study is used: its sampling and its grader.
    solved = Study(params, model, tokenizer_for(tokenizer), [], held_out).solved(params, 0.0)
    grids: dict[str, list[float]] = {}
    for name in (name for letter, name in model.layers if letter == "S"):
        # θ before training follows from the seed, so it need not have been stored.
        initial_block = initialise(model, seed)["blocks"][name]
        initial, trained = (
            np.asarray(spectrum(block_params, model).grid_KHM)
            for block_params in (initial_block, params["blocks"][name])
        )
        # θ of the smallest sample, which is trainable; the largest is 3 by construction.
        grids[name] = [round(float(np.median(grid[..., 0])), 5) for grid in (initial, trained)]
    return {
        "arm": arm.name,
        "seed": seed,
        "parameters": facts["parameters"],
        "feed_forward": model.feed_forward,
        "bits_per_byte": {name: values["bits_per_byte"] for name, values in facts["validation"].items()},
        "tokens": facts["tokens"],
        "solved": packed(solved),
        "share": sum(solved) / len(solved),
        "grid": grids,
    }


def report(rows: list[dict[str, Any]], names: list[str]) -> str:
    """The table: each arm's means over its seeds, and its difference from the first arm, paired by seed."""
    base = {row["seed"]: row for row in rows if row["arm"] == ARMS[0].name}
    lines = [
        "# Layers, samples and the grid at the local size",
        "",
        f"By `bench/training/shapes.py`: {rows[0]['tokens']:,} tokens, about {rows[0]['parameters']:,} parameters "
        "in every arm (the feed-forward width differs). Bits per byte of held-out text, and the share of the held-out "
        "problems that a base model solves greedily. Differences from the first arm are paired by seed, with 95 % "
        "intervals by Student's t.",
        "",
        f"| arm | seeds | parameters | {' | '.join(f'bits per byte, {name}' for name in names)} | difference | "
        "problems, % | difference |",
        "| --- " * (6 + len(names)) + "|",
    ]
    for arm in ARMS:
        own = [row for row in rows if row["arm"] == arm.name]
        if not own:
            continue
        means = [f"{statistics.fmean(row['bits_per_byte'][name] for row in own):.4f}" for name in names]
        # Differences from the first arm, paired by seed.
        pairs = [(row, base[row["seed"]]) for row in own if row["seed"] in base and arm is not ARMS[0]]
        bits = [a["bits_per_byte"][names[0]] - b["bits_per_byte"][names[0]] for a, b in pairs]
        points = [100 * (a["share"] - b["share"]) for a, b in pairs]
        share = f"{100 * statistics.fmean(row['share'] for row in own):.1f}"
        cells = [arm.name, str(len(own)), f"{own[0]['parameters']:,}", *means, _difference(bits, 4), share]
        lines.append(f"| {' | '.join([*cells, _difference(points, 1)])} |")
    lines += [
        "",
        "θ of the smallest spectral sample, median over heads and dimensions, before and after training (first seed):",
        "",
    ]
    for arm in ARMS:
        for row in (row for row in rows if row["arm"] == arm.name and row["seed"] == rows[0]["seed"]):
            moved = "; ".join(f"{name} {first:.4f} to {last:.4f}" for name, (first, last) in row["grid"].items())
            lines.append(f"- {arm.name}: {moved or 'no SCA layer'}")
    return "\n".join(lines) + "\n"


def _difference(values: list[float], digits: int) -> str:
    if len(values) < 2:
        return f"{values[0]:+.{digits}f} (one seed)" if values else "-"
    mean, half = statistics.fmean(values), stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return f"{mean:+.{digits}f} [{mean - half:+.{digits}f}, {mean + half:+.{digits}f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--store", default=".nautile")
    parser.add_argument("--work", type=Path, default=ROOT / ".nautile" / "shapes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    config, store = load("local"), Store(Path(arguments.store).absolute())
    keys = {step.label: step.key for step in build_dag(config)}
    names = ["synth", "answers"]
    # Two of the three phases: these figures do not measure anything that web text teaches.
    phases = tuple(
        phase.model_copy(update={"tokens": tokens, "mixture": {name: 1.0}})
        for phase, name, tokens in zip(config.pretrain.phases[1:], names, (400_000, 200_000), strict=True)
    )
    config = config.model_copy(update={"pretrain": config.pretrain.model_copy(update={"phases": phases})})
    sources = {name: store.get(f"tokens/{keys[f'ingest:{name}']}").path for name in names}
    for seed in [] if arguments.report else arguments.seeds:
        for number, arm in enumerate(ARMS):
            work = arguments.work / f"{number}-{seed}"
            if not (work / "row.json").exists():
                work.mkdir(parents=True, exist_ok=True)
                row = train(arm, seed, config, sources, work)
                write_json(work / "row.json", row)
                print(f"{arm.name}, seed {seed}: {row['bits_per_byte']}, {100 * row['share']:.1f} % solved", flush=True)
    rows = [plain for path in sorted(arguments.work.glob("*/row.json")) if (plain := read_json(path))]
    rows.sort(key=lambda row: (row["seed"], row["arm"]))
    if rows:
        (ROOT / "docs" / "results" / "shapes.md").write_text(report(rows, names), encoding="utf-8")


if __name__ == "__main__":
    main()
