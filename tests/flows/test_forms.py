"""The name of a run that a form or a schedule has started, and the end of one whose form cannot be followed."""

import logging
from types import SimpleNamespace

import pytest
from prefect.exceptions import FailedRun

from nautile.flows import forms
from nautile.flows.forms import failed_state


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


@pytest.mark.parametrize(
    ("parameters", "scheduled", "name"),
    [
        ({"config": "minutely.toml"}, True, "evaluation of local"),  # as its deployments, evaluation-local
        ({"config": "gone.toml"}, True, "evaluation of gone"),
        ({"config": "minutely.toml"}, False, "brave-otter"),
        ({"config": "minutely.toml", "name": "mine"}, True, "mine"),
    ],
)
def test_a_scheduled_run_is_named_after_its_configuration_as_deployments_are(
    monkeypatch, tmp_path, parameters, scheduled, name
):
    (tmp_path / "minutely.toml").write_text('extends = "local"\n')
    parameters = parameters | {"config": str(tmp_path / parameters["config"])}
    run = SimpleNamespace(flow_run=SimpleNamespace(auto_scheduled=scheduled))
    monkeypatch.setattr(forms, "FlowRunContext", SimpleNamespace(get=lambda: run))
    runtime = SimpleNamespace(parameters=parameters, flow_name="evaluation", name="brave-otter")
    monkeypatch.setattr(forms, "flow_run", runtime)
    assert forms.run_name() == name
