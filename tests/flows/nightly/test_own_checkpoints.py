"""Which checkpoint the scheduled evaluation takes: that of its own pipeline, whatever else the store has."""

import json

import pytest

from nautile.configs.operation import NEWEST, ScheduleConfig
from nautile.flows.dag import build_dag
from nautile.flows.nightly.earlier import find_earlier
from nautile.flows.nightly.evaluation import checkpoint_of
from nautile.flows.nightly.own_checkpoints import executions_of_others
from nautile.store.manifest import now
from nautile.tasks.engine.attempt_log import write_attempt_row
from tests.support.samples.evaluations import checkpoint, evaluation
from tests.support.samples.stage_store import key_of, published


def made_by(store, artifact, config, run="r1"):
    """Record that a run of the configuration made the artifact."""
    row = {"id": f"{run}-{artifact.key[:6]}", "run": run, "config": config, "stage": "pretrain", "label": "pretrain"}
    row |= {"key": artifact.key, "execution": artifact.execution, "state": "done", "reused": False, "attempt": 1}
    write_attempt_row(store, row | {"started": now(), "ended": now(), "seconds": 1.0})
    return artifact


def published_with(store, key, stage="pretrain"):
    folder = store.staging(key) / "output"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model": "small"}))
    made = {"stage": stage, "version": 1, "config": {}, "inputs": {}, "facts": {}, "label": stage}
    return store.publish("checkpoint", key, folder, **made)


def newest(store, toy):
    artifact = checkpoint_of(store, toy, NEWEST)
    return artifact and artifact.id


def test_an_arm_of_a_sweep_and_a_tuned_or_added_model_are_not_the_newest(store, toy):
    own = made_by(store, checkpoint(store, "own"), toy.name)
    made_by(store, checkpoint(store, "arm"), f"try.{toy.name}.steps=2", run="r2")
    published(store, "checkpoint", "tuned", stage="tune")
    published(store, "checkpoint", "imported", stage="add")
    assert newest(store, toy) == own.id


def test_a_run_of_other_settings_under_the_same_name_is_not_the_newest_beside_one_of_these(store, toy):
    """`nautile run local --set reason.policy.steps=2` has the name of `local`."""
    (key,) = (step.key for step in build_dag(toy) if step.label == "reason")
    own = made_by(store, published_with(store, key, "reason"), toy.name)
    made_by(store, checkpoint(store, "two steps"), toy.name, run="r2")
    assert newest(store, toy) == own.id


def test_before_the_first_run_with_new_settings_the_last_one_of_the_name_counts(store, toy):
    assert newest(store, toy) is None
    made_by(store, checkpoint(store, "arm"), "try.arm")
    assert newest(store, toy) is None
    earlier = made_by(store, checkpoint(store, "earlier"), toy.name, run="r2")
    assert newest(store, toy) == earlier.id
    unknown = checkpoint(store, "of a run that is not recorded")
    assert newest(store, toy) == unknown.id


def test_one_that_a_run_of_this_name_made_and_another_reused_is_its_own(store, toy):
    shared = made_by(store, checkpoint(store, "shared"), toy.name)
    row = {"id": "x", "run": "r2", "config": "try.arm", "label": "pretrain", "execution": shared.execution}
    write_attempt_row(store, row | {"state": "reused", "reused": True, "started": now()})
    assert newest(store, toy) == shared.id


def test_it_is_not_compared_with_an_arm_either(store, toy):
    own = evaluation(store, toy, made_by(store, checkpoint(store, "own"), toy.name), lambda item: item.index < 20)
    arm = made_by(store, checkpoint(store, "arm"), "try.arm", run="r2")
    evaluation(store, toy, arm, lambda item: True)
    new = evaluation(store, toy, made_by(store, checkpoint(store, "new"), toy.name, "r3"), lambda item: item.index < 20)
    earlier = find_earlier(store, new, ScheduleConfig(), executions_of_others(store, toy))
    assert {role: artifact.id for role, artifact in earlier.by_role.items()} == {"last": own.id, "best": own.id}
    assert earlier.skipped == {"of another configuration": 1}


@pytest.mark.parametrize("name", ["arm", "own"])
def test_any_checkpoint_can_be_named(store, toy, name):
    artifact = made_by(store, checkpoint(store, name), "try.arm")
    assert checkpoint_of(store, toy, artifact.id).key == artifact.key != key_of(name)
