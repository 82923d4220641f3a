"""When a run counts as diverging, and how often it may roll back."""

import json
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nautile.common.errors import ConfigError
from nautile.model.training.loop import MIN_LOSSES, DivergenceMonitor, DivergenceState, Rollback


def follow(monitor, losses, first=0):
    for step, loss in enumerate(losses, start=first):
        monitor.observe(step, loss)
        monitor.decide(step)


def steady(seed=0, count=MIN_LOSSES, spread=0.1):
    return (3 + spread * np.random.default_rng(seed).normal(size=count)).tolist()


def test_a_few_bad_steps_are_tolerated_and_forgotten():
    monitor = DivergenceMonitor(1, 0.0, 0, 0)
    follow(monitor, [None, 3.0, None, 3.0, None])
    with pytest.raises(Rollback, match=r"not finite in 2 updates in a row \(steps 4 to 5"):
        follow(monitor, [None], first=5)


def test_a_long_spike_is_detected_and_a_short_spike_tolerated():
    monitor = DivergenceMonitor(5, 10.0, 2, 0)
    follow(monitor, [*steady(), 9.0, 9.0, 3.0, 9.0, 9.0])
    with pytest.raises(Rollback, match=r"was above \d\.\d+ in 3 updates in a row"):
        follow(monitor, [9.0], first=MIN_LOSSES + 5)


@pytest.mark.slow
@given(st.integers(0, 50), st.floats(0.01, 0.3))
def test_ordinary_noise_is_no_spike(seed, spread):
    monitor = DivergenceMonitor(0, 10.0, 0, 0)
    follow(monitor, steady(seed, 300, spread))


def test_falling_losses_a_new_phase_and_too_few_are_no_spikes():
    monitor = DivergenceMonitor(0, 10.0, 0, 0)
    follow(monitor, np.linspace(12, 3, 200).tolist())
    monitor.new_phase()
    follow(monitor, [20.0] * (MIN_LOSSES - 1))
    assert monitor.threshold() is None
    assert DivergenceMonitor(0, 0.0, 0, 0).threshold() is None


def test_wild_losses_do_not_move_the_threshold():
    monitor = DivergenceMonitor(0, 10.0, 10**6, 0)
    follow(monitor, steady())
    before = monitor.threshold()
    follow(monitor, [1e6] * 100)
    assert monitor.threshold() == before


def test_after_too_many_rollbacks_the_run_fails_with_the_reasons():
    monitor = DivergenceMonitor(0, 0.0, 0, 2)
    for step in (4, 9):
        monitor.rolled_back(Rollback(step, f"trouble at {step}"), 0)
    with pytest.raises(ConfigError, match=r"trouble at 4; trouble at 9; trouble at 14\. It went back 2 times"):
        monitor.rolled_back(Rollback(14, "trouble at 14"), 0)


def test_the_state_survives_json():
    monitor = DivergenceMonitor(3, 10.0, 3, 3)
    follow(monitor, [*steady(), 9.0])
    monitor.rolled_back(Rollback(7, "why"), 3)
    assert DivergenceState(**json.loads(json.dumps(asdict(monitor.state)))) == monitor.state
