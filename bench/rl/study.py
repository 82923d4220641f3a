"""Test of the paper's claim (§4.1, §4.3) on one core: where does plain GRPO fail and the balanced form not?

    python bench/rl/study.py [--work .nautile/study] [--only E2 E7]      train the missing cells with seed 1
    python bench/rl/study.py --repeat "E2 rate=0.0001 passes=4 ratio=False"   the arms of a setting with all five seeds
    python bench/rl/study.py --report             docs/results/rl-study.md, .json and .svg from the finished cells
    python bench/rl/study.py --work OTHER --report docs/results/rl-study-2      the same from another start

A setting is named as in the table. E0, the norms of the two gradients by k of G, comes first and trains nothing.

All cells (bench/rl/study_cells.py) start from one model, pretrained by the pipeline's stages with bench/rl/study.toml
and stored in WORK. They are trained one after the other in this process, which compiles once, by the parts of the
reinforcement stages (`GroupDraw`, `RolloutEngine`, `Learner`) without their checkpoints and events. Each cell is
evaluated on 1,000 held-out problems, greedily and at temperature 1, and written to WORK/cells: a stop loses only the
current cell. Cells of a report in docs/ with the same start are not trained again.
"""

import argparse
import sys
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import numpy as np

from bench.rl.study_cells import PREMISE, Cell, later, repeated, screen
from bench.rl.study_results import RESULTS, published, thinned, write
from common.files import read_json, write_json
from configs.load import load
from configs.model import ModelConfig
from data.chat_template import encode_prompt, parse_completion
from data.sources.reasoning_gym import Problem
from data.sources.reasoning_gym import problems as generated
from data.tokenizer import Tokenizer, tokenizer_for
from model.compile_cache import enable_compile_cache
from model.decoding.generate import Generator
from model.decoding.sampling import Sampling
from model.layers.common import Params
from model.sharding import make_mesh
from model.weights.files import load_weights
from rl.group_draw import GroupDraw
from rl.learner import Learner, rows_of
from rl.objective_registry import Balance
from rl.objectives import balance
from rl.policy_gradient import LearnerProgram
from rl.problems.load import ProblemOrder
from rl.problems.load import load as load_problems
from rl.rewards import verifiable
from rl.rollouts import Group, RolloutEngine
from rl.stage_inputs import on_device
from tasks.reason import AnswerScorer

ROOT = Path(__file__).parents[2]
CURVES = (
    "norm_positive", "norm_negative", "balance_factor", "gradient_cosine", "logprob_positive", "logprob_negative",
    "entropy", "sampler_gap", "solve_rate", "length", "zero_signal_share",
)  # fmt: skip
# What the author's decoding cached on first use: all parameters of an SCA layer except its large matrices and norms.
CACHED = frozenset({"conv", "theta", "integration", "decay", "score_scale", "score_bias", "phase_scale"})


@dataclass
class Study:
    """The start model, the problems, and the compiled gradients that cells share."""

    params: Params
    model: ModelConfig
    tokenizer: Tokenizer
    problems: Sequence[Problem]
    held_out: Sequence[Problem]
    programs: dict[tuple[Any, ...], LearnerProgram] = field(default_factory=dict)

    @classmethod
    def load(cls, checkpoint: Path) -> "Study":
        """The start model in `checkpoint` with the problems of bench/rl/study.toml, always drawn with seed 1."""
        config = load(Path(__file__).with_name("study.toml"))
        params, model, tokenizer = load_weights(checkpoint)
        held_out_config = config.evaluate.held_out
        assert held_out_config is not None
        drawn = generated(held_out_config.tasks, config.seeds.evaluation, "held_out")
        held_out = [problem for problem, _ in zip(drawn, range(held_out_config.count), strict=False)]
        return cls(
            on_device(params), model, tokenizer_for(tokenizer), load_problems(config.reason.problems, 1), held_out
        )

    def learner(self, cell: Cell) -> Learner:
        """A learner whose gradients are compiled once for all cells with the same loss."""
        # Log-probabilities at temperature 1, as the author's; with E3's sampling at 0.7 this difference is tested.
        rollout = cell.rollout.model_copy(update={"temperature": 1.0})
        learner = Learner(self.model, cell.policy, rollout, self.params, cell.balance, make_mesh(1))
        # The compiled functions of the first learner with this loss are put into every later one: compiling takes
        # longer than some cells.
        program = self.programs.setdefault((cell.kl, cell.train), learner.program)
        for name in ("encode_prompts", "completion_gradients", "backward_through_prompts"):
            setattr(learner.program, name, getattr(program, name))
        return learner

    def train(self, cell: Cell) -> tuple[Params, dict[str, list[float | None]]]:
        """The parameters after a cell, and its curves."""
        learner = self.learner(cell)
        engine = RolloutEngine(self.model, self.tokenizer, cell.rollout, cell.seed, learner.mesh)
        order = ProblemOrder(len(self.problems), cell.seed)
        draw = GroupDraw(self.problems, order, engine, AnswerScorer(), cell.policy.refill, cell.advantage)
        curves: dict[str, list[float | None]] = {name: [] for name in CURVES}
        for _ in range(cell.steps):
            params = learner.sampling_params
            if cell.stale_spectra:
                params = with_cached(params, self.params)
            live, all_groups, metrics = draw.step(params, cell.prompts)
            metrics |= learner.update(pushed(all_groups, cell.push) if cell.push else live)
            for name, curve in curves.items():
                curve.append(float(f"{metrics[name]:.3g}") if name in metrics else None)
        return learner.params, curves

    def solved(self, params: Params, temperature: float) -> list[bool]:
        """Right or wrong on each held-out problem, by the strict grader."""
        sampling = Sampling(
            max_tokens=48, temperature=temperature, stop_ids=(self.tokenizer.im_end, self.tokenizer.end_of_text),
            think_end=self.tokenizer.think_end,
        )  # fmt: skip
        generate = Generator(self.model, sampling, 256, 48, make_mesh(1))
        prompts = [encode_prompt(self.tokenizer, problem.question) for problem in self.held_out]
        completions = generate(params, prompts, [(0, index) for index in range(len(prompts))])
        replies = [parse_completion(self.tokenizer, completion.ids) for completion in completions]
        return [verifiable(p, reply) == 1.0 for p, reply in zip(self.held_out, replies, strict=True)]

    def outcomes(self, params: Params) -> dict[str, str]:
        """`solved` greedily and at temperature 1, as hexadecimal digits."""
        temperatures = {"greedy": 0.0, "sampled": 1.0}
        return {way: packed(self.solved(params, temperature)) for way, temperature in temperatures.items()}


def with_cached(params: Params, start: Params) -> Params:
    """`params` with the start's values for the parameters in `CACHED`."""

    def choose(path: tuple[Any, ...], now: Any, before: Any) -> Any:
        return before if path[-1].key in CACHED else now

    return jax.tree_util.tree_map_with_path(choose, params, start)


def pushed(groups: Sequence[Group], push: float) -> Sequence[Group]:
    """The groups with every advantage lowered by `push`, which adds β ∇ log π of each completion to the gradient.

    Groups without a signal are included, because a KL term applies to every completion.
    """
    for group in groups:
        for rollout in group.rollouts:
            if rollout.advantage is not None:
                rollout.advantage -= push
    return groups


def packed(solved: Sequence[bool]) -> str:
    return np.packbits(np.asarray(solved, bool)).tobytes().hex()


def norms_by_right(study: Study, cell: Cell) -> list[dict[str, float]]:
    """E0: for each group of one draw of `cell` at the start, the number right, both norms and the cosine."""
    learner = study.learner(cell)
    engine = RolloutEngine(study.model, study.tokenizer, cell.rollout, cell.seed, learner.mesh)
    order = ProblemOrder(len(study.problems), cell.seed)
    draw = GroupDraw(study.problems, order, engine, AnswerScorer(), 0)
    # Without refill, so that the groups are those that the policy really gives.
    live, _, metrics = draw.step(study.params, cell.prompts)
    measure = jax.jit(partial(balance, settings=Balance("plain")))
    rows = []
    for group, parts in zip(live, rows_of(live), strict=True):
        plus, minus = learner._signed_gradients(parts, False, {}, cell.group)
        norms = {name: float(value) for name, value in measure(plus, minus)[1].items()}
        right = sum(rollout.reward == 1.0 for rollout in group.rollouts)
        rows.append({"group": cell.group, "right": right, "solve_rate": metrics["solve_rate"], **norms})
    return rows


def start(work: Path) -> Path:
    """The folder of the start's weights, pretrained by the pipeline's stages if it does not exist."""
    from bench.rl.table1 import Bench  # imports Prefect, which a test of one cell does not need
    from store.artifacts import Store

    store = Store(work.absolute())
    store.prepare()
    bench = Bench(load(Path(__file__).with_name("study.toml")), store, f"study-{uuid.uuid4().hex[:8]}")
    return store.get(bench.start()).path


def run(study: Study, cells: Iterable[Cell], folder: Path) -> None:
    """Train and evaluate the cells that are neither in `folder` nor published; evaluates the start first."""
    if not (folder / "start.json").exists():
        write_json(folder / "start.json", {"name": "start", **study.outcomes(study.params)})
    published_names = {row["name"] for row in published(read_json(folder / "start.json"))}
    for cell in cells:
        file = folder / f"{cell.name.replace(' ', ',')}.json"
        if file.exists() or cell.name in published_names:
            continue
        start = time.perf_counter()
        params, curves = study.train(cell)
        trained_at = time.perf_counter()
        row: dict[str, Any] = {"name": cell.name, "cell": asdict(cell), **study.outcomes(params), "curves": curves}
        seconds = [round(trained_at - start, 1), round(time.perf_counter() - trained_at, 1)]
        write_json(file, row | {"seconds": seconds})
        share = {way: int(row[way], 16).bit_count() / len(study.held_out) for way in ("greedy", "sampled")}
        print(f"{cell.name}: {share}, {seconds} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, default=Path(".nautile/study"))
    parser.add_argument("--only", nargs="+", help="experiments")
    parser.add_argument("--repeat", nargs="+", default=[], metavar="SETTING", help="settings to run with every seed")
    parser.add_argument("--arms", nargs="+", help="arms to run: plain, balanced-step, ...; default: all")
    parser.add_argument("--report", type=Path, nargs="?", const=RESULTS / "rl-study", metavar="PATH")
    arguments = parser.parse_args()
    folder, premise = arguments.work / "cells", arguments.work / "premise.json"
    if arguments.report:
        start_row = read_json(folder / "start.json")
        rows = [thinned(read_json(file)) for file in sorted(folder.glob("E*.json"))] + published(start_row)
        print(write(start_row, rows, read_json(premise), arguments.report))
        return
    checkpoint = start(arguments.work)
    enable_compile_cache(arguments.work / "compiled")
    study = Study.load(checkpoint)
    folder.mkdir(exist_ok=True)
    if not premise.exists():
        write_json(premise, [row for cell in PREMISE for row in norms_by_right(study, cell)])
    cells = [*screen(), *later()]
    if arguments.repeat:
        unknown = set(arguments.repeat) - {f"{cell.experiment} {cell.setting}" for cell in cells}
        if unknown:
            raise SystemExit(f"--repeat: no setting {sorted(unknown)} in bench/rl/study_cells.py")
        cells = list(repeated(cell for cell in cells if f"{cell.experiment} {cell.setting}" in arguments.repeat))
    cells = [cell for cell in cells if not arguments.only or cell.experiment in arguments.only]
    run(study, [cell for cell in cells if not arguments.arms or cell.arm in arguments.arms], folder)


if __name__ == "__main__":
    main()
