"""The script that Streamlit runs: navigation, the run's choice, and the page, drawn anew every few seconds."""

import streamlit as st

from flows.dashboard import curves, distillation, evaluations, frame, lineage, overview, texts

EVERY_S = 5
PAGES = {
    "overview": ("Overview", overview.page),
    "training": ("Training", curves.training),
    "samples": ("Training samples", texts.samples),
    "reinforcement": ("Reinforcement", curves.reinforcement),
    "rollouts": ("Rollouts", texts.rollouts),
    "distillation": ("Distillation", distillation.page),
    "evaluations": ("Evaluations", evaluations.page),
    "lineage": ("Lineage", lineage.page),
    "storage": ("Storage", lineage.storage),
}


def main() -> None:
    st.set_page_config(page_title="Nautile", layout="wide")
    live = st.sidebar.toggle("Live", value=True, help=f"draw the page anew every {EVERY_S} s")
    chosen = frame.choose_run()

    def page(address: str) -> st.Page:
        title, draw = PAGES[address]
        part = st.fragment(draw, run_every=EVERY_S if live else None)
        return st.Page(lambda: part(chosen), title=title, url_path=address, default=address == "overview")

    st.navigation([page(address) for address in PAGES]).run()


main()
