"""What do ratios of SCA to attention, and spectral samples, buy on language? Two sweeps, and the page's tables.

    python bench/studies/ratios.py rates|arms|report [--store .nautile/ratios] [--out docs/results/ratios.json]
        [--figure docs/results/ratios.svg]

Each cell is a run of `nautile sweep` (ratios_rates.toml, ratios.toml), which resumes after a stop: a pretraining of 0.9
M tokens, three parts in ten Wikipedia (all tokens are trained on) and the rest solutions of small problems (trained on
the replies alone), and the evaluation of its checkpoint. A seed draws the text, the weights and the order of the rows.

Decided before any cell ran:

1. Rate. SSA, AAA and SSS at 2e-3, 4e-3 and 8e-3 with a seed that no arm has. A stack's rate is that with the lowest
   mean, over the two sources, of its bits per byte divided by those of SSA at 4e-3; it is shared by all arms if no
   stack loses more than 1 % by the common one with the lowest mean, and else each arm of `ratios.toml` is given that
   of the nearest stack (SAA: of AAA; M = 1 and 4: of SSA).
   Came out: SSA and SSS 4e-3, AAA 8e-3, for which 16e-3 was added, since its best was at the end of the grid.
2. Measures: bits per byte of validation text of each source after the last step, and the share of 2,000 held-out
   problems solved greedily. Five seeds, paired with the first arm (the paper's), Student's t over seeds, Holm over the
   five arms within a measure.
3. A difference matters from 1 % of the first arm's bits per byte, or one point of the problems. An arm is better or
   worse if its interval excludes 0 after the correction, the same if the interval lies within that bound, and else
   the question is open. With fewer than five seeds there is no verdict.
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.measure import ROOT, argument_parser, run_sweep
from bench.studies.ladder import PROCESSOR
from nautile.common.figures import COLOURS, draw
from nautile.common.files import read_json, write_json
from nautile.common.text import markdown_table
from nautile.evals.benchmarks.stand_ins import HELD_OUT
from nautile.evals.scoring.intervals import LEVEL, holm
from nautile.evals.scoring.over_seeds import lead, summary
from nautile.store.artifacts import Store
from nautile.store.catalog import Catalog

FILES = {"rates": "ratios_rates", "arms": "ratios"}  # phase -> its sweep
WEB, SYNTH, SOLVED = "fineweb_edu", "synth", "solved"
MEASURES = {WEB: "bits per byte, Wikipedia", SYNTH: "bits per byte, replies", SOLVED: "problems solved"}
PROBLEMS, LEAST_SEEDS = 2000, 5
BOUND = 0.01  # of rule 3: a share of the first arm's bits per byte, or of the problems

Cell = dict[str, Any]


def collect(store: Store) -> list[Cell]:
    """The figures of all finished runs of both sweeps."""
    cells = []
    catalog = Catalog(store)
    catalog.ingest()
    for phase, name in FILES.items():
        for record in (read_json(store.sweeps / f"{name}.json") or {"runs": ()})["runs"]:
            keys = {step["label"]: step["key"] for step in record["steps"]}
            checkpoint = store.find("checkpoint", keys["pretrain"])
            evaluation = store.find("evaluation", keys["evaluate:pretrain"])
            if checkpoint is None or evaluation is None:  # not finished yet
                continue
            facts, scores = checkpoint.manifest["facts"], read_json(evaluation.path / "scores.json") or {}
            (processor,) = catalog.query(PROCESSOR, (checkpoint.recorded_execution,))
            cells.append(
                {
                    "phase": phase, "arm": record["arm"], "seed": record["seed"], "parameters": facts["parameters"],
                    WEB: facts["validation"][WEB]["bits_per_byte"], SYNTH: facts["validation"][SYNTH]["bits_per_byte"],
                    SOLVED: scores["benchmarks"][HELD_OUT]["accuracy"],
                    "processor_seconds": processor["seconds"],
                }
            )  # fmt: skip
    return cells


def markdown(cells: Sequence[Cell]) -> str:
    """The tables of the page: the rates, the arms with their seeds, and each arm's differences from the first."""
    parts = []
    if rates := [cell for cell in cells if cell["phase"] == "rates"]:
        rows = [[c["arm"], f"{c[WEB]:.3f}", f"{c[SYNTH]:.4f}", f"{100 * c[SOLVED]:.1f}"] for c in rates]
        parts.append(markdown_table(["stack and rate", *MEASURES.values()], rows))
    by_arm: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        if cell["phase"] == "arms":
            by_arm[cell["arm"]].append(cell)
    if by_arm:
        rows = []
        for arm, own in by_arm.items():
            texts = [_mean(own, measure) for measure in MEASURES]
            seconds = f"{fmean(cell['processor_seconds'] for cell in own):.0f}"
            rows.append([arm, f"{own[0]['parameters']:,}", str(len(own)), *texts, seconds])
        parts.append(markdown_table(["arm", "parameters", "seeds", *MEASURES.values(), "processor s"], rows))
    if len(by_arm) > 1:
        parts.append(_differences(by_arm))
    return "\n\n".join(parts) or "no cell has run"


def _mean(cells: Sequence[Cell], measure: str) -> str:
    found = summary({cell["seed"]: cell[measure] for cell in cells})
    scale, digits = (100, 1) if measure == SOLVED else (1, 4)
    spread = "" if found.deviation is None else f" ± {scale * found.deviation:.{digits}f}"
    return f"{scale * found.mean:.{digits}f}{spread}"


def _differences(by_arm: dict[str, list[Cell]]) -> str:
    """A row for each arm but the first: its difference in each measure, and what rule 3 says of it."""
    first, *others = by_arm
    texts: dict[str, list[str]] = {arm: [] for arm in others}
    for measure in MEASURES:
        values = {arm: {cell["seed"]: cell[measure] for cell in own} for arm, own in by_arm.items()}
        problems = PROBLEMS if measure == SOLVED else None
        leads = {arm: lead(values[first], values[arm], len(others), problems) for arm in others}
        corrected = holm({arm: found.p for arm, found in leads.items() if found.p is not None})
        # In percent of the first arm's bits per byte, or in points.
        scale = 100 / (1 if problems else summary(values[first]).mean)
        for arm, found in leads.items():
            text = f"{scale * found.lead:+.1f}"
            if found.low is not None and found.high is not None and found.detectable is not None:
                low, high = scale * found.low, scale * found.high
                text += f" [{low:+.1f}, {high:+.1f}], p {corrected[arm]:.2g}, finds {scale * found.detectable:.1f}"
                if len(found.seeds) >= LEAST_SEEDS:
                    better = (found.lead > 0) == (measure == SOLVED)
                    within = max(abs(low), abs(high)) < 100 * BOUND
                    verdict = ("better" if better else "worse") if corrected[arm] < LEVEL else "open"
                    text += f": **{'the same' if within else verdict}**"
            texts[arm].append(text)
    heads = [f"{name}, {'points' if key == SOLVED else '%'}" for key, name in MEASURES.items()]
    return markdown_table([f"less {first}", *heads], [[arm, *own] for arm, own in texts.items()])


def paint(cells: Sequence[Cell], canvas: Any) -> None:
    """A panel for each measure: a row for each arm, a dot for each seed."""
    arms = list(dict.fromkeys(cell["arm"] for cell in cells))
    for panel, (measure, name) in zip(canvas.subplots(1, len(MEASURES), sharey=True), MEASURES.items(), strict=True):
        for cell in cells:
            panel.plot(cell[measure], arms.index(cell["arm"]), "o", color=COLOURS[0])
        panel.set(xlabel=name, yticks=range(len(arms)), yticklabels=arms)
    panel.invert_yaxis()  # shared by all


def main() -> None:
    out = ROOT / "docs/results/ratios.json"
    parser = argument_parser(__doc__, store=Path(".nautile/ratios"), out=out, figure=out.with_suffix(".svg"))
    parser.add_argument("phase", choices=(*FILES, "report"))
    arguments = parser.parse_args()
    store = Store(arguments.store.absolute())
    if arguments.phase != "report":
        run_sweep(ROOT / f"bench/studies/{FILES[arguments.phase]}.toml", store.root)
    if cells := collect(store):
        write_json(arguments.out, {"cells": cells})
    cells = (read_json(arguments.out) or {"cells": ()})["cells"]
    if arms := [cell for cell in cells if cell["phase"] == "arms"]:
        title = "Bits per byte and problems solved by arm, a dot a seed"
        arguments.figure.write_text(draw(title, (9.0, 2.6), partial(paint, arms)), encoding="utf-8")
    print(markdown(cells), flush=True)


if __name__ == "__main__":
    main()
