"""Does the best learning rate move with the width? AdamW and Muon at widths 64, 128 and 256, five rates each.

    python bench/studies/transfer.py [--store .nautile/transfer] [--widths 64 128 256] [--report]

Each cell is a run of `nautile sweep` up to the evaluation after `pretrain`, which resumes after a stop: 0.6 M positions
of the default configuration's text, web and reasoning mixed from the first step, WSD, heads of 32 numbers at every
width, the paper's 2:1 pattern. Held-out bits per byte, of the two sources in the mixture's shares. `--report` only
prints the tables.

Decided before the cells ran (docs/results/transfer.md has the outcome); the grid began at 5e-4 and was moved up by a
factor of two once the lowest cell of width 64 was at its upper end, before any other width was complete:

1. The best rate of a width is the vertex of the parabola through the lowest cell and its two neighbours, over log2 of
   the rate; where the lowest cell is at an end of the grid, that end, marked.
2. A rate transfers if the best rates of widths 64 and 256 are less than a factor of two apart. If they are not, its
   slope over width, on logarithms, is what a larger model's rate follows.
3. Muon is taken for a larger model if at width 256 its lowest cell is below AdamW's by more than twice the standard
   deviation over three seeds at width 128, of the worse of the two.
"""

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import stdev

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.measure import argument_parser, run_sweep
from nautile.common.files import read_json
from nautile.store.artifacts import Store

RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
OPTIMIZERS = ("adamw", "muon")
SEEDS_AT = (128, 8e-3)  # the width and rate that have two more seeds
MIXTURE = {"fineweb_edu": 0.7, "synth": 0.3}
POSITIONS = 600_000
HEAD = 32

Losses = Mapping[tuple[int, str, float, int], float]  # width, optimizer, rate, seed -> bits per byte


def arm_text(width: int, optimizer: str, rate: float, seed: int) -> str:
    """An arm of the sweep file. Its name has all that `losses` needs."""
    heads = width // HEAD
    settings = [
        *(f"model.{name}={heads}" for name in ("memory_heads", "query_heads", "attention_heads")),
        f"model.kv_heads={max(1, heads // 2)}",
        f"model.width={width}",
        f"model.feed_forward={round(8 * width / 3)}",
        f'pretrain.optimizer.name="{optimizer}"',
        f"pretrain.optimizer.learning_rate={rate}",
        f"pretrain.optimizer.final_learning_rate={rate / 20}",
        f"seed={seed}",
    ]
    lines = ", ".join(f"'{setting}'" for setting in settings)
    return f'[[arms]]\nname = "{width} {optimizer} {rate:g} {seed}"\nset = [{lines}]\n'


def sweep_text(widths: list[int]) -> str:
    """The sweep file: small widths first, then the further seeds."""
    mixture = ", ".join(f"{name} = {share}" for name, share in MIXTURE.items())
    shared = [
        f'pretrain.phases=[{{name = "mixed", tokens = {POSITIONS}, mixture = {{{mixture}}}}}]',
        'pretrain.optimizer.schedule="wsd"',
        "pretrain.sample_every=100000",
        "distill=false",
        # A sweep compares evaluations; here the facts of the checkpoints are compared.
        "evaluate.benchmarks=[]",
        "evaluate.held_out.count=16",
        "operation.evaluate.niceness=0",
        "launch.niceness=0",
    ]
    cells = [(width, name, rate, 1) for width in widths for rate in RATES for name in OPTIMIZERS]
    cells += [(*(SEEDS_AT[0], name, SEEDS_AT[1]), seed) for name in OPTIMIZERS for seed in (2, 3)]
    lines = ", ".join(f"'{setting}'" for setting in shared)
    head = f'config = "local"\nuntil = "evaluate:pretrain"\nset = [{lines}]\n'
    return "\n".join([head, *(arm_text(*cell) for cell in cells)])


def losses(store: Store, name: str) -> Losses:
    """The held-out bits per byte of every finished cell of the sweep."""
    found = {}
    for run in read_json(store.sweeps / f"{name}.json")["runs"]:
        keys = {step["label"]: step["key"] for step in run["steps"]}
        if (checkpoint := store.find("checkpoint", keys["pretrain"])) is not None:
            by_source = checkpoint.manifest["facts"]["validation"]
            width, optimizer, rate, seed = run["arm"].split()
            bits = sum(share * by_source[source]["bits_per_byte"] for source, share in MIXTURE.items())
            found[int(width), optimizer, float(rate), int(seed)] = bits
    return found


def best_rate(by_rate: Mapping[float, float]) -> tuple[float, bool]:
    """The rate of the lowest loss by rule 1, and whether the lowest cell is inside of the grid."""
    rates = sorted(by_rate)
    place = min(range(len(rates)), key=lambda n: by_rate[rates[n]])
    if not 0 < place < len(rates) - 1:
        return rates[place], False
    left, middle, right = (by_rate[rates[n]] for n in (place - 1, place, place + 1))
    shift = (left - right) / (2 * (left - 2 * middle + right))  # in steps of the grid, which are factors of two
    return rates[place] * 2**shift, True


def markdown(found: Losses) -> str:
    """A table of all cells, of the best rates, and of the spread over seeds."""
    widths = sorted({width for width, *_ in found})
    rows = ["| width | optimizer | " + " | ".join(f"{rate:g}" for rate in RATES) + " | best rate | its loss |"]
    rows.append("|" + " --- |" * (4 + len(RATES)))
    best: dict[tuple[int, str], float] = {}
    for width in widths:
        for optimizer in OPTIMIZERS:
            cells = {rate: found.get((width, optimizer, rate, 1)) for rate in RATES}
            known = {rate: loss for rate, loss in cells.items() if loss is not None}
            if len(known) < len(RATES):
                best_text, lowest = "not all cells have run", ""
            else:
                rate, inside = best_rate(known)
                best[width, optimizer] = rate
                best_text, lowest = f"{rate:.2g}{'' if inside else ' (end of the grid)'}", f"{min(known.values()):.4f}"
            texts = ["–" if loss is None else f"{loss:.4f}" for loss in cells.values()]
            rows.append(f"| {width} | {optimizer} | {' | '.join(texts)} | {best_text} | {lowest} |")
    text = "\n".join(rows) + "\n"
    for optimizer in OPTIMIZERS:
        ends = [best.get((width, optimizer)) for width in (widths[0], widths[-1])]
        if None not in ends and len(widths) > 1:
            slope = math.log(ends[1] / ends[0]) / math.log(widths[-1] / widths[0])
            text += f"\n{optimizer}: best rate at width {widths[-1]} over that at {widths[0]}: {ends[1] / ends[0]:.2f} "
            text += f"(rate ~ width^{slope:.2f}).\n"
        seeds = [loss for (*cell, _), loss in found.items() if tuple(cell) == (SEEDS_AT[0], optimizer, SEEDS_AT[1])]
        if len(seeds) > 1:
            text += f"Over {len(seeds)} seeds at width {SEEDS_AT[0]} and rate {SEEDS_AT[1]:g}: "
            text += f"standard deviation {stdev(seeds):.4f} bits per byte.\n"
    return text


def main() -> None:
    store_path = Path(".nautile/transfer")
    arguments = argument_parser(__doc__, widths=[64, 128, 256], report=False, store=store_path).parse_args()
    store = Store(arguments.store.absolute())
    if not arguments.report:
        store.root.mkdir(parents=True, exist_ok=True)
        file = store.root / "transfer.toml"
        file.write_text(sweep_text(arguments.widths), encoding="utf-8")
        run_sweep(file, store.root)
    print(markdown(losses(store, "transfer")), flush=True)


if __name__ == "__main__":
    main()
