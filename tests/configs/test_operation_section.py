"""`[operation]` and `[schedule]`: refused where they mean nothing, and in no key."""

import pytest
from pydantic import ValidationError

from configs.load import STAGES, load, stage_section
from configs.operation import OperationConfig, ScheduleConfig


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cron": "every night"}, "five fields"),
        ({"cron": "0 3 * * * *"}, "five fields"),
        ({"cron": "0 3 * * ;"}, "five fields"),
        ({"timezone": "Mars/Olympus"}, "no time zone"),
        ({"timezone": "../UTC"}, "no time zone"),
        ({"webhook": "https://hooks.example/secret"}, "match pattern"),
        ({"against": ()}, "at least 1"),
        ({"rule": "none"}, "interval"),
    ],
)
def test_a_schedule_that_means_nothing_is_refused(given, said):
    with pytest.raises(ValidationError, match=said):
        ScheduleConfig.model_validate(given)


def test_there_is_an_operation_for_every_stage_and_for_no_other():
    assert tuple(OperationConfig.model_fields) == STAGES
    with pytest.raises(ValidationError, match="pretraining"):
        OperationConfig.model_validate({"pretraining": {"approve": True}})


def test_neither_is_in_any_key():
    plain = load("local")
    operated = plain.model_copy(
        update={
            "schedule": ScheduleConfig(cron="0 3 * * *", checkpoint="checkpoint/abc"),
            "operation": OperationConfig.model_validate({stage: {"approve": True} for stage in STAGES}),
        }
    )
    for stage in STAGES:
        source = "synth" if stage == "ingest" else None
        assert stage_section(plain, stage, source) == stage_section(operated, stage, source)
