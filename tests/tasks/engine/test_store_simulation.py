"""Two or three machines over a bucket in memory, with lost responses, partitions, old listings, clock jumps and kills.

Whatever happens: every published artifact is whole, of one execution, and the one that the lineage of what was made
from it names; in the end every machine has the same live version of each key.
"""

import json
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from nautile.common.errors import ConfigError, Retryable
from nautile.tasks.engine.errors import StageCrash
from tests.support.stages.simulated_machines import DOWN, KINDS, UP, World, check, published

NAMES = st.sampled_from("abc")
STAGES = {"up": UP, "down": DOWN}


class Simulation(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.world = World(Path(tempfile.mkdtemp(prefix="simulation-")), self.patch)

    def machine(self, name):
        return self.world.machines[name]

    @rule(name=NAMES, stage=st.sampled_from(sorted(STAGES)), force=st.booleans())
    def run(self, name, stage, force):
        if not self.machine(name).is_busy:
            self.machine(name).run(STAGES[stage], force=force)

    @rule(name=NAMES, turns=st.sampled_from([1, 2, 5, 20, 60, 200]))
    def go_on(self, name, turns):
        for _ in range(turns):
            if self.machine(name).is_busy:
                self.machine(name).process.step()

    @rule(name=NAMES)
    def kill(self, name):
        if self.machine(name).is_busy:
            self.machine(name).process.kill()

    @rule(name=NAMES, is_off=st.booleans())
    def cut_off(self, name, is_off):
        self.machine(name).view.cut_off = is_off

    @rule(name=NAMES, count=st.integers(1, 2))
    def lose_responses(self, name, count):
        self.machine(name).view.lost_responses = count

    @rule(name=NAMES, age=st.integers(1, 30))
    def list_late(self, name, age):
        self.machine(name).view.listing_age = age

    @rule(name=NAMES)
    def refuse_a_deletion(self, name):
        self.machine(name).view.refused_deletes = 1

    @rule(name=NAMES, hours=st.sampled_from([-3, 3, 0]))
    def set_clock(self, name, hours):
        self.machine(name).clock_ahead_s = hours * 3600.0

    @rule(seconds=st.sampled_from([20, 100, 400, 4000]), renewing=st.sets(NAMES))
    def pass_time(self, seconds, renewing):
        for _ in range(max(1, seconds // 100)):
            self.world.time += min(seconds, 100)
            for name in renewing:
                self.world.renew(self.machine(name))

    @rule(name=NAMES)
    def collect_garbage(self, name):
        if not self.machine(name).is_busy:
            self.machine(name).collect_garbage()

    @rule(name=NAMES)
    def push(self, name):
        if not self.machine(name).is_busy:
            self.machine(name).push()

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
            view.cut_off, view.lost_responses, view.refused_deletes, view.listing_age = False, 0, 0, None
        for machine in world.machines.values():
            if machine.is_busy:
                error = world.finish(machine).error
                assert not unexpected(error), repr(error)
        for machine in world.machines.values():
            for _ in range(5):
                machine.run(DOWN)
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
def test_a_hundred_histories_leave_every_artifact_whole_and_of_one_execution():
    simulate(max_examples=100, stateful_step_count=40, derandomize=True)


@pytest.mark.heavy
@pytest.mark.timeout(3600)
def test_thousands_of_random_histories_leave_every_artifact_whole_and_of_one_execution():
    simulate(max_examples=3000, stateful_step_count=60, derandomize=False, database=None)
