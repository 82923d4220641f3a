"""The Streamlit application of the dashboard: its script behind an origin check, and a fast first page.

The pages can approve, cancel and retry runs, so cross-origin requests are refused (`OwnPageOnly`). Streamlit itself
accepts WebSockets from any page on a loopback address, and for any host name that resolves to this machine.

A new window loads some 130 files of Streamlit's page. The time to its first content depends on the number of round
trips and on the server's cost per file. `Preloading` reduces the former, `PageFiles` the latter.
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

# Name prefixes of the scripts that draw elements of the pages. Streamlit's page loads each script when the first
# element of its kind arrives, and then the script's imports.
PARTS = (
    *("Html", "Checkbox", "Selectbox", "ButtonGroup", "LinkButton", "Multiselect", "Slider"),
    *("ArrowVegaLiteChart", "embed", "recordbatch", "serialization", "DataFrame", "arrowFormatUtils"),
)
MORE_PARTS = {"/lineage": ("GraphVizChart",)}  # additional parts by page address
_PAGE = Path(st.__file__).parent / "static"
_IMPORT = re.compile(r"""(?:from|import)\s*["']\./([\w.-]+\.js)["']""")
_FOREVER = {"cache-control": "public, immutable, max-age=31536000"}  # as Streamlit does: file names contain a digest


@asynccontextmanager
async def ready(_: st.App) -> AsyncIterator[None]:
    """Import the pages before the server answers, else the first window waits for seconds."""
    importlib.import_module("flows.dashboard.pages")
    yield


def scripts_of(parts: tuple[str, ...], page: Path = _PAGE) -> list[str]:
    """The scripts of these parts with all of their imports, without those that index.html loads already."""
    folder = page / "static" / "js"
    index_html = (page / "index.html").read_text(encoding="utf-8")
    scripts = [file.name for part in parts for file in sorted(folder.glob(f"{part}.*.js"))]
    for name in scripts:  # the list grows while it is iterated
        imported = _IMPORT.findall((folder / name).read_text(encoding="utf-8"))
        scripts += [other for other in dict.fromkeys(imported) if other not in scripts]
    return [name for name in scripts if name not in index_html]


def preloads(parts: tuple[str, ...]) -> str:
    """The value of the header `Link` that makes a browser preload the scripts of these parts."""
    return ", ".join(f"</static/js/{name}>; rel=modulepreload; crossorigin" for name in scripts_of(parts))


class PageFiles:
    """ASGI middleware that serves the static files of Streamlit's page from memory.

    Streamlit reads them in a thread pool, in pieces, which takes several times as long as the rest of the first page.
    """

    def __init__(self, application: Application) -> None:
        self.application = application
        files = (file for file in (_PAGE / "static").rglob("*") if file.is_file())
        self.files = {f"/{file.relative_to(_PAGE).as_posix()}": file for file in files}
        self.responses: dict[str, Response] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or scope["method"] != "GET" or path not in self.files:
            await self.application(scope, receive, send)
            return
        # Read at the first request: of more than 300 files a window needs some 130.
        if path not in self.responses:
            media_type = mimetypes.guess_type(path)[0] or "application/octet-stream"
            self.responses[path] = Response(self.files[path].read_bytes(), headers=_FOREVER, media_type=media_type)
        await self.responses[path](scope, receive, send)


class Preloading:
    """ASGI middleware that makes the browser preload the scripts of the page's elements (header `Link`)."""

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
