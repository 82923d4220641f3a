"""`[operation]` and `[schedule]`: refused where they mean nothing, and in no key."""

import pytest
from pydantic import ValidationError

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


def test_an_operation_of_no_stage_is_refused():
    with pytest.raises(ValidationError, match="pretraining"):
        OperationConfig.model_validate({"pretraining": {"approve": True}})
