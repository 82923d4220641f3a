"""The dashboard as Streamlit serves it: the script of the pages behind a check of origins, ready for its first page.

Its pages can answer a question, and cancel or retry a run, so a browser may use it for its own page alone. Streamlit
by itself takes WebSockets from any page of a loopback address, and for any name that points to this machine.
"""

import importlib
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import streamlit as st
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware

from flows.operate.own_page import Application, OwnPageOnly, Receive, Scope, Send

# What draws charts and tables in Streamlit's page, by the beginnings of the files' names.
_PARTS = ("ArrowVegaLiteChart", "embed", "recordbatch", "serialization", "DataFrame", "arrowFormatUtils")
_SCRIPTS = Path("static", "static", "js")


@asynccontextmanager
async def ready(_: st.App) -> AsyncIterator[None]:
    """Import the pages before the server answers: the first window would wait for seconds."""
    importlib.import_module("flows.dashboard.pages")
    yield


class Preloading:
    """An ASGI application around Streamlit's, whose page loads the parts that draw charts and tables at once.

    By itself it asks for them when it is sent the first chart, and waits again.
    """

    def __init__(self, application: Application) -> None:
        self.application = application
        folder = Path(st.__file__).parent / _SCRIPTS
        files = [file.name for part in _PARTS for file in folder.glob(f"{part}.*.js")]
        self.links = ", ".join(f"</static/js/{name}>; rel=modulepreload; crossorigin" for name in files)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def linked(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if headers.get("content-type", "").startswith("text/html"):
                    headers["Link"] = self.links
            await send(message)

        await self.application(scope, receive, linked if scope["type"] == "http" else send)


app = st.App(
    Path(__file__).with_name("app.py"),
    lifespan=ready,
    middleware=[
        Middleware(OwnPageOnly, host=st.get_option("server.address"), port=st.get_option("server.port")),
        Middleware(Preloading),
    ],
)
