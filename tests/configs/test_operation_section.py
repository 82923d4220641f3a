"""`[operation]` and `[schedule]` are refused where they mean nothing."""

import pytest
from pydantic import ValidationError

from configs.operation import OperationConfig, ScheduleConfig


@pytest.mark.parametrize(
    ("fields", "message"),
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
def test_an_invalid_schedule_is_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        ScheduleConfig.model_validate(fields)


def test_an_operation_of_an_unknown_stage_is_refused():
    with pytest.raises(ValidationError, match="pretraining"):
        OperationConfig.model_validate({"pretraining": {"approve": True}})
