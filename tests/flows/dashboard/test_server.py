"""What stands in front of Streamlit's pages: its files out of memory, and the scripts that a window loads at once."""

import asyncio

import httpx

from flows.dashboard import server
from flows.operate.own_page import OwnPageOnly


async def _streamlit(scope, receive, send):
    headers = [(b"content-type", b"text/html; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"the page"})


def get(application, path, method="GET", **headers):
    async def asked():
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8501") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(asked())


def test_a_script_of_the_page_comes_out_of_memory_and_stays_with_the_browser():
    page = server.PageFiles(_streamlit)
    path, file = next((path, file) for path, file in page.files.items() if path.startswith("/static/js/embed."))
    for _ in range(2):
        answer = get(page, path)
        assert answer.content == file.read_bytes()
        assert answer.headers["content-type"].startswith(("text/javascript", "application/javascript"))
        assert "immutable" in answer.headers["cache-control"]
    assert list(page.responses) == [path]
    refused = get(OwnPageOnly(page, "127.0.0.1", 8501), path, origin="http://elsewhere.example")
    assert refused.status_code == 403


def test_what_is_no_file_of_the_page_is_left_to_streamlit():
    page = server.PageFiles(_streamlit)
    some = next(iter(page.files))
    for method, path in (("GET", "/"), ("GET", "/static/js/none.js"), ("GET", "/static/../index.html"), ("HEAD", some)):
        assert get(page, path, method).headers["content-type"].startswith("text/html")
    assert page.responses == {}


def test_a_window_is_told_to_load_all_that_draws_the_parts_of_pages():
    scripts = server.scripts_of(server.PARTS)
    for part in server.PARTS:  # the names of Streamlit's files, which another version may change
        assert sum(name.startswith(f"{part}.") for name in scripts) == 1, part
    assert len(scripts) == len(set(scripts))
    page = server.Preloading(_streamlit)
    links = get(page, "/").headers["link"]
    assert all(f"</static/js/{name}>; rel=modulepreload; crossorigin" in links for name in scripts)
    assert "GraphVizChart." not in links
    assert "GraphVizChart." in get(page, "/lineage").headers["link"]  # 0.8 MB that no other page needs


def test_the_scripts_of_a_part_are_what_it_imports_and_what_these_import(tmp_path):
    folder = tmp_path / "static" / "js"
    folder.mkdir(parents=True)
    texts = {"Chart.1.js": 'import{a as b}from"./mid.2.js";', "mid.2.js": 'import"./leaf.3.js";import"./core.4.js";'}
    texts |= {"leaf.3.js": 'import{c}from"./Chart.1.js";', "core.4.js": "", "Other.5.js": ""}
    for name, text in texts.items():
        (folder / name).write_text(text)
    (tmp_path / "index.html").write_text('<link rel="modulepreload" href="./static/js/core.4.js">')
    assert server.scripts_of(("Chart",), tmp_path) == ["Chart.1.js", "mid.2.js", "leaf.3.js"]
