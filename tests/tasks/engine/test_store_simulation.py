"""Two or three machines over a bucket in memory, with lost responses, partitions, old listings, clock jumps and kills.

Whatever happens: every published artifact is whole, of one execution, and the one that the lineage of what was made
from it names; in the end every machine has the same live version of each key.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from nautile.common.errors import ConfigError, Retryable
from nautile.tasks.engine.errors import StageCrash
from tests.support.stages.planted_faults import FAULTS
from tests.support.stages.simulated_machines import DOWN, KINDS, UP, World, check, published

NAMES = st.sampled_from("abc")
TASKS = st.sampled_from(["down", "up again", "up again", "down again", "push", "garbage", "garbage, refused"])
# Where a machine is left standing: before what other machines will rely on, and behind it.
STOPS = st.sampled_from(
    [
        "put simulated/run/manifests",
        "after put simulated/run/manifests",
        "put simulated/run/payload",
        "put simulated/run/leases",
        "delete simulated/run/payload",
        "rename",
        "before the end of the work",
    ]
)


class Simulation(RuleBasedStateMachine):
    """Few rules, most of which make a machine go on: else hardly any history has two machines at one key."""

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        folder = tempfile.mkdtemp(prefix="simulation-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"))
        self.world = World(Path(folder), self.patch)

    def machine(self, name):
        return self.world.machines[name]

    def work(self, name, task, stop, times):
        machine = self.machine(name)
        if not machine.is_busy:
            machine.begin(task)
        for _ in range(times):
            machine.process.go_to(stop)

    @rule(name=NAMES, task=TASKS, stop=STOPS | st.just("its end"))
    def work_until(self, name, task, stop):
        self.work(name, task, stop, 1)

    @rule(name=NAMES, task=TASKS, turns=st.sampled_from([1, 2, 5, 20]))
    def work_on(self, name, task, turns):
        self.work(name, task, "", turns)

    @rule(
        names=st.permutations("abc"), task=TASKS, stop=STOPS, other_task=st.none() | st.just("up again"),
        is_renewed=st.booleans(), next_task=TASKS,
    )  # fmt: skip
    def overtake(self, names, task, stop, other_task, is_renewed, next_task):
        """A machine stands still at a bad moment. Another one does the same (or makes the input), and may take the
        lease over and go on to something else before the first one goes on."""
        name, other, _ = names
        self.machine(name).view.cut_off = self.machine(other).view.cut_off = False
        self.work(name, task, stop, 1)
        self.work(other, other_task or task, "its end", 1)
        if not is_renewed:
            self.machine(other).process.go_to("its end", wait_s=150.0)
            self.work(other, next_task, "its end", 1)
        self.work(name, task, "its end", 1)

    @rule(name=NAMES, is_kill=st.booleans(), is_off=st.booleans())
    def break_off(self, name, is_kill, is_off):
        self.machine(name).view.cut_off = is_off
        if is_kill and self.machine(name).is_busy:
            self.machine(name).process.kill()

    @rule(
        name=NAMES, lost=st.integers(0, 2), cut=st.integers(0, 2), age=st.none() | st.integers(1, 30),
        hours=st.sampled_from([-3, 3, 0]),
    )  # fmt: skip
    def disturb(self, name, lost, cut, age, hours):
        view = self.machine(name).view
        view.lost_responses, view.cut_uploads, view.listing_age = lost, cut, age
        self.machine(name).clock_ahead_s = hours * 3600.0

    @rule(seconds=st.sampled_from([20, 100, 400, 4000]), renewing=st.sets(NAMES))
    def pass_time(self, seconds, renewing):
        for _ in range(max(1, seconds // 100)):
            self.world.time += min(seconds, 100)
            for name in renewing:
                self.world.renew(self.machine(name))

    @rule(source=NAMES, copy=NAMES)
    def copy_disk(self, source, copy):
        if not self.machine(source).is_busy and not self.machine(copy).is_busy:
            self.world.copy(self.machine(source), self.machine(copy))

    @invariant()
    def is_whole(self):
        check(self.world)

    def teardown(self):
        try:
            self.settle()
        finally:
            for machine in self.world.machines.values():
                if machine.is_busy:
                    machine.process.kill()
            self.patch.undo()
            shutil.rmtree(self.world.folder)

    def settle(self):
        """All faults end. Every machine finishes what it does, then runs everything: all get the same."""
        world = self.world
        for machine in world.machines.values():
            view = machine.view
            view.cut_off, view.listing_age = False, None
            view.lost_responses = view.cut_uploads = view.refused_deletes = 0
        for machine in world.machines.values():
            if machine.is_busy:
                error = world.finish(machine).error
                assert not unexpected(error), repr(error)
        for machine in world.machines.values():
            for _ in range(5):
                machine.begin("down")
                process = world.finish(machine)
                assert not unexpected(process.error), repr(process.error)
                if process.error is None:
                    break
            assert process.error is None, f"{machine.name} cannot go on: {process.error!r}"
        check(world)
        versions = published(world)
        live = {}
        for machine in world.machines.values():
            with world.acting_as(machine):
                store = machine.store
                store.refresh()
                for kind in KINDS:
                    for stage in (UP, DOWN):
                        [artifact] = [a for a in store.list(kind) if a.manifest["stage"] == stage.name]
                        live.setdefault((kind, stage.name), set()).add(artifact.execution)
                        content = versions[artifact.version_id][1]
                        assert json.loads((artifact.path / "a.json").read_text()) == content
                        assert store.verify(artifact) == []
                        others = [other for other, _ in versions.values() if other["key"] == artifact.key]
                        assert artifact.manifest["fence"] == max(other["fence"] for other in others)
                for artifact in store.list(superseded=True):
                    assert store.verify(artifact, remote=False) == []
        assert all(len(executions) == 1 for executions in live.values()), live
        for stage in (UP, DOWN):
            assert live["numbers", stage.name] == live["notes", stage.name]


def unexpected(error):
    return error is not None and not isinstance(error, (ConfigError, Retryable, StageCrash))


def simulate(**options):
    run_state_machine_as_test(
        Simulation, settings=settings(deadline=None, suppress_health_check=list(HealthCheck), **options)
    )


@pytest.mark.slow
def test_histories_leave_every_artifact_whole_and_of_one_execution():
    simulate(max_examples=40, stateful_step_count=12, derandomize=True)


@pytest.mark.heavy
@pytest.mark.timeout(7200)  # some 21 minutes of processor time
def test_thousands_of_histories_leave_every_artifact_whole_and_of_one_execution():
    simulate(max_examples=2000, stateful_step_count=12, derandomize=True)


@pytest.mark.heavy
@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_found_within_some_histories(fault, monkeypatch):
    FAULTS[fault](monkeypatch)
    # What a process draws at random is not repeated, so neither is each failure: one is enough.
    with pytest.raises((AssertionError, Flaky)):
        simulate(
            max_examples=60,
            stateful_step_count=12,
            derandomize=True,
            phases=[Phase.generate],
            report_multiple_bugs=False,
        )
