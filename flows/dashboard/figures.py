"""Charts as Vega-Lite specifications (vega.github.io/vega-lite), which the browser renders.

The specifications are written as plain dicts: building them with a chart library took longer than everything else on a
page of curves.
"""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import streamlit as st

Spec = dict[str, Any]
COLOURS = {"scheme": "tableau10"}
# Colours of runs, distinct on a light and on a dark page.
PALETTE = (
    *("#4c78a8", "#f58518", "#e45756", "#72b7b2", "#54a24b", "#b89a1f", "#b279a2", "#ff7f9f", "#9d755d", "#7f8c8d"),
    *("#1f9ed1", "#c0622f", "#8a6ee0", "#2f9e74", "#d6409f", "#6f8f1f"),
)
BELOW = {"orient": "bottom", "title": None}  # legend below the chart: at its side it takes half of a phone's width
WHOLE = {"tickMinStep": 1, "format": ",d"}  # axis of counts
ROW = {"step": 28}  # height per bar, in pixels
ZOOM = {"name": "zoom", "select": {"type": "interval", "encodings": ["x"]}, "bind": "scales"}


def shade(light: str, dark: str) -> str:
    """A colour of a mark, by the page that it is drawn on; Streamlit itself colours texts, axes and grids of charts."""
    return dark if st.context.theme.type == "dark" else light


def colours_of(runs: Iterable[str], known: dict[str, int]) -> dict[str, str]:
    """Run -> its colour: by its id, whatever its place; the next free one where two runs beside each other would share.

    `known`: the places in `PALETTE` that were given before, which a run keeps; it is added to.
    """
    taken: set[int] = set()
    count = len(PALETTE)
    for run in runs:
        first = known.get(run, zlib.crc32(run.encode()) % count)
        known[run] = next(((first + at) % count for at in range(count) if (first + at) % count not in taken), first)
        taken.add(known[run])
    return {run: PALETTE[known[run]] for run in runs}


@dataclass(frozen=True)
class Chart:
    """A chart: its specification, and the table with the columns that it uses."""

    table: pd.DataFrame
    spec: Spec

    def show(self, alt: str | None = None) -> None:
        """Draw the chart over the available width. `alt`: a description for screen readers."""
        st.vega_lite_chart(self.table, self.spec, width="stretch", alt=alt)

    def show_with_legend(self, alt: str, key: str) -> None:
        """Draw the chart; what a click in its legend hides (`legend_that_hides`) is in the address of the page."""
        # The browser keeps what was picked by key: with another key the chart is drawn as the address says.
        key = f"{key}-{hidden()}"

        def change() -> None:
            picked = {entry["who"] for entry in st.session_state[key]["selection"]["shown"]}
            own = list(dict.fromkeys(self.table["who"]))
            # Without any the browser draws all of them.
            st.query_params["hidden"] = [name for name in hidden() if name not in own] + [
                name for name in own if picked and name not in picked
            ]

        st.vega_lite_chart(
            self.table, self.spec, width="stretch", alt=alt, key=key, on_select=change, selection_mode="shown"
        )


def hidden() -> list[str]:
    """The names of a legend that are hidden in all charts of the page, as its address says."""
    return st.query_params.get_all("hidden")


def legend_that_hides(names: Sequence[str]) -> Spec:
    """The parameter of a chart whose column `who` has these names: a click in the legend hides one or shows it again.

    All are selected at first, but for the `hidden` ones, so that a click hides one.
    """
    shown = [name for name in names if name not in hidden()] or names
    select = {"type": "point", "fields": ["who"], "toggle": "true"}
    return {"name": "shown", "select": select, "bind": "legend", "value": [{"who": name} for name in shown]}


def quantitative(field: str, **more: Any) -> Spec:
    """A quantitative encoding channel; `more`: scale, axis, title and so on."""
    return {"field": field, "type": "quantitative", **more}


def nominal(field: str, **more: Any) -> Spec:
    """A nominal (categorical) encoding channel."""
    return {"field": field, "type": "nominal", **more}


def temporal(field: str, **more: Any) -> Spec:
    """A temporal encoding channel."""
    return {"field": field, "type": "temporal", **more}


def clock(times: "pd.Series[Any]", ticks: int) -> Spec:
    """The axis of a temporal channel: with seconds where two ticks could fall into one minute, whose label repeats."""
    span_s = (times.max() - times.min()).total_seconds()
    form = "%H:%M:%S" if span_s < 120 * ticks else "%d %b %H:%M"
    return {"format": form, "labelOverlap": True, "tickCount": ticks}


def layer(mark: str | Spec, **channels: Any) -> Spec:
    """A mark with its encoding channels: a chart, or a layer of a chart."""
    return {"mark": mark, "encoding": channels}
