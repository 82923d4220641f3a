"""The script that Streamlit runs: navigation, the choice of a run, and the page, redrawn every few seconds."""

from collections import defaultdict

import streamlit as st

from flows.dashboard import shared
from flows.dashboard.pages import PAGES

EVERY_S = 5


def main() -> None:
    st.set_page_config(page_title="Nautile", layout="wide")
    live_at_first = st.query_params.get("live") != "off"
    live = st.sidebar.toggle("Live", value=live_at_first, key="live", help=f"Refresh the page every {EVERY_S} seconds.")
    titles = shared.run_titles()
    run = shared.choose_run(titles)

    def page(address: str) -> st.Page:
        def redraw() -> None:
            if shared.run_titles() != titles:
                st.rerun()  # a run has begun or ended: the sidebar, which a fragment does not redraw, is out of date
            PAGES[address].draw(shared.chosen_run(run))

        fragment = st.fragment(redraw, run_every=EVERY_S if live else None)
        return st.Page(fragment, title=PAGES[address].title, url_path=address, default=address == "overview")

    themes = defaultdict(list)
    for address in PAGES:
        themes[PAGES[address].theme].append(page(address))
    st.navigation(themes, expanded=True).run()


main()
