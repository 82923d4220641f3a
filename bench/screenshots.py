"""Screenshots of the dashboard's main pages over a store: those of docs, and others to look at while a page is changed.

    python bench/screenshots.py [STORE] [--out docs] [--pages overview reinforcement compare evaluations]
        [--widths 1400] [--themes light] [--run RUN] [--whole]

writes OUT/dashboard.png for the overview and OUT/dashboard-PAGE.png for the others; with several widths or themes their
names end in them. STORE is `.nautile` by default: `make run` first. The dashboard is started on a free port of
loopback, and each page stands still (`live=off`). Chromium as in the tests (NAUTILE_CHROMIUM names another).
"""

import argparse
import os
import sys
from itertools import product
from pathlib import Path
from urllib.parse import urlencode

sys.path.insert(0, str(Path(__file__).parents[1]))

from PIL import Image

from tests.support.pages.browser import FLAGS, WAIT_MS, dashboard, executable, playwright, wait_for_page

PAGES = {  # address -> heading, and the query that shows what the page is for
    "overview": ("Overview", {}),
    "reinforcement": ("Reinforcement", {}),
    "compare": ("Compare", {"view": "Several runs"}),
    "evaluations": ("Evaluations", {}),
}
TITLES = {"training": "Training", "rollouts": "Rollouts and traces", "system": "System", "lineage": "Lineage"}
TITLES |= {"storage": "Storage", "logs": "Logs", "distillation": "Distillation", "samples": "Training samples"}
HEIGHT = 1100
# The script of the page has ended; its first elements are there before.
DRAWN = """document.querySelector('[data-testid=stApp][data-test-script-state=notRunning]')
  && !document.querySelector('[data-testid=stSkeleton], [data-stale=true]')"""


def main() -> None:
    """Write the screenshots, and print the path of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path, nargs="?", default=Path(".nautile"))
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("--pages", nargs="+", choices=[*PAGES, *TITLES], default=list(PAGES))
    parser.add_argument("--widths", nargs="+", type=int, default=[1400])
    parser.add_argument("--themes", nargs="+", choices=["light", "dark"], default=["light"])
    parser.add_argument("--run", default="", help="id of the run to show; else the newest")
    parser.add_argument("--compared", nargs="*", default=[], help="ids of runs to compare it with")
    parser.add_argument("--whole", action="store_true", help="the whole page, not its first screen")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"NAUTILE_STORE": str(asked.store.resolve())}
    with dashboard(environment) as base, playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable(), args=FLAGS)
        for width, theme in product(asked.widths, asked.themes):
            context = browser.new_context(
                viewport={"width": width, "height": HEIGHT}, locale="en-GB", color_scheme=theme, timezone_id="UTC"
            )
            context.set_default_timeout(WAIT_MS)
            page = context.new_page()
            for address in asked.pages:
                title, query = PAGES.get(address) or (TITLES[address], {})
                shown = {"live": "off", **({"run": asked.run} if asked.run else {}), **query}
                shown |= {"compared": asked.compared} if asked.compared else {}
                page.goto(f"{base}/{'' if address == 'overview' else address}?{urlencode(shown, doseq=True)}")
                wait_for_page(page, title)
                page.wait_for_function(DRAWN)
                page.wait_for_load_state("networkidle")
                if asked.whole:  # the page scrolls inside the window, so the window becomes as high as the page
                    height = page.evaluate("document.querySelector('[data-testid=stMain]').scrollHeight")
                    page.set_viewport_size({"width": width, "height": min(6000, max(HEIGHT, height))})
                    page.wait_for_load_state("networkidle")
                parts = ["dashboard", *([] if address == "overview" else [address])]
                parts += [str(width)] if len(asked.widths) > 1 else []
                parts += [theme] if len(asked.themes) > 1 else []
                path = asked.out / f"{'-'.join(parts)}.png"
                page.screenshot(path=path, animations="disabled")
                with Image.open(path) as picture:  # a third of the bytes, as flat as a page is
                    picture.convert("RGB").quantize(256).save(path, optimize=True)
                page.set_viewport_size({"width": width, "height": HEIGHT})
                print(path)
            context.close()
        browser.close()


if __name__ == "__main__":
    main()
