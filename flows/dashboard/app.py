"""The script that Streamlit runs: navigation, the run picker, and the chosen page, redrawn every few seconds."""

from collections import defaultdict

import streamlit as st

from nautile.flows.dashboard import shared
from nautile.flows.dashboard.pages import PAGES

EVERY_S = 5
IDLE_S = 60  # interval while no run is live; a new run is still detected after EVERY_S
# No empty band at the top, the run picker above the list of pages, and smaller headings and figures, so that content
# fits on the first screen. On a narrow screen columns are stacked, and metrics are shown in pairs.
# `light-dark()` in the styles of the pages follows the browser's preference, as Streamlit's themes do.
# Streamlit writes white on the primary colour, and in it on the page: on a dark page no colour is legible as both.
STYLE = """<style>
:root{color-scheme:light dark}
[data-testid=stMainBlockContainer]{padding:1rem 2rem 3rem;max-width:1600px}
[data-testid=stHeader]{background:transparent;height:2.2rem;pointer-events:none}
[data-testid=stHeader] *{pointer-events:auto}
[data-testid=stMain] h1{font-size:1.5rem;padding:0 0 .4rem}
[data-testid=stMain] [data-testid=stVerticalBlock]{gap:.6rem}
[data-testid=stMain] h2,[data-testid=stMain] h3{font-size:1.2rem;padding:.6rem 0 .45rem}
[data-testid=stSidebarContent]{display:flex;flex-direction:column}
[data-testid=stSidebarHeader]{order:0}[data-testid=stSidebarUserContent]{order:1;padding-bottom:.5rem}
[data-testid=stSidebarNav]{order:2}[data-testid=stSidebarNavSeparator]{display:none}
[data-testid=stMetricValue]{font-size:1.35rem}
[data-testid=stMetricLabel] p,[data-testid=stMetricDelta]{white-space:normal;overflow-wrap:anywhere}
[data-testid=stMetric] *{text-overflow:clip}
[data-testid=stMain] [class*=st-key-attention]{gap:.3rem;padding:.5rem 1rem}
[class*=st-key-attention] pre{padding:.3rem .7rem}[class*=st-key-attention] code{font-size:.8rem;line-height:1.4}
[data-testid=stSliderThumbValue] p,button[data-selected=true] p{color:light-dark(#1f5fa8,#ffffff)}
[class*=st-key-attention-error]{border-left:5px solid light-dark(#a40e26,#ff8182)}
[class*=st-key-attention-warning]{border-left:5px solid light-dark(#b26b00,#f0b458)}
[class*=st-key-attention-info]{border-left:5px solid light-dark(#0b4fa8,#79b8ff)}
@media (max-width:640px){[data-testid=stMainBlockContainer]{padding:2.8rem 1rem 3rem}
[data-testid=stHorizontalBlock]:has([data-testid=stMetric]){gap:.4rem}
[data-testid=stHorizontalBlock]:has([data-testid=stMetric])>[data-testid=stColumn]{min-width:45%;flex:1 1 45%}}
</style>"""


@shared.one_connection()
def main() -> None:
    st.set_page_config(page_title="Nautile", layout="wide")
    st.html(STYLE)
    # The address decides only the first value: a link with `?live=off` opens a page that stands still.
    live_by_default = st.query_params.get("live") != "off"
    live = st.sidebar.toggle(
        "Live",
        value=live_by_default,
        key="live",
        help=f"Refresh the page every {EVERY_S} seconds while a run is live.",
    )
    newest = shared.run_titles()
    run = shared.choose_run()
    has_live_run = bool(shared.live_runs())
    interval_s = EVERY_S if has_live_run else IDLE_S  # redraw charts rarely while no run changes them

    def watch() -> None:
        if shared.run_titles() != newest:
            st.rerun()  # a run has begun or ended: redraw the sidebar as well, which is not part of the fragment

    def page(address: str) -> st.Page:
        # A fragment is redrawn alone at its interval. Each draw opens the catalog once.
        @shared.one_connection()
        def redraw() -> None:
            watch()
            PAGES[address].draw(shared.chosen_run(run))

        fragment = st.fragment(redraw, run_every=interval_s if live else None)
        return st.Page(fragment, title=PAGES[address].title, url_path=address, default=address == "overview")

    themes = defaultdict(list)
    for address in PAGES:
        themes[PAGES[address].theme].append(page(address))
    st.navigation(themes, expanded=True).run()
    # The page redraws once a minute now, so something cheaper looks for a new run.
    if live and not has_live_run:
        st.fragment(watch, run_every=EVERY_S)()


main()
