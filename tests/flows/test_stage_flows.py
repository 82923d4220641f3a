"""The flows of the stages, and their forms."""

import json

from configs.operation import OPERATED
from flows import stage_flows
from flows.operate.deployments import deployments


def test_there_is_one_for_every_stage_with_a_typed_form():
    assert [flow.name for flow in stage_flows.STAGE_FLOWS] == list(OPERATED)
    assert all(getattr(stage_flows, flow.name) is flow for flow in stage_flows.STAGE_FLOWS)
    schema = stage_flows.reason.parameters
    assert set(schema.properties) == {"config", "force", "store_root"}
    assert schema.required == ["config"]
    assert "RunConfig" in json.dumps(schema.properties["config"])


def test_the_forms_of_deployments_hold_the_names_of_keys_only(toy, monkeypatch):
    monkeypatch.setenv("TOY_KEY", "sk-planted-2718281828459045")
    forms = json.dumps([deployment.model_dump(mode="json", exclude={"schedules"}) for deployment in deployments(toy)])
    assert "TOY_KEY" in forms
    assert "sk-planted" not in forms
