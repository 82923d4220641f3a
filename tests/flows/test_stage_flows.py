"""The flows of the stages and the pipeline, and their forms."""

import json

import pytest
from jsonschema import Draft202012Validator

from nautile.common.errors import ConfigError
from nautile.configs.stages import STAGES
from nautile.flows.nightly.evaluation import evaluation
from nautile.flows.operate.deployments import deployments
from nautile.flows.pipeline import pipeline
from tests.support.stages.toy_stages import TOY


def test_a_form_has_a_few_fields_each_with_a_text_and_none_that_must_be_filled_in():
    fields = {
        pipeline: {"config", "overrides", "only", "from_", "until", "force", "ask_again", "name"},
        evaluation: {"config", "overrides", "checkpoint", "name"},
    }
    for flow, names in fields.items():
        assert set(flow.parameters.properties) == names
        assert all(field["description"] for field in flow.parameters.properties.values())
        assert not flow.parameters.required


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"overrides": ["reason.policy.steps=3", "seed = 1"], "only": "evaluate:align", "name": "three steps"}, None),
        ({"only": "", "name": ""}, None),
        ({"overrides": ["seed=1", "resaon.policy.steps=3"]}, ["overrides", 1]),
        ({"overrides": ["reason.policy.steps"]}, ["overrides", 0]),
        ({"overrides": ["launch.command=id"]}, ["overrides", 0]),
        ({"overrides": ["telemetry={}"]}, ["overrides", 0]),
        ({"only": "resaon"}, ["only"]),
        ({"until": "reason; id"}, ["until"]),
        ({"name": " "}, ["name"]),
        ({"config": {"seed": 1}}, ["config"]),
    ],
)
def test_the_server_refuses_a_field_before_it_makes_a_run(values, field):
    errors = list(Draft202012Validator(pipeline.parameters.model_dump(mode="json")).iter_errors(values))
    assert [list(error.absolute_path) for error in errors] == ([field] if field else [])


def test_the_deployment_of_a_stage_is_the_pipeline_with_that_stage_alone(toy):
    for deployment in deployments(toy, str(TOY))[1:-2]:
        stage = deployment.parameters["only"]
        assert (deployment.flow_name, deployment.name) == ("pipeline", f"{stage}-toy")
        assert deployment.description.startswith(f"Run the stage `{stage}`")


def test_a_stage_whose_section_is_missing_has_no_deployment(toy):
    left = toy.model_copy(update={"align": None, "self_distill": None})
    names = [deployment.name for deployment in deployments(left, str(TOY))]
    stages = [stage for stage in STAGES if stage not in ("tokenizer", "supervise", "align", "self_distill")]
    assert names == [f"{stage}-toy" for stage in ("pipeline", *stages, "evaluation", "regression")]


def test_the_forms_of_deployments_hold_the_names_of_keys_only(toy, monkeypatch):
    monkeypatch.setenv("TOY_KEY", "sk-planted-2718281828459045")
    served = deployments(toy, str(TOY))
    forms = json.dumps([deployment.model_dump(mode="json", exclude={"schedules"}) for deployment in served])
    assert str(TOY) in forms
    assert "sk-planted" not in forms


@pytest.mark.parametrize(("cron", "message"), [("0 3 30 2 *", "on no date"), ("61 * * * *", "Invalid cron string")])
def test_a_schedule_that_never_comes_is_refused(toy, cron, message):
    never = toy.model_copy(update={"schedule": toy.schedule.model_copy(update={"cron": cron})})
    with pytest.raises(ConfigError, match=rf"^schedule\.cron: .*{message}"):
        deployments(never, str(TOY))
