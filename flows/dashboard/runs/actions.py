"""Buttons that approve, cancel or retry a run, in a dashboard that `nautile up` started together with its server.

Other dashboards only show the commands. `flows.dashboard.server` refuses requests from other pages.
"""

from collections.abc import Callable

import streamlit as st

from nautile.common.errors import ConfigError
from nautile.flows.dashboard import shared
from nautile.flows.dashboard.shared import CACHE_S, ChosenRun
from nautile.flows.notes import read_note, write_note
from nautile.flows.operate import questions, run_actions
from nautile.store.mirror import open_store


def answers(run: str) -> bool:
    """Whether a button can approve the run: it waits on the server that was started with this page."""
    api, note = run_actions.server_beside(open_store()), shared.questions().get(run)
    return api is not None and note is not None and note["api"] == api


def approve_button(run: str) -> None:
    """The button that approves a waiting run."""
    if answers(run) and st.button("Approve", type="primary", key=f"approve-{run}"):
        _do("approved: the run continues", lambda: questions.approve(open_store(), run, None))


def controls(chosen: ChosenRun) -> None:
    """Draw the buttons to cancel a live run, to retry a failed one, and to edit the run's note, where allowed."""
    api = run_actions.server_beside(open_store())
    # No buttons rather than buttons that fail: a dashboard that somebody started alone has no server to talk to.
    if api is None or chosen.state is None:
        return
    with st.container(horizontal=True, key="controls"):
        # A run from a terminal has no deployment. Prefect could mark it as cancelled, but nothing would end its
        # process.
        if _has_deployment(api, chosen.run):
            if chosen.state.state in ("running", "waiting"):
                with st.popover("Cancel the run"):
                    st.markdown("Its processes end; finished work is kept, and a retry resumes from there.")
                    if st.button("Yes, cancel it", key=f"cancel-{chosen.run}"):
                        _do("the run is being cancelled", lambda: run_actions.cancel(api, chosen.run))
            elif chosen.state.state != "done" and st.button("Retry", type="primary", key=f"retry-{chosen.run}"):
                _do("the run will start again", lambda: run_actions.retry(api, chosen.run))
        with st.popover("Note and tags"):
            _note_form(chosen.run)


def _note_form(run: str) -> None:
    note = read_note(open_store(), run)
    with st.form(f"note-{run}", border=False):
        text = st.text_area("Note", note["text"], max_chars=2000)
        tags = st.text_input("Tags, comma-separated", ", ".join(note["tags"]))
        if st.form_submit_button("Save"):
            new_tags = [tag.strip() for tag in tags.split(",") if tag.strip()]
            _do("saved", lambda: write_note(open_store(), run, text, new_tags, []))


@st.cache_data(ttl=CACHE_S, max_entries=64, show_spinner=False)
def _has_deployment(api: str, run: str) -> bool:
    return run_actions.has_deployment(api, run)


def _do(message: str, action: Callable[[], object]) -> None:
    """Carry out the action of a button, and show `message` or the error."""
    with shared.one_connection() as reader:
        reader.close()  # the action may write the catalog
    try:
        action()
    except ConfigError as error:
        st.error(shared.escaped(str(error)))
        return
    # The state that the page shows has just changed, so what it remembers of it is forgotten.
    st.cache_data.clear()
    st.toast(message)
