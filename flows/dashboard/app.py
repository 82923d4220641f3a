"""The script that Streamlit runs: navigation, the choice of a run, and the page, redrawn every few seconds."""

from collections import defaultdict

import streamlit as st

from flows.dashboard import shared
from flows.dashboard.pages import PAGES
from flows.run_state import LIVE

EVERY_S = 5
IDLE_S = 60  # while no run is at work; that one begins is seen after five seconds nonetheless
# No empty band on top, the choice of a run before the list of pages, and headings and figures in sizes that leave the
# first screen to content. On a narrow screen columns stand below each other, and their figures side by side in pairs.
STYLE = """<style>
[data-testid=stMainBlockContainer]{padding:1rem 2rem 3rem;max-width:1600px}
[data-testid=stHeader]{background:transparent;height:2.2rem;pointer-events:none}
[data-testid=stHeader] *{pointer-events:auto}
[data-testid=stMain] h1{font-size:1.5rem;padding:0 0 .4rem}
[data-testid=stMain] [data-testid=stVerticalBlock]{gap:.6rem}
[data-testid=stMain] h2,[data-testid=stMain] h3{font-size:1.2rem;padding:.6rem 0 .2rem}
[data-testid=stSidebarContent]{display:flex;flex-direction:column}
[data-testid=stSidebarHeader]{order:0}[data-testid=stSidebarUserContent]{order:1;padding-bottom:.5rem}
[data-testid=stSidebarNav]{order:2}[data-testid=stSidebarNavSeparator]{display:none}
[data-testid=stMetricValue]{font-size:1.35rem}
[data-testid=stMetricLabel] p,[data-testid=stMetricDelta]{white-space:normal;overflow-wrap:anywhere}
[data-testid=stMetric] *{text-overflow:clip}
[data-testid=stMain] [class*=st-key-attention]{gap:.3rem;padding:.5rem 1rem}
[class*=st-key-attention] pre{padding:.3rem .7rem}[class*=st-key-attention] code{font-size:.8rem;line-height:1.4}
[class*=st-key-attention-error]{border-left:5px solid #a40e26}
[class*=st-key-attention-warning]{border-left:5px solid #b26b00}
[class*=st-key-attention-info]{border-left:5px solid #0b4fa8}
@media (max-width:640px){[data-testid=stMainBlockContainer]{padding:2.8rem 1rem 3rem}
[data-testid=stHorizontalBlock]:has([data-testid=stMetric]){gap:.4rem}
[data-testid=stHorizontalBlock]:has([data-testid=stMetric])>[data-testid=stColumn]{min-width:45%;flex:1 1 45%}}
</style>"""


@shared.one_connection()
def main() -> None:
    st.set_page_config(page_title="Nautile", layout="wide")
    st.html(STYLE)
    live_at_first = st.query_params.get("live") != "off"
    live = st.sidebar.toggle(
        "Live",
        value=live_at_first,
        key="live",
        help=f"Refresh the page every {EVERY_S} seconds while a run is at work.",
    )
    titles = shared.run_titles()
    run = shared.choose_run(titles)
    at_work = any(row["stands"] in LIVE for row in shared.run_summaries())
    every = EVERY_S if at_work else IDLE_S  # a browser need not draw all charts again while no run changes them

    def watch() -> None:
        if shared.run_titles() != titles:
            st.rerun()  # a run has begun or ended: the sidebar, which a fragment does not redraw, is out of date

    def page(address: str) -> st.Page:
        @shared.one_connection()
        def redraw() -> None:
            watch()
            PAGES[address].draw(shared.chosen_run(run))

        fragment = st.fragment(redraw, run_every=every if live else None)
        return st.Page(fragment, title=PAGES[address].title, url_path=address, default=address == "overview")

    themes = defaultdict(list)
    for address in PAGES:
        themes[PAGES[address].theme].append(page(address))
    st.navigation(themes, expanded=True).run()
    if live and not at_work:
        st.fragment(watch, run_every=EVERY_S)()


main()
