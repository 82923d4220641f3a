"""The script that Streamlit runs: navigation, the run's choice, and the page, drawn anew every few seconds."""

import streamlit as st

from flows.dashboard import curves, distillation, evaluations, lineage, overview, storage
from flows.dashboard import samples as texts
from flows.dashboard import shared as frame

EVERY_S = 5
PAGES = {
    "overview": ("Overview", overview.page),
    "training": ("Training", curves.training),
    "samples": ("Training samples", texts.samples),
    "reinforcement": ("Reinforcement", curves.reinforcement),
    "rollouts": ("Rollouts and traces", texts.rollouts),
    "distillation": ("Distillation", distillation.page),
    "evaluations": ("Evaluations", evaluations.page),
    "lineage": ("Lineage", lineage.page),
    "storage": ("Storage", storage.page),
}


def main() -> None:
    st.set_page_config(page_title="Nautile", layout="wide")
    asked = st.query_params.get("live") != "off"
    live = st.sidebar.toggle("Live", value=asked, key="live", help=f"draw the page anew every {EVERY_S} s")
    titles = frame.run_titles()
    run = frame.choose_run(titles)

    def page(address: str) -> st.Page:
        title, draw = PAGES[address]

        def fresh() -> None:
            if frame.run_titles() != titles:
                st.rerun()  # the side bar is outside of what is drawn anew: a run has begun, or ended
            draw(frame.chosen_run(run))

        part = st.fragment(fresh, run_every=EVERY_S if live else None)
        return st.Page(part, title=title, url_path=address, default=address == "overview")

    st.navigation([page(address) for address in PAGES]).run()


main()
