"""A plan outlives what the compilers for other chips cannot compile."""

import jax

from common.events import silent
from configs.load import load
from configs.operation import PlanConfig
from tasks.engine.job import Job
from tasks.reporting import capacity


def test_a_stage_that_cannot_be_compiled_is_named_and_the_rest_of_the_plan_is_kept(tmp_path, monkeypatch):
    messages = iter(["INTERNAL: no output tile sizes\nat xla.cc:1", "RESOURCE_EXHAUSTED: 40 GiB"])

    def estimate_memory(*_arguments):
        if message := next(messages, None):
            raise jax.errors.JaxRuntimeError(message)
        return {"resident": 1}

    monkeypatch.setattr("rl.capacity.estimate_memory", estimate_memory)
    monkeypatch.setattr("model.capacity.planner.plan_training", lambda *_arguments: {"advice": []})
    monkeypatch.setattr("model.capacity.topology.enable_compilers", lambda: None)
    monkeypatch.setattr("model.capacity.topology.devices", lambda _target: jax.devices()[:1])
    plans = []
    monkeypatch.setattr(capacity, "markdown", lambda plan: plans.append(plan) or "")
    config = load("local")
    parts = ("model", "pretrain", "align", "reason", "self_distill")
    section = {name: getattr(config, name).model_dump(mode="json") for name in parts}
    section["plan"] = PlanConfig(topology="v4:2x2x1", row_length=64).model_dump(mode="json")
    capacity.plan_capacity.work(Job("plan", "k" * 64, "e", section, {}, tmp_path, silent))
    assert plans[0]["reinforcement"] == {
        "align": {"refused": "the compiler refused it: INTERNAL: no output tile sizes"},
        "reason": {"refused": "the compiler refused it: RESOURCE_EXHAUSTED: 40 GiB"},
        "self_distill": {"resident": 1},
    }
