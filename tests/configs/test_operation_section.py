"""`[operation]` and `[schedule]` are refused where they mean nothing."""

import math
import re
import textwrap
from datetime import datetime
from pathlib import Path

import pytest
from pydantic import ValidationError

from nautile.configs.load import load
from nautile.configs.operation import LaunchConfig, OperationConfig, ScheduleConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cron": "every night"}, "five fields"),
        ({"cron": "0 3 * * * *"}, "five fields"),
        ({"cron": "0 3 * * ;"}, "five fields"),
        ({"timezone": "Mars/Olympus"}, "no time zone"),
        ({"timezone": "../UTC"}, "no time zone"),
        ({"webhook": "HOOK"}, r"`notify` in \[operation\]"),
        ({"against": ()}, "at least 1"),
        ({"rule": "none"}, "interval"),
    ],
)
def test_an_invalid_schedule_is_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        ScheduleConfig.model_validate(fields)


def test_the_address_of_a_webhook_is_no_name_of_a_variable():
    with pytest.raises(ValidationError, match="match pattern"):
        OperationConfig.model_validate({"notify": "https://hooks.example/secret"})


@pytest.mark.parametrize("field", ["hours", "outage_hours"])
@pytest.mark.parametrize("hours", [0, -1, 1e9, 1e300, math.inf, math.nan])
def test_hours_whose_end_is_no_date_are_refused(field, hours):
    """Else the run would end with an exception at the question, after days of work."""
    with pytest.raises(ValidationError, match=field):
        OperationConfig.model_validate({"pretrain": {field: hours}})
    assert datetime.now() + OperationConfig.model_validate({"pretrain": {"hours": 1e5}}).pretrain.patience


def test_an_operation_of_an_unknown_stage_is_refused():
    with pytest.raises(ValidationError, match="pretraining"):
        OperationConfig.model_validate({"pretraining": {"approve": True}})


@pytest.mark.parametrize("document", ["scale", "tpu"])
def test_the_launches_of_the_documents_load(document, tmp_path):
    text = (Path(__file__).parents[2] / "docs" / f"{document}.md").read_text(encoding="utf-8")
    snippets = re.findall(r"^    (?:extends = [^\[]*)?\[launch\]\n(?:    .*\n)+", text, re.MULTILINE)
    assert len(snippets) == text.count("    [launch]") > 0
    for snippet in snippets:
        extends = "" if "extends" in snippet else 'extends = "nautile_370m"\n'
        (tmp_path / "run.toml").write_text(extends + textwrap.dedent(snippet), encoding="utf-8")
        assert load(tmp_path / "run.toml").launch != LaunchConfig()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"host_resources": {"GPU": 8}}, "launch.host_resources needs engine 'ray'"),
        ({"tpu_slice": "v4:2x2x2"}, "launch.tpu_slice needs engine 'ray'"),
        ({"engine": "ray", "processes": 2, "coordinator": "a:1"}, "cannot be set with engine 'ray'"),
        ({"engine": "ray", "host_resources": {"GPU": 0}}, "greater than 0"),
        ({"engine": "ray", "tpu_slice": "v4-16"}, "match pattern"),
    ],
)
def test_an_invalid_launch_is_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        LaunchConfig.model_validate(fields)
