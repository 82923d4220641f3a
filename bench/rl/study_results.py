"""Results of the cells of bench/rl/study.py: the table, the decision rule, a figure, and their data.

Gains are over the start, leads over plain GRPO in the same setting, paired by seed and problem. Intervals of 95 % are
over seeds (Student's t) where there are several, and over problems, which say nothing about another seed, where there
is one.
"""

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bench.rl.study_cells import SEEDS, Cell, later, repeated, screen
from common.figures import COLOURS, draw
from common.files import read_json
from evals.scoring.over_seeds import lead_of_votes

WAYS = ("greedy", "sampled")
ARMS = ("plain", "balanced-step", "balanced-group", "cap", "positives")
THINNED = 2  # every second step of the curves is published, and the table is computed from these
ENDS = 3  # published steps at each end of a curve: the first and the last six steps
RESULTS = Path(__file__).parents[2] / "docs" / "results"


@dataclass(frozen=True)
class Interval:
    """A mean difference of shares and its 95 % interval over seeds, with one seed over problems, in points."""

    mean: float
    low: float
    high: float
    seeds: int

    def __str__(self) -> str:
        return f"{self.mean:+.1f} [{self.low:+.1f}, {self.high:+.1f}]"


def interval(before_SN: np.ndarray, after_SN: np.ndarray) -> Interval:
    """The mean difference and its interval, of outcomes by seed and problem [S, N] (`lead_of_votes`)."""
    test = lead_of_votes([before_SN], [after_SN])
    assert test.low is not None  # never: the problems' noise is above zero
    assert test.high is not None
    return Interval(100 * test.lead, 100 * test.low, 100 * test.high, len(test.seeds))


@dataclass(frozen=True)
class ArmResult:
    """One arm of one setting: the rows of its cells by seed."""

    cell: Cell
    runs: Mapping[int, dict[str, Any]]

    def solved(self, way: str) -> dict[int, np.ndarray]:
        """Right or wrong by problem, for each seed."""
        return {seed: unpacked(row[way]) for seed, row in self.runs.items()}

    def gain(self, start: Mapping[str, np.ndarray], way: str, seeds: Sequence[int] | None = None) -> Interval:
        solved = self.solved(way)
        after_SN = np.stack([solved[seed] for seed in seeds or solved])
        return interval(np.broadcast_to(start[way], after_SN.shape), after_SN)

    def lead(self, plain: "ArmResult", way: str, seeds: Sequence[int] | None = None) -> Interval:
        """The difference from `plain`, over the seeds that both have."""
        ours, theirs = self.solved(way), plain.solved(way)
        common = seeds or sorted(ours.keys() & theirs.keys())
        return interval(*(np.stack([side[seed] for seed in common]) for side in (theirs, ours)))

    def curve(self, name: str) -> np.ndarray:
        """A metric [seed, step]; NaN where it had no value."""
        return np.array([row["curves"][name] for row in self.runs.values()], float)

    @cached_property
    def norm_ratio(self) -> np.ndarray:
        return self.curve("norm_negative") / self.curve("norm_positive")


@dataclass(frozen=True)
class Setting:
    """The arms of one setting, plain GRPO among them."""

    experiment: str
    name: str
    arms: Mapping[str, ArmResult]

    def verdict(
        self, start: Mapping[str, np.ndarray], way: str, seeds: Sequence[int] | None = None
    ) -> dict[str, Interval]:
        """The balanced arms with which the setting meets the decision rule, and their leads; empty if it does not.

        Only arms that ran with all of `seeds` count; None means the seeds of plain GRPO.
        """
        if (plain := self.arms.get("plain")) is None:
            return {}
        seeds = list(seeds or plain.runs)
        balanced = ("balanced-step", "balanced-group", "cap")
        complete = {name: arm for name, arm in self.arms.items() if name in balanced and arm.runs.keys() >= set(seeds)}
        leads = {name: arm.lead(plain, way, seeds) for name, arm in complete.items()}
        falls = plain.gain(start, way, seeds).high < 0
        return {
            name: lead
            for name, lead in leads.items()
            if falls and lead.low > 0 and complete[name].gain(start, way, seeds).high >= 0
        }


def unpacked(digits: str) -> np.ndarray:
    """Right (1) or wrong (0) by problem, from hexadecimal digits."""
    return np.unpackbits(np.frombuffer(bytes.fromhex(digits), np.uint8)).astype(float)


def thinned(row: dict[str, Any]) -> dict[str, Any]:
    """The published form of a row, with every second step of its curves."""
    return row | {"curves": {name: curve[::THINNED] for name, curve in row["curves"].items()}}


def published(start: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of an earlier report with exactly the same outcomes of the start, with their cells; or none."""
    planned = [*screen(), *later()]
    cells = {cell.name: cell for cell in [*planned, *repeated(planned)]}
    # A cell depends on the start. Another pretraining, on another machine, gives another start, and its cells are not
    # comparable.
    for file in sorted(RESULTS.glob("rl-study*.json")):
        data = read_json(file)
        if all(data["start"][way] == start[way] for way in WAYS):
            return [row | {"cell": asdict(cells[row["name"]])} for row in data["cells"]]
    return []


def settings(rows: Sequence[dict[str, Any]]) -> list[Setting]:
    """The rows by setting and arm, in the order of the plan's experiments."""
    cells: dict[tuple[str, str], dict[str, dict[int, dict[str, Any]]]] = {}
    known: dict[tuple[str, str, str], Cell] = {}
    for row in rows:
        cell = Cell(**row["cell"] | {"train": tuple(row["cell"]["train"])})
        known[cell.experiment, cell.setting, cell.arm] = cell
        cells.setdefault((cell.experiment, cell.setting), {}).setdefault(cell.arm, {})[cell.seed] = row
    return [
        Setting(experiment, name, {arm: ArmResult(known[experiment, name, arm], dict(sorted(arms[arm].items())))
                                   for arm in ARMS if arm in arms})
        for (experiment, name), arms in sorted(cells.items())
    ]  # fmt: skip


def markdown(start: Mapping[str, np.ndarray], results: Sequence[Setting]) -> str:
    """The table of all cells."""
    heads = [
        "experiment", "setting", "arm", "seeds", "greedy, gain", "sampled, gain", "greedy, over plain",
        "sampled, over plain", "‖g⁻‖/‖g⁺‖", "factor", "log π right", "log π wrong",
    ]  # fmt: skip
    shares = ", ".join(f"{100 * start[way].mean():.1f} % {way}" for way in WAYS)
    lines = [
        f"The start solves {shares}, of {len(start['greedy']):,} problems. Gains and leads: points [95 %], over",
        "seeds by Student's t where there are several, else over problems, which says nothing about another seed.",
        "The ratio of norms and the factor: medians over every second step; log π: its change from the first six steps",
        "to the last six, nats a token.",
        "",
        f"| {' | '.join(heads)} |",
        f"| {' | '.join('---' for _ in heads)} |",
    ]
    lines += [f"| {' | '.join(row)} |" for setting in results for row in _lines(start, setting)]
    return "\n".join(lines) + "\n"


def _lines(start: Mapping[str, np.ndarray], setting: Setting) -> Iterator[list[str]]:
    plain = setting.arms.get("plain")
    for name, arm in setting.arms.items():
        leads = ["" if plain is None or arm is plain else str(arm.lead(plain, way)) for way in WAYS]
        logprob_curves = [arm.curve(f"logprob_{side}") for side in ("positive", "negative")]
        logprob_changes = [np.nanmean(curve[:, -ENDS:]) - np.nanmean(curve[:, :ENDS]) for curve in logprob_curves]
        # Steps without a signal have no norm, and NaN says so: they are left out and do not count as zero.
        medians = [np.nanmedian(values) for values in (arm.norm_ratio, arm.curve("balance_factor"))]
        yield [
            setting.experiment,
            setting.name,
            name,
            str(len(arm.runs)),
            *(str(arm.gain(start, way)) for way in WAYS),
            *leads,
            *(f"{value:.2f}" for value in medians),
            *(f"{value:+.2f}" for value in logprob_changes),
        ]


def picture(start: Mapping[str, np.ndarray], results: Sequence[Setting]) -> str:
    """An `<svg>`: every arm's gain with its interval, a row for each setting, greedy left and sampled right."""

    def paint(figure: Any) -> None:
        for axes, way in zip(figure.subplots(1, 2, sharey=True), WAYS, strict=True):
            for row, setting in enumerate(results):
                for name, arm in setting.arms.items():
                    # A fixed place and colour per arm, also in settings that lack other arms.
                    order = ARMS.index(name)
                    gain, y, colour = arm.gain(start, way), row + 0.15 * (order - 2), COLOURS[order]
                    axes.plot((gain.low, gain.high), (y, y), color=colour, linewidth=1.2)
                    axes.plot(gain.mean, y, "o", color=colour, markersize=4, label=None if name in drawn else name)
                    drawn.add(name)
            axes.axvline(0, color="#555555", linewidth=0.8)
            axes.set_title(f"gain over the start, points, {way}", loc="left", fontsize=9)
            axes.set_yticks(range(len(results)), [f"{setting.experiment} {setting.name}" for setting in results])
            axes.set_ylim(len(results) - 0.5, -0.5)
            axes.grid(axis="x", color="#e2e2e2", linewidth=0.6)
            axes.spines[:].set_visible(False)
        figure.legend(loc="outside lower center", ncols=len(ARMS), frameon=False)

    drawn: set[str] = set()
    return draw("Gain of every cell", (10.0, 1.2 + 0.42 * len(results)), paint)


def write(
    start_row: dict[str, Any], rows: Sequence[dict[str, Any]], premise: Sequence[dict[str, Any]], out: Path
) -> str:
    """Write OUT.md, .svg and .json; returns the table and the settings that meet the rule. `rows` are `thinned`."""
    start = {way: unpacked(start_row[way]) for way in WAYS}
    results = settings(rows)
    text = by_right(premise) + "\n" + markdown(start, results)
    for setting in results:
        for way in WAYS:
            seeds = sorted(setting.arms["plain"].runs) if "plain" in setting.arms else []
            if arms := setting.verdict(start, way):
                # The first seed selected the settings that got further seeds, so the verdict without it is the honest
                # one.
                others = setting.verdict(start, way, seeds[1:]) if seeds[1:] else []
                name, count = f"{setting.experiment} {setting.name}", f"{len(seeds)} of {len(SEEDS)}"
                text += f"\nMeets the rule, {way}: {name}: {', '.join(arms)}, with {count} seeds; "
                text += f"without the first seed: {', '.join(others) or 'no arm'}.\n"
    trained = {row["name"] for row in rows}
    names = [cell.name.removesuffix(" seed=1") for cell in [*screen(), *later()] if cell.name not in trained]
    text += "\n" + textwrap.fill(f"Not run: {'; '.join(names) or 'none'}.", 120) + "\n"
    out.with_suffix(".md").write_text(text, encoding="utf-8")
    out.with_suffix(".svg").write_text(picture(start, results), encoding="utf-8")
    cells = [{name: row[name] for name in ("name", *WAYS, "curves")} for row in rows]
    data = {"start": {way: start_row[way] for way in WAYS}, "premise": premise, "cells": cells}
    out.with_suffix(".json").write_text(json.dumps(data, separators=(",", ":")) + "\n", encoding="utf-8")
    return text


def by_right(premise: Sequence[dict[str, Any]]) -> str:
    """E0 as a table: median ratio of norms by number of right completions, and the ratio for orthogonal gradients."""
    lines = ["| G | right | groups | ‖g⁻‖/‖g⁺‖ | √(k/(G-k)) | cosine |", "| --- | --- | --- | --- | --- | --- |"]
    for size, right in sorted({(row["group"], row["right"]) for row in premise}):
        same = [row for row in premise if (row["group"], row["right"]) == (size, right)]
        ratio = np.median([row["norm_negative"] / row["norm_positive"] for row in same])
        cosine = np.median([row["gradient_cosine"] for row in same])
        # If the gradients of single completions were orthogonal and of equal length, the advantages alone would give
        # this ratio.
        expected = (right / (size - right)) ** 0.5
        lines.append(f"| {size} | {right} | {len(same)} | {ratio:.2f} | {expected:.2f} | {cosine:.2f} |")
    return "\n".join(lines) + "\n"
