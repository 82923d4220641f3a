"""The end of a run whose form cannot be followed."""

import logging

from prefect.exceptions import FailedRun

from flows.forms import failed_state


def test_a_form_that_cannot_be_followed_leaves_no_trace_in_the_log_of_the_run(monkeypatch):
    """Prefect logs the exception that it makes of a failed state, in the process of a deployment's run."""
    logger, records = logging.getLogger("prefect.flow_runs"), []
    monkeypatch.setattr(logger, "filters", [])
    monkeypatch.setattr(logger, "handlers", [handler := logging.Handler()])
    monkeypatch.setattr(handler, "emit", records.append)
    state = failed_state("The form cannot be followed: `ingest.row_length` is negative")
    for error in (FailedRun(state.message), RuntimeError("of another kind")):
        try:
            raise error
        except Exception:
            logger.error("Engine execution exited", exc_info=True)
    assert state.message == "The form cannot be followed: `ingest.row_length` is negative"
    assert [type(record.exc_info[1]) for record in records] == [RuntimeError]
