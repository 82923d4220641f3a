"""The script that Streamlit runs: navigation, the choice of a run, and the page, redrawn every few seconds."""

import streamlit as st

from flows.dashboard import (
    curves,
    distillation,
    evaluations,
    extraction,
    lineage,
    overview,
    samples,
    shared,
    storage,
    surveys,
    tuning,
)

EVERY_S = 5
PAGES = {
    "overview": ("Overview", overview.page),
    "training": ("Training", curves.training),
    "samples": ("Training samples", samples.training_samples),
    "reinforcement": ("Reinforcement", curves.reinforcement),
    "rollouts": ("Rollouts and traces", samples.rollouts),
    "distillation": ("Distillation", distillation.page),
    "evaluations": ("Evaluations", evaluations.page),
    "tuning": ("Tuning", tuning.page),
    "extraction": ("Extraction", extraction.page),
    "surveys": ("Surveys", surveys.page),
    "lineage": ("Lineage", lineage.page),
    "storage": ("Storage", storage.page),
}


def main() -> None:
    st.set_page_config(page_title="Nautile", layout="wide")
    live_at_first = st.query_params.get("live") != "off"
    live = st.sidebar.toggle("Live", value=live_at_first, key="live", help=f"Refresh the page every {EVERY_S} seconds.")
    titles = shared.run_titles()
    run = shared.choose_run(titles)

    def page(address: str) -> st.Page:
        title, draw = PAGES[address]

        def redraw() -> None:
            if shared.run_titles() != titles:
                st.rerun()  # a run has begun or ended: the sidebar, which a fragment does not redraw, is out of date
            draw(shared.chosen_run(run))

        fragment = st.fragment(redraw, run_every=EVERY_S if live else None)
        return st.Page(fragment, title=title, url_path=address, default=address == "overview")

    st.navigation([page(address) for address in PAGES]).run()


main()
