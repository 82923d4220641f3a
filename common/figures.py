"""Figures as inline SVG, drawn by matplotlib: reproducible bytes, and all texts escaped."""

import io
import re
import threading
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

COLOURS = ("#1f5f8b", "#c4572e", "#3f7d4e", "#7a5195", "#8a6d1c", "#555555")
PIXEL = 1 / 96  # in inches, the unit of matplotlib's sizes
# `parse_math` off: a dollar sign in a label does not begin a formula.
_STYLE: dict[Any, Any] = {"svg.fonttype": "none", "font.size": 9, "path.simplify": True, "text.parse_math": False}
_drawing = threading.Lock()


def draw(
    title: str,
    size: tuple[float, float],
    paint: Callable[[Any], None],
    css_class: str = "",
    tooltips: Mapping[str, str] | None = None,
) -> str:
    """Draw an `<svg>` of `size` inches. `paint` draws on an empty `matplotlib.figure.Figure`.

    `title` is the label for screen readers, and prefixes all ids, so that they are unique in a page. `tooltips`: text
    by the gid of an artist.
    """
    # Imported on first use: it takes half a second, and every command imports the stages that draw. It also reads
    # MPLCONFIGDIR, which is set in the environment of child processes.
    import matplotlib
    from matplotlib.figure import Figure

    # matplotlib's settings are global, and several threads may draw at the same time.
    with _drawing, matplotlib.rc_context(_STYLE | {"svg.hashsalt": title}):
        figure = Figure(figsize=size, layout="constrained")
        paint(figure)
        text = io.StringIO()
        # Without date and version the same data gives the same bytes, so reports can be compared.
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    for gid, tooltip in (tooltips or {}).items():
        svg = svg.replace(f'<g id="{gid}">', f'<g id="{gid}"><title>{escape(tooltip)}</title>', 1)
    # Without the XML prolog and metadata, labelled, and with identifiers prefixed by the title.
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    prefix = re.sub(r"\W+", "", title.lower()) or "figure"
    svg = re.sub(r'id="([^"]+)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\1{prefix}-", svg)
    return svg.replace("<svg ", f'<svg class="{css_class}" role="img" aria-label="{escape(title)}" ', 1)
