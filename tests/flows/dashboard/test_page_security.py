"""Every page over a store of hostile texts, in a real browser: no text runs, none makes a request to another host.

And every page is usable by keyboard, with a screen reader and on a phone.
"""

import shutil

import httpx
import pytest

from nautile.common.files import read_json
from nautile.evals.tables.results import table_1, table_2, to_html
from nautile.store.artifacts import Store
from tests.support.pages.axe import axe_source, serious_violations
from tests.support.pages.browser import chromium, dashboard, save_screenshot, wait_for_page, watch
from tests.support.samples.hostile_store import FORMS, NAME, make_hostile
from tests.support.stages.toy_cli import environment

pytestmark = pytest.mark.slow
TITLES = {
    "": "Overview",
    "compare": "Compare",
    "logs": "Logs",
    "system": "System",
    "training": "Training",
    "samples": "Training samples",
    "reinforcement": "Reinforcement",
    "rollouts": "Rollouts and traces",
    "distillation": "Distillation",
    "evaluations": "Evaluations",
    "tuning": "Tuning",
    "classification": "Classification",
    "extraction": "Extraction",
    "surveys": "Surveys",
    "lineage": "Lineage",
    "storage": "Storage",
}
TABS = 90  # more than a page has controls
CHART, CARDS = "[data-testid=stVegaLiteChart] svg", ".group"
# What each page draws last: once it is there, the page is complete.
LAST = {"": "text=The log of a step", "training": CHART, "reinforcement": CHART, "lineage": "[data-testid=stExpander]"}
LAST |= {"compare": "[data-testid=stCaptionContainer]"}
LAST |= {"logs": "[data-testid=stCaptionContainer]", "system": ".plain-table"}
LAST |= {"storage": "text=lists what can be removed", "tuning": "text=No tuning in the store yet"}
LAST |= {"surveys": "text=No simulated survey in the store yet", "extraction": "text=No extraction in the store yet"}
LAST |= {"classification": "text=No classification in the store yet"}
# The elements that no text from outside may become, in the page's own part of the document.
INJECTED = """() => {
  const page = document.querySelector('[data-testid=stMain]') || document.body;
  const forbidden = ['iframe', 'script', 'img', '.katex', 'svg[onload]', '[onerror]', 'a[href^="javascript:" i]',
                 'image', `[src*="elsewhere"]`, 'a[href*="elsewhere"]', '[*|href^="javascript:" i]'];
  return forbidden.filter(selector => page.querySelector(selector)).concat(window.struckBy || []);
}"""
# The controls of a page, other than those that are switched off, that had the focus at no time.
WATCH_FOCUS = """() => document.addEventListener('focusin', event =>
  event.target.closest('[data-testid=stElementContainer]')?.setAttribute('data-reached', ''))"""
UNREACHED = """() => [...document.querySelectorAll('[data-testid=stMain] [data-testid=stElementContainer]')]
  .filter(box => box.querySelector('button:enabled, input:enabled, [role=slider], [data-testid=stLinkButton] a'))
  .filter(box => !box.hasAttribute('data-reached')).map(box => box.innerText.slice(0, 80))"""
WIDTHS = """() => [document.documentElement, document.querySelector('[data-testid=stMain]')]
  .map(element => element.scrollWidth - element.clientWidth)"""
BACKGROUND = """() => getComputedStyle(document.querySelector('[data-testid=stApp]')).backgroundColor
  .match(/\\d+/g).slice(0, 3).map(Number)"""
CHART_TEXTS = """() => [...document.querySelectorAll('[data-testid=stVegaLiteChart] svg text')]
  .filter(text => text.textContent)
  .flatMap(text => getComputedStyle(text).fill.match(/\\d+/g).slice(0, 3).map(Number))"""
STRUCK = "window.struckBy = []; window.struck = () => window.struckBy.push('a script of the text ran');"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory, made):
    """A copy of the toy chain's store with hostile texts in it."""
    real, outputs = made
    store = Store(tmp_path_factory.mktemp("hostile") / "store")
    shutil.copytree(real.root, store.root)
    make_hostile(store.root, outputs)
    return store, outputs


@pytest.fixture(scope="module")
def base(hostile):
    store, _ = hostile
    with dashboard(environment(store.root)) as address:
        yield address


@pytest.fixture(scope="module")
def window():
    with chromium() as context:
        context.add_init_script(STRUCK)
        yield context


def open_page(page, base, address, title):
    page.goto(f"{base}/{address}?run=toy&live=off", wait_until="commit")
    page.locator(LAST.get(address, CARDS)).first.wait_for(state="attached")
    wait_for_page(page, title)


@pytest.mark.heavy
def test_the_dashboard_shows_no_text_as_markup(hostile, base, window):
    violations = watch(window)
    page = window.new_page()
    for address, title in TITLES.items():
        open_page(page, base, address, title)
        if address == "rollouts":
            page.get_by_text(FORMS[0]).first.wait_for()  # shown literally
        assert page.evaluate(INJECTED) == [], title
        assert page.locator("[data-testid=stException]").count() == 0, title
        save_screenshot(page, f"hostile {title}")
    assert violations == []


def opens(base, origin):
    """The status with which the pages' WebSocket answers a page of an origin."""
    headers = {"connection": "Upgrade", "upgrade": "websocket", "origin": origin, "sec-websocket-version": "13"}
    headers |= {"sec-websocket-key": "MDEyMzQ1Njc4OWFiY2RlZg==", "sec-websocket-protocol": "streamlit"}
    with httpx.stream("GET", f"{base}/_stcore/stream", headers=headers) as response:
        return response.status_code


def test_only_its_own_page_may_use_the_dashboard(base):
    """Its pages have buttons, so no page of another origin, port or name reaches their WebSocket, or frames them."""
    assert opens(base, base) == 101
    assert [opens(base, origin) for origin in ("http://elsewhere.example", "http://127.0.0.1:1", "null")] == [403] * 3
    framed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"}
    for headers in ({"host": "elsewhere.example"}, framed):
        assert httpx.get(base, headers=headers).status_code == 403
    assert httpx.get(base, headers=framed | {"sec-fetch-dest": "document"}).is_success  # a link in Prefect's page


@pytest.mark.heavy
def test_every_page_serves_a_screen_reader_a_keyboard_and_a_phone(base, window):
    script = axe_source()
    page = window.new_page()
    for address, title in TITLES.items():
        open_page(page, base, address, title)
        assert serious_violations(page, script) == [], title
        page.evaluate(WATCH_FOCUS)
        page.locator("h1").first.click()
        for _ in range(TABS):
            page.keyboard.press("Tab")
        assert page.evaluate(UNREACHED) == [], title
        page.set_viewport_size({"width": 390, "height": 844})
        open_page(page, base, address, title)
        assert page.evaluate(WIDTHS) == [0, 0], title
        save_screenshot(page, f"phone {title}")
        page.set_viewport_size({"width": 1440, "height": 1100})


@pytest.mark.heavy
def test_in_a_dark_browser_pages_are_dark_and_legible(base, window):
    script, page = axe_source(), window.new_page()
    page.emulate_media(color_scheme="dark")
    for address in ("", "training", "rollouts", "lineage"):
        open_page(page, base, address, TITLES[address])
        save_screenshot(page, f"dark {TITLES[address]}")
        assert serious_violations(page, script) == [], address  # the contrast of texts among them
        assert max(page.evaluate(BACKGROUND)) < 64, address
        if address == "training":  # nor are the charts' texts
            assert min(page.evaluate(CHART_TEXTS)) > 128


@pytest.mark.heavy
def test_a_click_in_a_legend_is_in_the_address_of_the_page(two_curves, window):
    with dashboard(environment(two_curves.root)) as base:
        page = window.new_page()
        page.goto(f"{base}/training?run=r1&compared=r2&live=off")
        legend = page.locator("[data-testid=stVegaLiteChart] .role-legend text")
        legend.get_by_text("r2", exact=True).click()
        page.wait_for_url("**&hidden=r2*")
        legend.get_by_text("r2", exact=True).click()
        page.wait_for_url(lambda url: "hidden" not in url)


@pytest.mark.heavy
def test_written_pages_show_no_text_as_markup(hostile, window):
    """The report and the data card as the chain wrote them, and tables of hostile scores."""
    store, outputs = hostile
    violations = watch(window)
    page = window.new_page()
    scores = read_json(store.get(outputs["evaluate:align"]["evaluation"]).path / "scores.json")
    tables = to_html(table_2({NAME: scores})) + to_html(table_1({"pretrain": scores, "align": scores}))
    written = {str(path): path.read_text("utf-8") for path in sorted(store.root.glob("artifacts/*/*/*.html"))}
    assert any(name.endswith("report.html") for name in written)
    for name, text in {**written, "tables": tables}.items():
        page.set_content(text)
        assert page.evaluate(INJECTED) == [], name
    assert violations == []
