"""Charts as data in the Vega-Lite language (vega.github.io/vega-lite), which the browser draws.

They are written down as they are sent: to build and check one in a chart library took more time than all else that a
page of curves does.
"""

from dataclasses import dataclass
from typing import Any

import pandas as pd
import streamlit as st

Spec = dict[str, Any]
COLOURS = {"scheme": "tableau10"}
BELOW = {"orient": "bottom", "title": None}  # a legend: beside a chart it would take half of a phone's width
WHOLE = {"tickMinStep": 1, "format": ",d"}  # an axis of counts
ROW = {"step": 28}  # pixels: the height of a chart with a bar for each row
ZOOM = {"name": "zoom", "select": {"type": "interval", "encodings": ["x"]}, "bind": "scales"}


@dataclass(frozen=True)
class Chart:
    """A chart: its specification, and the table whose columns it names."""

    table: pd.DataFrame
    spec: Spec

    def show(self, alt: str | None = None) -> None:
        """Draw it as wide as its place. `alt`: what it shows, in words for screen readers."""
        st.vega_lite_chart(self.table, self.spec, width="stretch", alt=alt)


def quantitative(field: str, **more: Any) -> Spec:
    """A channel with a number; `more`: its scale, axis, title and so on."""
    return {"field": field, "type": "quantitative", **more}


def nominal(field: str, **more: Any) -> Spec:
    """A channel with a name of a thing."""
    return {"field": field, "type": "nominal", **more}


def temporal(field: str, **more: Any) -> Spec:
    """A channel with a time."""
    return {"field": field, "type": "temporal", **more}


def layer(mark: str | Spec, **channels: Any) -> Spec:
    """One kind of mark and what its channels show: a chart, or a layer of it."""
    return {"mark": mark, "encoding": channels}
