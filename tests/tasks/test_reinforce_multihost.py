"""The reinforcement stages as two processes, of which one is killed, against one with as many devices."""

import json
import threading

import numpy as np
import psutil
import pytest

from nautile.common.errors import Retryable
from nautile.configs.base import OptimizerConfig
from nautile.configs.operation import LaunchConfig
from nautile.configs.training import AlignConfig, JudgeConfig, ProblemsConfig, RolloutConfig, SelfDistillConfig
from nautile.model.nautile import initialise
from nautile.model.weights.files import load_weights, save_weights
from nautile.store.artifacts import Store
from nautile.store.catalog import Catalog
from nautile.tasks.engine.attempt import run_stage
from nautile.tasks.engine.errors import StageCrash
from nautile.tasks.engine.stage import RunContext
from tests.rl.conftest import SUMS, TOKENIZER, policy, tiny_model
from tests.support.samples.stage_store import key_of
from tests.support.servers.fake_openai import FakeOpenAI, useful
from tests.support.stages.stage_parent import wait_for
from tests.support.stages.stage_reinforced import reinforced

ROLLOUT = RolloutConfig(prompts=2, group=4, prompt_length=60, max_tokens=6)
PROBLEMS = ProblemsConfig(tasks=SUMS, count=12)
STEPS, GUARD, DEVICES, JUDGED_AT_ONCE = 2, 8, 2, 2


def section(url):
    optimizer = OptimizerConfig(learning_rate=1e-3, schedule="constant")
    learner = policy(
        steps=STEPS, kl=0.1, micro_rows=8, save_every=1, fsdp=DEVICES, guard_every=STEPS, guard_problems=GUARD
    )
    judge = JudgeConfig(endpoint="judge", calibration_items=4, hostile_items=0)
    distil = SelfDistillConfig(
        rollout=ROLLOUT, problems=ProblemsConfig(tasks=SUMS, count=2), batch_rows=8, optimizer=optimizer, fsdp=DEVICES,
        rounds=2,
    )  # fmt: skip
    return {
        "align": AlignConfig(rollout=ROLLOUT, policy=learner, judge=judge, problems=PROBLEMS).model_dump(mode="json"),
        "self_distill": distil.model_dump(mode="json"),
        "endpoints": {
            "judge": {"kind": "openai", "model": "fake", "url": url, "timeout_s": 60, "concurrency": JUDGED_AT_ONCE}
        },
        "seeds": {"data": 7, "sampling": 7},
    }


@pytest.fixture
def start(tmp_path):
    """The id of a published checkpoint."""
    store = Store(tmp_path / "store")
    model = tiny_model()
    folder = store.staging(key_of("start")) / "output" / "checkpoint"
    save_weights(folder, initialise(model, 0), model, TOKENIZER)
    fields = {"stage": "toy", "version": 1, "config": {}, "inputs": {}, "facts": {}}
    return store.publish("checkpoint", key_of("start"), folder, **fields).id


def member(number):
    """The process of one of the hosts that this test started, if there is one."""
    for process in psutil.Process().children(recursive=True):
        try:
            is_child = "nautile.tasks.engine.child_main" in " ".join(process.cmdline())
            if is_child and process.environ().get("NAUTILE_PROCESS") == str(number):
                return process
        except psutil.Error:
            continue
    return None


@pytest.mark.heavy
@pytest.mark.timeout(1200)
def test_two_processes_of_which_one_is_killed_do_what_one_does(start, tmp_path, monkeypatch):
    store, made, asked = Store(tmp_path / "store"), {}, {}

    def run(processes, url):
        launch = LaunchConfig(processes=processes, stages=("reinforced",))
        monkeypatch.setenv("JAX_NUM_CPU_DEVICES", str(DEVICES // processes))
        context = RunContext(
            f"r{processes}", str(store.root), force=processes == 1, launch=launch, ask_again=processes == 1
        )
        return run_stage(reinforced, section(url), {"checkpoint": start}, context)

    def kill_second():
        wait_for(lambda: any(store.root.glob("staging/*/scratch/checkpoints/steps/1")), seconds=600)
        member(1).kill()

    with FakeOpenAI(reply=useful) as server:
        for processes in (2, 1):
            if processes == 2:
                killer = threading.Thread(target=kill_second)
                killer.start()
                with pytest.raises((Retryable, StageCrash)):  # the other may notice first, and crashes
                    run(processes, server.url)
                killer.join()
            before = server.answered if processes == 1 else 0
            made[processes] = {kind: store.get(id) for kind, id in run(processes, server.url).items()}
            asked[processes] = server.answered - before
    # One process asks, and asks once; the kill may have lost the answers to the requests in flight.
    assert asked[1] <= asked[2] <= asked[1] + JUDGED_AT_ONCE
    rows = {n: _rows(made[n]["rollouts"].path / "rollouts.jsonl") for n in made}
    for ours, theirs in zip(rows[2], rows[1], strict=True):
        np.testing.assert_allclose(ours.pop("logprobs"), theirs.pop("logprobs"), atol=1e-5)
        assert ours == theirs
    facts = {n: made[n]["checkpoint"].manifest["facts"] for n in made}
    assert facts[2] == facts[1]
    assert [(reading["step"], reading["n"]) for reading in facts[2]["guard"]] == [(0, GUARD), (STEPS, GUARD)]
    weights = {n: load_weights(made[n]["checkpoint"].path)[0] for n in made}
    np.testing.assert_allclose(weights[2]["embedding"], weights[1]["embedding"], atol=1e-5)
    catalog = Catalog(store)
    catalog.ingest()
    measured = {n: _metrics(catalog, made[n]["checkpoint"].execution) for n in made}
    assert measured[2].keys() == measured[1].keys()
    assert {step for name, _, step in measured[2] if name == "grad_norm"} == {1, 2}
    assert any(name == "loss" for name, *_ in measured[2]), "self-distillation has trained"
    for key, value in measured[1].items():
        if "per_second" not in key[0]:
            assert measured[2][key] == pytest.approx(value, rel=1e-5, abs=1e-6), key


def _rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _metrics(catalog, execution):
    rows = catalog.query(
        "SELECT name, source, step, value FROM metrics WHERE execution = ? AND NOT starts_with(name, 'system/')",
        [execution],
    )
    values = {(row["name"], row["source"], row["step"]): row["value"] for row in rows}
    assert len(values) == len(rows), "each process but the first is silent"
    return values
