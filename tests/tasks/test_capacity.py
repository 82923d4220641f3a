"""A plan outlives what the compilers for other chips cannot compile."""

import jax
import pytest

from nautile.common.events import silent
from nautile.configs.load import load
from nautile.configs.operation import PlanConfig
from nautile.tasks.engine.job import Job
from nautile.tasks.reporting import capacity


@pytest.fixture
def plans(monkeypatch):
    """The plans that are made, without a compiler."""
    made = []
    monkeypatch.setattr("nautile.model.capacity.compiled.plan_training", lambda *_arguments: {"advice": []})
    monkeypatch.setattr("nautile.model.capacity.topology.enable_compilers", lambda: None)
    monkeypatch.setattr("nautile.model.capacity.topology.devices", lambda _target: jax.devices()[:1])
    monkeypatch.setattr(capacity, "markdown", lambda plan: made.append(plan) or "")
    return made


def plan(folder, *names):
    """Plan for the local configuration's sections of these names."""
    config = load("local")
    section = {name: getattr(config, name).model_dump(mode="json") for name in ("model", "pretrain", *names)}
    section["plan"] = PlanConfig(topology="v4:2x2x1", row_length=64).model_dump(mode="json")
    capacity.plan_capacity.work(Job("plan", "k" * 64, "e", section, {}, folder, silent))


def test_a_stage_that_cannot_be_compiled_is_named_and_the_rest_of_the_plan_is_kept(tmp_path, monkeypatch, plans):
    messages = iter(["INTERNAL: no output tile sizes\nat xla.cc:1", "RESOURCE_EXHAUSTED: 40 GiB"])

    def estimate_memory(*_arguments):
        if message := next(messages, None):
            raise jax.errors.JaxRuntimeError(message)
        return {"resident": 1}

    monkeypatch.setattr("nautile.rl.ahead_of_time.estimate_memory", estimate_memory)
    plan(tmp_path, "align", "reason", "self_distill")
    assert plans[0]["reinforcement"] == {
        "align": {"refused": "the compiler refused it: INTERNAL: no output tile sizes"},
        "reason": {"refused": "the compiler refused it: RESOURCE_EXHAUSTED: 40 GiB"},
        "self_distill": {"resident": 1},
    }


def test_a_stage_that_the_configuration_lacks_is_not_planned_for(tmp_path, monkeypatch, plans):
    monkeypatch.setattr("nautile.rl.ahead_of_time.estimate_memory", lambda *_arguments: {"resident": 1})
    plan(tmp_path, "reason")
    assert plans[0]["reinforcement"] == {"reason": {"resident": 1}}
    assert plans[0]["starts"] == {}
