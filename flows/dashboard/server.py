"""The Streamlit application of the dashboard: its script behind an origin check.

The pages can approve, cancel and retry runs, so cross-origin requests are refused (`OwnPageOnly`). Streamlit itself
accepts WebSockets from any page on a loopback address, and for any host name that resolves to this machine.
"""

import pkgutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import streamlit as st
from starlette.middleware import Middleware

from nautile.flows.dashboard.pages import OWN_PAGES
from nautile.flows.operate.own_page import OwnPageOnly


@asynccontextmanager
async def ready(_: st.App) -> AsyncIterator[None]:
    """Import the pages before the server answers, else the first window waits for seconds."""
    for page in OWN_PAGES.values():
        pkgutil.resolve_name(page.reference)
    yield


app = st.App(
    Path(__file__).with_name("app.py"),
    lifespan=ready,
    middleware=[Middleware(OwnPageOnly, host=st.get_option("server.address"), port=st.get_option("server.port"))],
)
