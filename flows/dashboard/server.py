"""The dashboard as Streamlit serves it: the script of the pages behind a check of origins, ready for its first page.

Its pages can answer a question, and cancel or retry a run, so a browser may use it for its own page alone. Streamlit
by itself takes WebSockets from any page of a loopback address, and for any name that points to this machine.

A new window asks for some 130 files of Streamlit's page. What takes the time until it shows something is the number of
times that it has to wait for some of them, and what each costs the server, so both are made small here.
"""

import importlib
import mimetypes
import re
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import streamlit as st
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.responses import Response

from flows.operate.own_page import Application, OwnPageOnly, Receive, Scope, Send

# What draws the parts of the pages, by the beginnings of the files' names. Streamlit's page asks for each when it is
# sent the first of its kind, and then for what that file imports.
PARTS = (
    *("Html", "Checkbox", "Selectbox", "ButtonGroup", "LinkButton", "Multiselect", "Slider"),
    *("ArrowVegaLiteChart", "embed", "recordbatch", "serialization", "DataFrame", "arrowFormatUtils"),
)
MORE_PARTS = {"/lineage": ("GraphVizChart",)}  # by the page's address
_PAGE = Path(st.__file__).parent / "static"
_IMPORT = re.compile(r"""(?:from|import)\s*["']\./([\w.-]+\.js)["']""")
_FOREVER = {"cache-control": "public, immutable, max-age=31536000"}  # as Streamlit has it: their names hold a digest


@asynccontextmanager
async def ready(_: st.App) -> AsyncIterator[None]:
    """Import the pages before the server answers: the first window would wait for seconds."""
    importlib.import_module("flows.dashboard.pages")
    yield


def scripts_of(parts: tuple[str, ...], page: Path = _PAGE) -> list[str]:
    """The scripts of these parts and all that they import, without those that the page names itself."""
    folder = page / "static" / "js"
    named = (page / "index.html").read_text(encoding="utf-8")
    wanted = [file.name for part in parts for file in sorted(folder.glob(f"{part}.*.js"))]
    for name in wanted:  # which grows meanwhile
        imported = _IMPORT.findall((folder / name).read_text(encoding="utf-8"))
        wanted += [other for other in dict.fromkeys(imported) if other not in wanted]
    return [name for name in wanted if name not in named]


def preloads(parts: tuple[str, ...]) -> str:
    """The header `Link` that makes a browser load the scripts of these parts at once."""
    return ", ".join(f"</static/js/{name}>; rel=modulepreload; crossorigin" for name in scripts_of(parts))


class PageFiles:
    """An ASGI application around Streamlit's, which answers for the files of its page out of memory.

    Streamlit sends each through a pool of threads, in pieces: several times what all else in a first draw costs.
    """

    def __init__(self, application: Application) -> None:
        self.application = application
        files = (file for file in (_PAGE / "static").rglob("*") if file.is_file())
        self.files = {f"/{file.relative_to(_PAGE).as_posix()}": file for file in files}
        self.answers: dict[str, Response] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or scope["method"] != "GET" or path not in self.files:
            await self.application(scope, receive, send)
            return
        if path not in self.answers:
            media_type = mimetypes.guess_type(path)[0] or "application/octet-stream"
            self.answers[path] = Response(self.files[path].read_bytes(), headers=_FOREVER, media_type=media_type)
        await self.answers[path](scope, receive, send)


class Preloading:
    """An ASGI application around Streamlit's, whose page loads the scripts that draw its parts at once."""

    def __init__(self, application: Application) -> None:
        self.application = application
        self.links = preloads(PARTS)
        self.more = {page: preloads(PARTS + parts) for page, parts in MORE_PARTS.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def linked(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if headers.get("content-type", "").startswith("text/html"):
                    headers["Link"] = self.more.get(scope["path"], self.links)
            await send(message)

        await self.application(scope, receive, linked if scope["type"] == "http" else send)


app = st.App(
    Path(__file__).with_name("app.py"),
    lifespan=ready,
    middleware=[
        Middleware(OwnPageOnly, host=st.get_option("server.address"), port=st.get_option("server.port")),
        Middleware(PageFiles),
        Middleware(Preloading),
    ],
)
