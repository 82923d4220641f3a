"""Buttons that answer a question, and cancel or retry a run, where `nautile up` started this page beside its server.

Everywhere else the page shows the command. What may send a click here at all: `flows.dashboard.server`.
"""

from collections.abc import Callable

import streamlit as st

from common.errors import ConfigError
from flows.cli.notes import read_note, write_note
from flows.dashboard import shared
from flows.dashboard.shared import CACHE_S, ChosenRun
from flows.operate import questions, run_actions
from store.mirror import open_store


def answers(run: str) -> bool:
    """Whether a button may answer the question of a run: it asks on the server beside this page."""
    api, note = run_actions.server_beside(open_store()), shared.questions().get(run)
    return api is not None and note is not None and note["api"] == api


def approve_button(run: str) -> None:
    """The button that answers the question of a run."""
    if answers(run) and st.button("Approve", type="primary", key=f"approve-{run}"):
        _do("approved: the run continues", lambda: questions.approve(open_store(), run, None))


def controls(chosen: ChosenRun) -> None:
    """Cancel for a run at work, retry for one that has ended badly, and the run's note, where this page may."""
    api = run_actions.server_beside(open_store())
    if api is None or chosen.state is None:
        return
    with st.container(horizontal=True, key="controls"):
        if _has_deployment(api, chosen.run):
            if chosen.state.state in ("running", "waiting"):
                with st.popover("Cancel the run"):
                    st.markdown("Its processes end; what is finished is kept, and a retry goes on from there.")
                    if st.button("Yes, cancel it", key=f"cancel-{chosen.run}"):
                        _do("the run is being cancelled", lambda: run_actions.cancel(api, chosen.run))
            elif chosen.state.state != "done" and st.button("Retry", type="primary", key=f"retry-{chosen.run}"):
                _do("the run will start again", lambda: run_actions.retry(api, chosen.run))
        with st.popover("Note and tags"):
            _note_form(chosen.run)


def _note_form(run: str) -> None:
    now = read_note(open_store(), run)
    with st.form(f"note-{run}", border=False):
        text = st.text_area("Note", now["text"], max_chars=2000)
        tags = st.text_input("Tags, with commas between", ", ".join(now["tags"]))
        if st.form_submit_button("Keep"):
            given = [tag.strip() for tag in tags.split(",") if tag.strip()]
            _do("kept", lambda: write_note(open_store(), run, text, given, []))


@st.cache_data(ttl=CACHE_S, max_entries=64, show_spinner=False)
def _has_deployment(api: str, run: str) -> bool:
    return run_actions.has_deployment(api, run)


def _do(done: str, action: Callable[[], object]) -> None:
    """Do what a button asks for, and say how it went."""
    with shared.one_connection() as reader:
        reader.close()  # the action may write the catalog
    try:
        action()
    except ConfigError as error:
        st.error(shared.escaped(str(error)))
        return
    st.cache_data.clear()
    st.toast(done)
