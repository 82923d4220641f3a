"""Drawing of the pipeline's DAG: a box for each step with the colour and sign of its state.

The boxes are HTML, so that text wraps and screen readers can read it; all text is escaped, and Streamlit sanitises the
result. The edges are a background image (SVG), which contains only numbers. On a phone the boxes are a list.
"""

import html
from collections.abc import Mapping, Sequence
from functools import cache
from urllib.parse import quote

from nautile.common.text import amount, duration
from nautile.flows.dashboard.shared import LOOKS, OTHER_LOOK, coloured
from nautile.flows.run_state import StepState
from nautile.tasks.engine.stage import page_of

ROW, BOX = 92, 78  # vertical distance of boxes and height of a box, in pixels: names and times of two lines fit
_STYLE = """<style>
.steps{position:relative;list-style:none;margin:0!important;padding:0!important;background-repeat:no-repeat;
background-size:100% 100%}
.steps li{position:absolute;margin:0!important;padding:0 4px 0 0;box-sizing:border-box}
.steps a{display:block;height:78px;box-sizing:border-box;padding:4px 6px;border:1px solid;border-radius:6px;
text-decoration:none;font-size:11.5px;line-height:16px;overflow-wrap:anywhere;overflow:hidden}
.steps b{display:block;font-weight:600;letter-spacing:-.2px}
.steps .bar{display:block;height:3px;border-radius:2px;background:currentColor}
.steps .coming a,.steps .left-out a{border-style:dashed}
@media (max-width:760px){.steps{height:auto!important;background-image:none!important}
.steps li{position:static;width:auto!important;padding:0 0 4px}
.steps a{height:auto;display:flex;flex-wrap:wrap;gap:0 10px;font-size:14px;line-height:20px}
.steps b{min-width:9.5em}.steps .bar{flex-basis:100%}}
</style>"""


def columns_of(steps: Sequence[StepState]) -> list[list[StepState]]:
    """The steps in columns by their depth in the DAG. In each column, steps with consumers come first."""
    depth: dict[str, int] = {}
    for step in steps:
        depth[step.label] = 1 + max((depth.get(label, -1) for label in step.after), default=-1)
    producers = {label for step in steps for label in step.after if step.stage != "report"}
    columns: list[list[StepState]] = [[] for _ in range(1 + max(depth.values(), default=-1))]
    for step in sorted(steps, key=lambda step: step.label not in producers):
        columns[depth[step.label]].append(step)
    return columns


def edges_of(steps: Sequence[StepState]) -> list[tuple[str, str]]:
    """The edges (from, to) to draw: the transitive reduction of the DAG."""
    known = {step.label for step in steps}
    return without_implied([(label, step.label) for step in steps for label in step.after if label in known])


def without_implied(edges: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The edges (from, to) whose ends no longer path connects: the transitive reduction of a graph."""
    following: dict[str, set[str]] = {}
    for start, end in edges:
        following.setdefault(start, set()).add(end)

    @cache
    def reached(node: str) -> frozenset[str]:
        # Without recursion: a chain may be longer than Python's stack, and damaged manifests may form a circle.
        seen: set[str] = set()
        open_ends = [*following.get(node, ())]
        while open_ends:
            if (near := open_ends.pop()) not in seen:
                seen.add(near)
                open_ends += following.get(near, ())
        return frozenset(seen)

    def implied(start: str, end: str) -> bool:
        return any(end in reached(near) for near in following[start] if near not in (end, start))

    return [(start, end) for start, end in edges if not implied(start, end)]


def drawing(steps: Sequence[StepState], run: str) -> str:
    """The drawing as HTML. `run`: the run id in the links of the boxes."""
    columns = columns_of(steps)
    places = {step.label: (x, y) for x, column in enumerate(columns) for y, step in enumerate(column)}
    width = 100 / max(1, len(columns))
    height = ROW * max((len(column) for column in columns), default=0)
    boxes = "".join(_box(step, *places[step.label], width, run) for step in steps)
    lines = quote(_lines(edges_of(steps), places, len(columns), height))
    picture = f"background-image:url(&quot;data:image/svg+xml,{lines}&quot;)"
    return f'{_STYLE}<ol class="steps" aria-label="Steps of the run" style="height:{height}px;{picture}">{boxes}</ol>'


def _box(step: StepState, x: int, y: int, width: float, run: str) -> str:
    sign, words, *colours = LOOKS.get(step.state, ("?", step.state, *OTHER_LOOK))
    stage, _, use = step.label.partition(":")
    more = ""
    if step.state == "running":
        share = f"{step.share:.0%}" if step.share is not None else ""
        left = f"{duration(step.left_s)} left" if step.left_s is not None else ""
        more = " · ".join(part for part in (share, left) if part)
        if share:
            more += f'<span class="bar" style="width:{share}"></span>'
    elif step.elapsed_s is not None:
        more = duration(step.elapsed_s)
    elif step.state == "coming" and step.expected_s is not None:
        words = "to reuse" if step.expected_s == 0 else f"about {duration(step.expected_s)}"
    name = f"{html.escape(stage)}" + (f" <span>{html.escape(use)}</span>" if use else "")
    page = f"{page_of(stage)}?run={quote(run, safe='')}"
    css = step.state.replace(" ", "-")
    return (
        f'<li class="{html.escape(css)}" style="left:{x * width:.3f}%;top:{y * ROW}px;width:{width:.3f}%">'
        f'<a href="{html.escape(page)}" target="_self" title="{html.escape(description(step))}" '
        f'style="{coloured(*colours)}"><b>{name}</b>'
        f"<span>{sign} {html.escape(words)}</span> <span>{more}</span></a></li>"
    )


def description(step: StepState) -> str:
    """The tooltip of a step, in one line."""
    parts = [step.label, LOOKS[step.state][1] if step.state in LOOKS else step.state]
    if step.done is not None and step.total is not None:
        parts.append(f"{amount(step.done)} of {amount(step.total)} {step.unit}".rstrip())
    if step.note:
        parts.append(step.note)
    if step.row and step.row["attempts"] > 1:
        parts.append(f"{step.row['attempts']} attempts")
    return " · ".join(parts)


def _lines(edges: Sequence[tuple[str, str]], places: Mapping[str, tuple[int, int]], columns: int, height: int) -> str:
    """The edges as SVG with 100 units per column, stretched over the drawing."""
    paths = []
    for start, end in edges:
        (x1, y1), (x2, y2) = places[start], places[end]
        left, right = 100 * x1 + 94, 100 * x2
        top, bottom = (ROW * y + BOX / 2 for y in (y1, y2))
        if x2 - x1 > 1:  # route the edge below the boxes between them
            lane = height - 7
            paths.append(
                f"M{left},{top}C{left + 12},{top},{left - 4},{lane},{left + 24},{lane}"
                f"H{right - 24}C{right + 4},{lane},{right - 12},{bottom},{right},{bottom}"
            )
        else:
            middle = (left + right) / 2
            paths.append(f"M{left},{top}C{middle},{top},{middle},{bottom},{right},{bottom}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {100 * columns} {height}" preserveAspectRatio="none">'
        f'<path d="{"".join(paths)}" fill="none" stroke="#9aa3ad" stroke-width="1.3" '
        'vector-effect="non-scaling-stroke"/></svg>'
    )
