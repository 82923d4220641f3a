"""The paper's Table 1 at a size that two CPU cores can train: which of the stages gain, and by how much.

    python bench/rl/table1.py [--seeds 1 2 3] [--config bench/rl/table1.toml] [--store .nautile/table1] [--out DIR]
    python bench/rl/table1.py --map RATE [RATE ...]      plain and balanced GRPO at other learning rates, one seed

A model is pretrained until it solves some 20 to 40 % of held-out problems. From it, with the same number of sampled
completions each: plain GRPO, gradient-balanced GRPO, scored self-distillation; then self-distillation after balanced
GRPO, the paper's order. (Stage 1 is left out, because the embedded judge is not able to judge.) Only
the sampling differs between seeds: the start and the held-out problems are the same.

Each part is a stage of the pipeline with its artifacts in the store, so after a stop the bench continues and repeats
nothing. Accuracy is pass@1, of the likeliest completion (greedy) and of one drawn at temperature 1; a gain that comes
only from a sharper distribution shows in the second alone.
"""

import argparse
import json
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.rl.table1_results import Arm, Measured, write
from common.files import read_json
from configs.load import load
from configs.schema import RunConfig
from flows.dag import build_dag
from store.artifacts import Store
from store.catalog import Catalog
from tasks.engine.attempt import run_stage
from tasks.engine.stage import RunContext

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Bench:
    """Runs stages of one configuration and reads their metrics."""

    config: RunConfig
    store: Store
    run: str

    def stage(self, name: str, label: str, inputs: dict[str, str], seed: int, **changes: Any) -> dict[str, str]:
        """Run one stage with `seed` and `changes` to its section; returns artifact kind -> id."""
        steps = [step for step in build_dag(self.config) if step.stage.name == name]
        step = next((step for step in steps if step.label == label), steps[0])
        # Only the seeds of this stage change: they are in the key, so every arm and seed is its own artifact.
        section = step.section | {"seeds": dict.fromkeys(step.section.get("seeds", {}), seed)}
        section[name] = section[name] | changes
        context = RunContext(self.run, str(self.store.root), label=label, config=self.config.name)
        print(f"  {label}", flush=True)
        return run_stage(step.stage, section, inputs, context)

    def start(self) -> str:
        """The pretrained checkpoint that every arm starts from."""
        sources = {
            source.name: self.stage("ingest", f"ingest:{source.name}", {}, self.config.seed)["tokens"]
            for source in self.config.ingest.sources
        }
        return self.stage("pretrain", "pretrain", sources, self.config.seed)["checkpoint"]

    def evaluated(self, checkpoint: str, label: str, temperature: float) -> list[bool]:
        """Right or wrong on each held-out problem, by the strict grader."""
        inputs, seed = {"checkpoint": checkpoint}, self.config.seeds.evaluation
        outputs = self.stage("evaluate", f"evaluate:{label}@{temperature:g}", inputs, seed, temperature=temperature)
        rows = (self.store.get(outputs["evaluation"]).path / "rows.jsonl").read_text(encoding="utf-8").splitlines()
        return [row["strict"] for row in sorted(map(json.loads, rows), key=lambda row: row["index"])]

    def curves(self, artifact: str) -> dict[str, list[tuple[int, float]]]:
        """Every metric of the execution that published an artifact, by step."""
        catalog = Catalog(self.store)
        catalog.ingest()
        query = catalog.query(
            "SELECT name, step, value FROM metrics WHERE execution = ? ORDER BY name, step",
            [self.store.get(artifact).recorded_execution],
        )
        curves: dict[str, list[tuple[int, float]]] = {}
        for row in query:
            curves.setdefault(row["name"], []).append((row["step"], row["value"]))
        return curves

    def measured(self, checkpoint: str, label: str) -> Measured:
        facts = read_json(self.store.get(checkpoint).path / "manifest.json")["facts"]
        greedy, sampled = (self.evaluated(checkpoint, label, temperature) for temperature in (0.0, 1.0))
        return Measured(greedy, sampled, self.curves(checkpoint), facts)


def table(bench: Bench, seeds: list[int]) -> list[Arm]:
    """The start and every arm with every seed."""
    start = bench.start()
    arms = [Arm("start", "pretrained (the start)", None, [bench.measured(start, "start")])]
    arms += [Arm(name, title, start_name, []) for name, title, start_name in ARMS]
    arms_by_name = {arm.name: arm for arm in arms}
    for seed in seeds:
        # An arm that starts from another one needs that arm's checkpoint of the same seed, so `ARMS` lists it later.
        checkpoints: dict[str, str] = {"start": start}
        for name, _, start_name in ARMS:
            label = f"{name}.{seed}"
            if name.startswith("self_distill"):
                checkpoint = bench.stage("self_distill", label, {"checkpoint": checkpoints[start_name]}, seed)[
                    "checkpoint"
                ]
            else:
                changes = {"objective": name}
                checkpoint = bench.stage("reason", label, {"checkpoint": checkpoints[start_name]}, seed, **changes)[
                    "checkpoint"
                ]
            checkpoints[name] = checkpoint
            arms_by_name[name].runs.append(bench.measured(checkpoint, label))
    return arms


# Name, title, and the arm that it starts from.
ARMS = (
    ("plain", "plain GRPO", "start"),
    ("balanced", "gradient-balanced GRPO (stage 2)", "start"),
    ("self_distill", "scored self-distillation alone", "start"),
    ("self_distill_after", "stage 2, then scored self-distillation (stage 3)", "balanced"),
)


def rates(bench: Bench, values: list[float]) -> list[Arm]:
    """Plain and balanced GRPO at each learning rate, with the first seed."""
    start = bench.start()
    arms = [Arm("start", "pretrained (the start)", None, [bench.measured(start, "start")])]
    for rate in values:
        policy = bench.config.reason.policy.model_dump(mode="json")
        policy["optimizer"] |= {"learning_rate": rate}
        for name in ("plain", "balanced"):
            label = f"{name}.rate{rate:g}"
            checkpoint = bench.stage("reason", label, {"checkpoint": start}, 1, objective=name, policy=policy)[
                "checkpoint"
            ]
            arms.append(Arm(label, f"{name} GRPO at {rate:g}", "start", [bench.measured(checkpoint, label)]))
    return arms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default=str(HERE / "table1.toml"))
    parser.add_argument("--store", default=".nautile/table1")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--map", type=float, nargs="+", metavar="RATE")
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / "docs" / "results")
    arguments = parser.parse_args()
    store = Store(Path(arguments.store).absolute())
    store.prepare()
    bench = Bench(load(arguments.config), store, f"table1-{uuid.uuid4().hex[:8]}")
    arms = rates(bench, arguments.map) if arguments.map else table(bench, arguments.seeds)
    name = f"rl-{'rates' if arguments.map else 'table'}{bench.config.name.removeprefix('table1')}"
    print(write(arms, arguments.out, name))


if __name__ == "__main__":
    main()
