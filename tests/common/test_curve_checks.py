"""Warnings about curves: each where the curve does it, and none about a healthy or a short one."""

import pytest

from nautile.common.curve_checks import CHECKED, curve_warnings


def curve(*values):
    return [(10 * (step + 1), value) for step, value in enumerate(values)]


@pytest.mark.parametrize(
    ("metric", "bad", "words", "healthy"),
    [
        ("validation_loss", curve(6.0, 4.6, 5.0, 8.4), "of web rose from 4.6 at step 20 to 8.4", curve(6.0, 4.6, 4.7)),
        ("entropy", curve(1.0, 0.01, 0.005, 0.005), "0.0067 nats per token, below 0.01", curve(0.02, 0.5, 0.4, 0.3)),
        ("zero_signal_share", curve(0.2, 0.9, 0.9, 0.9), "90% of the groups", curve(0.9, 0.5, 0.4, 0.3)),
        ("balance_factor", curve(0.5, 3.2, 0.5, 0.5), "in 25% of the points, at most 3.2", curve(0.5, 1.0, 0.9)),
    ],
)
def test_a_curve_that_does_what_it_should_not_is_named(metric, bad, words, healthy):
    [warning] = curve_warnings({metric: {"web": bad, "": healthy}})
    assert (warning.metric, warning.source) == (metric, "web")
    assert words in warning.text
    assert curve_warnings({metric: {"": bad[:2]}, "loss": {"": bad}}) == []
    assert metric in CHECKED
