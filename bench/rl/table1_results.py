"""Results of bench/rl/table1.py: a table beside the paper's, and curves.

An arm's accuracy is the mean over its seeds, and its gain over the arm's start is paired by seed and problem (a shared
start counts for each seed). Intervals are over seeds (Student's t) where there are several, and over problems where
there is one, which says nothing about another seed. Accuracies by seed are shown too.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from common.figures import COLOURS, draw
from evals.scoring.intervals import wilson
from evals.scoring.over_seeds import lead_of_votes
from evals.scoring.over_seeds import summary as summary_over_seeds

PAPER = {"start": 27.98, "align": 28.96, "balanced": 31.36, "self_distill_after": 33.43}
Bounds = tuple[float | None, float | None]  # of an interval; None: the seeds do not differ


@dataclass(frozen=True)
class Measured:
    """One checkpoint: right or wrong by held-out problem, greedy and sampled; training metrics by step; its facts."""

    greedy: list[bool]
    sampled: list[bool]
    curves: dict[str, list[tuple[int, float]]]
    facts: dict[str, Any]


@dataclass(frozen=True)
class Arm:
    """One way of training; `before` names the arm that it starts from. A run for each seed."""

    name: str
    title: str
    before: str | None
    runs: list[Measured] = field(default_factory=list)

    def right(self, how: str) -> np.ndarray:
        """Right or wrong [seed, problem], `how` being greedy or sampled."""
        return np.array([getattr(run, how) for run in self.runs], float)


def write(arms: Sequence[Arm], folder: Path, name: str) -> str:
    """Write NAME.json, NAME.md and NAME.svg into `folder`; returns the table as Markdown.

    The JSON contains only the curves of the figure, thinned; all curves are in the store.
    """
    rows = summary(arms)
    text = markdown(rows)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    runs = {arm.name: [{"facts": run.facts, "curves": thinned(run.curves)} for run in arm.runs] for arm in arms[1:]}
    output = json.dumps({"rows": [asdict(row) for row in rows], "runs": runs}, separators=(",", ":"))
    (folder / f"{name}.json").write_text(output + "\n", encoding="utf-8")
    (folder / f"{name}.svg").write_text(picture(name, arms), encoding="utf-8")
    return text


def thinned(curves: Mapping[str, Sequence[tuple[int, float]]]) -> dict[str, list[tuple[int, float]]]:
    """The curves of `PANELS` at every second step, to four digits, to keep the file small."""
    panel_curves = {name: curves[name] for name, _ in PANELS if name in curves}
    return {name: [(step, float(f"{value:.4g}")) for step, value in curve[::2]] for name, curve in panel_curves.items()}


@dataclass(frozen=True)
class Score:
    """Accuracies with 95 % intervals: by seed, their mean, and the gain over the arm's start."""

    seeds: list[float]
    accuracy: float
    interval: Bounds
    gain: float | None
    gain_interval: Bounds | None


@dataclass(frozen=True)
class Row:
    """One arm; `paper` is the percentage that the paper has for the stage."""

    name: str
    title: str
    before: str | None
    problems: int
    greedy: Score
    sampled: Score
    paper: float | None


def summary(arms: Sequence[Arm]) -> list[Row]:
    arms_by_name = {arm.name: arm for arm in arms}
    return [
        Row(
            arm.name,
            arm.title,
            arm.before,
            len(arm.runs[0].greedy),
            _score(arm, arms_by_name.get(arm.before or ""), "greedy"),
            _score(arm, arms_by_name.get(arm.before or ""), "sampled"),
            PAPER.get(arm.name),
        )
        for arm in arms
    ]


def _score(arm: Arm, before: Arm | None, how: str) -> Score:
    """The score of an arm; its gain is paired by seed (a shared start counts for each) and by problem."""
    right = arm.right(how)
    seeds = [float(share) for share in right.mean(axis=1)]
    over_seeds = summary_over_seeds(dict(enumerate(seeds)))
    bounds = (over_seeds.low, over_seeds.high) if len(seeds) > 1 else wilson(right.sum(), right.shape[1])
    if before is None:
        return Score(seeds, over_seeds.mean, bounds, None, None)
    # The start is shared by the seeds unless it has a run for each.
    test = lead_of_votes([np.broadcast_to(before.right(how), right.shape)], [right])
    return Score(seeds, over_seeds.mean, bounds, test.lead, (test.low, test.high))


def markdown(rows: Sequence[Row]) -> str:
    titles = {row.name: row.title for row in rows}
    lines = []
    for how, entry in (("greedy", "the likeliest completion"), ("sampled", "one completion at temperature 1")):
        lines += [
            f"Pass@1 of {entry}, {rows[0].problems:,} held-out problems, strict grader. 95 %: over seeds where there",
            "are several, else over problems, which says nothing about another seed.",
            "",
            "| arm | % [95 %] | by seed | gain, points [95 %] | over | paper, GSM8K % |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for row in rows:
            score: Score = getattr(row, how)
            gain = "" if score.gain is None else f"{100 * score.gain:+.1f} {_span(score.gain_interval, '+.1f')}"
            seeds = ", ".join(f"{100 * share:.1f}" for share in score.seeds)
            lines.append(
                f"| {row.title} | {100 * score.accuracy:.1f} {_span(score.interval)} | {seeds} | {gain} | "
                f"{titles.get(row.before or '', '')} | {row.paper or ''} |"
            )
        lines.append("")
    return "\n".join(lines)


def _span(interval: Bounds | None, form: str = ".1f") -> str:
    if interval is None or interval[0] is None or interval[1] is None:
        return ""
    return f"[{100 * interval[0]:{form}}, {100 * interval[1]:{form}}]"


PANELS = (
    ("norm_positive", "norm of g+"),
    ("norm_negative", "norm of g−"),
    ("balance_factor", "factor on g−"),
    ("entropy", "entropy, nats a token"),
    ("reward", "solve rate in training"),
    ("zero_signal_share", "groups without a signal"),
)


def picture(title: str, arms: Sequence[Arm]) -> str:
    """An `<svg>` of the curves of every arm that updates by policy gradient: the mean over its seeds."""

    def paint(figure: Any) -> None:
        for axes, (name, heading) in zip(figure.subplots(2, 3).flat, PANELS, strict=True):
            for number, arm in enumerate(arm for arm in arms if any("norm_positive" in run.curves for run in arm.runs)):
                series = [dict(thinned(run.curves)[name]) for run in arm.runs if name in run.curves]
                # Only steps that every seed has, or the mean would jump where one of them ends.
                steps = sorted(set.intersection(*map(set, series))) if series else []
                means = [np.mean([points[step] for points in series]) for step in steps]
                axes.plot(steps, means, color=COLOURS[number], linewidth=1.4, label=arm.title)
            axes.set_title(heading, fontsize=9, loc="left")
            axes.tick_params(labelsize=7)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.25, linewidth=0.6)
        figure.supxlabel("step", fontsize=8)
        figure.axes[0].legend(frameon=False, fontsize=7)

    return draw(title, (9.6, 5.2), paint)
