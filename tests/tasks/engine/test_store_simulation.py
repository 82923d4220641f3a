"""Two or three machines over a bucket in memory, with lost responses, partitions, old listings, clock jumps and kills.

Whatever happens: every published artifact is whole, of one execution, and the one that the lineage of what was made
from it names; in the end every machine has the same live version of each key.
"""

import json
import os
import secrets
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from nautile.common.errors import ConfigError, Retryable
from nautile.tasks.engine.errors import StageCrash
from tests.support.stages.planted_faults import FAULTS
from tests.support.stages.simulated_machines import DOWN, KINDS, UP, World, check, published

ROOT = Path(__file__).parents[3]
SEED = "NAUTILE_SIMULATION_SEED"
NAMES = st.sampled_from("abcd")
TASKS = st.sampled_from(["down", "up again", "up again", "down again", "push", "garbage", "garbage, refused"])
MAKING = st.sampled_from(["up again", "down again"])
OTHER_TASKS = st.sampled_from([None, "up again", "garbage", "push"])
NEXT_TASKS = st.sampled_from([None, "garbage", "garbage", "garbage", "push"])
# Where a machine is left standing: before what other machines will rely on, and behind it.
STOPS = st.sampled_from(
    [
        *["put simulated/run/manifests"] * 3,  # the last moment, for which the protocol is made
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

    def is_at_work(self):
        """Whether anything can be broken off or be late."""
        return any(machine.is_busy for machine in self.world.machines.values())

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
        names=st.permutations("abcd"), task=MAKING | TASKS, stop=STOPS, other_task=OTHER_TASKS,
        is_renewed=st.booleans(), next_task=NEXT_TASKS, is_unaware=st.booleans(),
    )  # fmt: skip
    def overtake(self, names, task, stop, other_task, is_renewed, next_task, is_unaware):
        """A machine stands still at a bad moment. Another one does the same or something else, and may take the lease
        over and go on to something else before the first one goes on, whose clock may have stood still, too."""
        machine, other = map(self.machine, names[:2])
        machine.view.cut_off = other.view.cut_off = False
        if other.is_busy:
            other.process.go_to("its end", wait_s=150.0)
        self.work(machine.name, task, stop, 1)
        began = self.world.time
        self.work(other.name, other_task or task, "its end", 1)
        if not is_renewed:
            other.process.go_to("its end", wait_s=150.0)
            self.world.time += 700.0
            self.work(other.name, next_task or task, "its end", 1)
        if is_unaware and machine.host is not other.host:
            machine.host.stood_still_s += self.world.time - began
        self.work(machine.name, task, "its end", 1)

    @rule(
        pair=st.sampled_from(["ad", "da", "ab", "bc"]), task=st.sampled_from(["down", "down again"]),
        stop=st.sampled_from(["put simulated/run/staging", "before the end of the work", "rename to artifacts"]),
    )  # fmt: skip
    def make_again_what_is_read(self, pair, task, stop):
        """A process works; another one, of the same machine or not, makes its input again."""
        name, other = pair
        self.machine(name).view.cut_off = self.machine(other).view.cut_off = False
        for machine in map(self.machine, pair):
            if machine.is_busy:
                machine.process.go_to("its end", wait_s=150.0)
        self.work(name, "up", "its end", 1)
        self.work(name, task, stop, 1)
        self.work(other, "up again", "its end", 1)
        self.work(name, task, "its end", 1)

    @precondition(lambda self: self.is_at_work())
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
        self.machine(name).host.clock_ahead_s = hours * 3600.0

    @precondition(lambda self: self.is_at_work())
    @rule(seconds=st.sampled_from([20, 100, 400, 4000]), renewing=st.sets(NAMES))
    def pass_time(self, seconds, renewing):
        for _ in range(max(1, seconds // 100)):
            self.world.time += min(seconds, 100)
            for name in renewing:
                self.world.renew(self.machine(name))

    @rule(source=NAMES, copy=NAMES)
    def copy_disk(self, source, copy):
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
        world.finish_all()
        hosts = [machine for machine in world.machines.values() if machine.host is machine]
        for machine in hosts:
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
        for machine in hosts:
            with world.acting_as(machine):
                store = machine.store
                store.refresh()
                for kind in KINDS:
                    for stage in (UP, DOWN):
                        [artifact] = [a for a in store.list(kind) if a.manifest["stage"] == stage.name]
                        live.setdefault((kind, stage.name), set()).add(artifact.execution)
                        content = versions[artifact.version_id][1]
                        assert json.loads((artifact.path / "a.json").read_text()) == content
                        others = [other for other, _ in versions.values() if other["key"] == artifact.key]
                        assert artifact.manifest["fence"] == max(other["fence"] for other in others)
                for artifact in store.list(superseded=True):
                    assert store.verify(artifact, remote=False) == []  # the remote copy: by `check`
        assert all(len(executions) == 1 for executions in live.values()), live
        for stage in (UP, DOWN):
            assert live["numbers", stage.name] == live["notes", stage.name]


def unexpected(error):
    return error is not None and not isinstance(error, (ConfigError, Retryable, StageCrash))


def simulate(count, seed=None, **options):
    """Play `count` histories: those of the seed, else the same ones each time."""
    of_seed = type(Simulation.__name__, (Simulation,), {"_hypothesis_internal_use_seed": seed})
    run_state_machine_as_test(
        of_seed,
        settings=settings(
            max_examples=count,
            stateful_step_count=12,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            **options,
        ),
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)  # half a minute of processor time
def test_histories_leave_every_artifact_whole_and_of_one_execution():
    simulate(60)


@pytest.mark.heavy
@pytest.mark.timeout(7200)  # half an hour of processor time
def test_thousands_of_histories_leave_every_artifact_whole_and_of_one_execution():
    """Others each time: all that a history draws is of its seed, so the one that is printed plays them again."""
    seed = int(os.environ.get(SEED) or secrets.randbits(32))
    try:
        simulate(2000, seed)
    except BaseException as error:
        test = f"{Path(__file__).relative_to(ROOT)} -k thousands"
        error.add_note(f"again: {SEED}={seed} .venv/bin/python -m pytest -n 0 {test}")
        raise


@pytest.mark.heavy
@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_found_within_some_histories(fault, monkeypatch):
    FAULTS[fault](monkeypatch)
    with pytest.raises(AssertionError):
        simulate(200, phases=[Phase.generate], report_multiple_bugs=False)
