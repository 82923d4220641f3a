"""When a run is in trouble, and how often it may go back."""

import json
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from model.training.divergence import ENOUGH, DivergenceMonitor, DivergenceState, Rollback


def follow(health, losses, first=0):
    for step, loss in enumerate(losses, start=first):
        health.observe(step, loss)
        health.decide(step)


def steady(seed=0, count=ENOUGH, spread=0.1):
    return (3 + spread * np.random.default_rng(seed).normal(size=count)).tolist()


def test_a_few_bad_steps_are_borne_and_forgotten():
    health = DivergenceMonitor(1, 0.0, 0, 0)
    follow(health, [None, 3.0, None, 3.0, None])
    with pytest.raises(Rollback, match=r"not finite in 2 updates in a row \(steps 4 to 5"):
        follow(health, [None], first=5)


def test_a_spike_that_lasts_is_noticed_and_a_short_one_borne():
    health = DivergenceMonitor(5, 10.0, 2, 0)
    follow(health, [*steady(), 9.0, 9.0, 3.0, 9.0, 9.0])
    with pytest.raises(Rollback, match=r"was above \d\.\d+ in 3 updates in a row"):
        follow(health, [9.0], first=ENOUGH + 5)


@given(st.integers(0, 50), st.floats(0.01, 0.3))
def test_ordinary_noise_is_no_spike(seed, spread):
    health = DivergenceMonitor(0, 10.0, 0, 0)
    follow(health, steady(seed, 300, spread))


def test_falling_losses_a_new_phase_and_too_few_are_no_spikes():
    health = DivergenceMonitor(0, 10.0, 0, 0)
    follow(health, np.linspace(12, 3, 200).tolist())
    health.new_phase()
    follow(health, [20.0] * (ENOUGH - 1))
    assert health.threshold() is None
    assert DivergenceMonitor(0, 0.0, 0, 0).threshold() is None


def test_wild_losses_do_not_move_the_threshold():
    health = DivergenceMonitor(0, 10.0, 10**6, 0)
    follow(health, steady())
    before = health.threshold()
    follow(health, [1e6] * 100)
    assert health.threshold() == before


def test_it_goes_back_so_often_and_then_stops_with_the_evidence():
    health = DivergenceMonitor(0, 0.0, 0, 2)
    for step in (4, 9):
        health.turned(Rollback(step, f"trouble at {step}"), 0)
    with pytest.raises(ConfigError, match=r"trouble at 4; trouble at 9; trouble at 14\. It went back 2 times"):
        health.turned(Rollback(14, "trouble at 14"), 0)


def test_vitals_travel_as_json():
    health = DivergenceMonitor(3, 10.0, 3, 3)
    follow(health, [*steady(), 9.0])
    health.turned(Rollback(7, "why"), 3)
    assert DivergenceState(**json.loads(json.dumps(asdict(health.vitals)))) == health.vitals
