"""The faults of the local chaos run, and the places where each may be injected.

`draw_schedule` draws a step and a share of its work for each fault; the fault is injected when the run gets there. The
faults of the random rounds are reused. This file adds those of an S3 server, of a teacher, of two machines and of two
processes, and combinations.
"""

import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from bench.chaos import faults as chaos_faults
from bench.chaos.faults import FAULTS, child_processes, fill_up, kill_flow, wait_for
from bench.chaos.local_run import LABELS, LocalChaosRun, process_tree

Injector = Callable[[LocalChaosRun, random.Random], str | None]
Event = Literal["start", "progress", "save", "worker"]
OUTAGE_S = 120.0
TAKEN_OVER_S = 180.0
_SHARED_FAULTS: dict[str, Injector] = {fault.name: fault.inject for fault in FAULTS}  # type: ignore[misc]


def items_at_work(run: LocalChaosRun) -> list[psutil.Process]:
    """The processes of work items. The one that lists the items of a fan-out has an empty argument in its place."""
    return [process for process in child_processes(run, "worker") if (words := _command_line(process)) and words[-3]]


def kill_item(run: LocalChaosRun, rng: random.Random) -> str | None:
    for process in items_at_work(run):
        with suppress(psutil.Error):
            named = f"{process.cmdline()[-4]} {Path(process.cmdline()[-3]).name}"
            process.kill()
            return named
    return None


def simultaneously(first: str, *others: str) -> Injector:
    """Inject several faults at the same moment."""

    def inject(run: LocalChaosRun, rng: random.Random) -> str | None:
        hits = [INJECTORS[name](run, rng) for name in (first, *others)]
        return "; ".join(hit for hit in hits if hit) if all(hits) else None

    return inject


def kill_again(when: Literal["starts", "resumes"]) -> Injector:
    """Kill the run, restart it, and kill it again: while the command starts, or once the stage has resumed."""

    def inject(run: LocalChaosRun, rng: random.Random) -> str | None:
        if kill_flow(run, rng) is None:
            return None
        run.start()
        part = "server" if when == "starts" else "stage"
        if not (processes := wait_for(run, lambda: child_processes(run, part), 120.0)):
            return "killed; the second kill had nothing to hit"
        if when == "starts":
            time.sleep(rng.uniform(0.0, 4.0))
            return f"killed, then killed as it started: {kill_flow(run, rng)}"
        time.sleep(rng.uniform(0.5, 6.0))
        with suppress(psutil.Error):
            processes[0].kill()
        return f"killed, then the stage that resumed: process {processes[0].pid}"

    return inject


def teacher_answers(kind: str, count: int) -> Injector:
    """Let the next `count` requests to the teacher fail as `kind`; ends once their rows are written."""

    def inject(run: LocalChaosRun, rng: random.Random) -> str | None:
        assert run.counting
        coming = run.counting.coming
        failed_before = run.failed_calls().total()
        coming.extend([kind] * count)
        run.wait_until(lambda: not coming or not run.alive(), 90.0)
        affected = count - len(coming)
        # The run may have stopped before all of them arrived; the rest must not hit another fault's window.
        coming.clear()
        run.wait_until(lambda: run.failed_calls().total() >= failed_before + affected or not run.alive(), 15.0)
        return f"{affected} requests" if affected else None

    return inject


def cut_upload(run: LocalChaosRun, rng: random.Random) -> str | None:
    """Break the connections to the S3 server in the middle of an upload, and refuse them for some seconds."""
    assert run.mirror
    assert run.mirror.proxy
    count, seconds = rng.randrange(1_000, 60_000), rng.uniform(5.0, 15.0)
    # First let so many bytes through, then cut: the upload breaks in the middle of an object.
    run.mirror.cut_after(count, 40.0)
    if not run.wait_until(lambda: run.mirror.proxy.left <= 0 or not run.alive(), 35.0):  # type: ignore[union-attr]
        return None
    run.mirror.cut_after(0, seconds)
    return f"after {count} bytes, for {seconds:.0f} s"


def lose_mirror(run: LocalChaosRun, rng: random.Random) -> str | None:
    """Drop every connection to the S3 server for two minutes, while the stage continues as far as it can."""
    assert run.mirror
    start = time.monotonic()
    run.mirror.cut_after(0, OUTAGE_S)
    run.wait_until(lambda: not run.alive(), OUTAGE_S)
    return f"for {OUTAGE_S:.0f} s{'' if run.alive() else f', the run stopped after {time.monotonic() - start:.0f} s'}"


def hang_mirror(run: LocalChaosRun, rng: random.Random) -> str | None:
    assert run.mirror
    seconds = rng.uniform(15.0, 25.0)
    run.mirror.hang(seconds)
    return f"for {seconds:.0f} s"


def fill_mirror(run: LocalChaosRun, rng: random.Random) -> str | None:
    """Fill the disk of the S3 server until the run has stopped, for at most `stop_s` or 45 seconds."""
    assert run.mirror
    size = fill_up(run.mirror.folder / "ballast", run, min(run.stop_s, 45.0))
    return f"{size >> 20} MB of ballast on the server's disk"


def kill_holder(run: LocalChaosRun, rng: random.Random) -> str | None:
    """Kill the process that holds the lease; its machine stays down and another one takes over."""
    lease = _current_lease(run)
    if lease is None or kill_flow(run, rng) is None:
        return None
    run.at_machine(run.machine + 1)
    run.start()
    if not wait_for(run, lambda: child_processes(run, "stage"), TAKEN_OVER_S):
        return "no other machine took over"
    return (
        f"the lease had fence {lease[1]}; machine {run.machine} took it over with fence {_lease_fence(run, lease[0])}"
    )


def stop_holder(run: LocalChaosRun, rng: random.Random) -> str | None:
    """Suspend the machine that holds the lease until another one has taken over, then resume it."""
    lease, first = _current_lease(run), run.flow
    if lease is None or not run.alive():
        return None
    # Suspend every process of the first machine, and start the second one.
    frozen = process_tree(first)
    for process in frozen:
        with suppress(psutil.Error):
            process.suspend()
    start = time.monotonic()
    label, finished_before = run.current_stage(), run.finished()
    run.others.append(first)
    run.at_machine(run.machine + 1)
    run.start()
    taken_over = bool(wait_for(run, lambda: child_processes(run, "stage"), TAKEN_OVER_S))
    stood_s = time.monotonic() - start
    # Resume the first machine: its stage must notice the higher fence and end.
    for process in frozen:
        with suppress(psutil.Error):
            process.resume()
    if not taken_over:
        return "no other machine took over"
    stages = [process for process in frozen if "tasks.engine.child_main" in " ".join(_command_line(process))]
    stages_ended = run.wait_until(
        lambda: not any(process.is_running() and _command_line(process) for process in stages), 60.0
    )
    run.wait_until(lambda: run.finished() - finished_before or not run.alive(), TAKEN_OVER_S)
    code = run.interrupt(first)
    fate = "ended its stage" if stages_ended else "WENT ON with its stage"
    return (
        f"it stood still for {stood_s:.0f} s; machine {run.machine} made {label} with fence "
        f"{_lease_fence(run, lease[0])}; the first came back and {fate} (exit code {code} at SIGTERM)"
    )


def run_twice(run: LocalChaosRun, rng: random.Random) -> str | None:
    """Start the same command a second time in the same store, until the current step is finished."""
    if not run.alive():
        return None
    finished_before = run.finished()
    second = run.second_run()
    log = run.log.with_name(f"second-{run.log.name}")
    waited = run.wait_until(lambda: "works on it" in _text(log) or second.poll() is not None, 60.0)
    run.wait_until(lambda: run.finished() - finished_before or not run.alive(), TAKEN_OVER_S)
    code = run.interrupt(second) if second.poll() is None else second.returncode
    return f"the second {'waited' if waited else 'did not wait'}, then ended by SIGTERM with exit code {code}"


def half_written(run: LocalChaosRun, rng: random.Random) -> str | None:
    """Leave half a line of replies, half a line of events and half a staging file, as of another writer that died."""
    folders = [path.parent for path in (run.store / "staging").glob("*/execution.json")]
    if not folders:
        return None
    # Files with a name that no process of this run writes: they must be read as far as they are whole, and never
    # repaired.
    for folder in run.store.glob("replies/*"):
        (folder / "of-another-writer.jsonl").write_text('{"digest": "0123456789abcdef", "text": "The ans')
    with (run.store / "events/of-another-writer.jsonl").open("a") as file:
        file.write('{"id": "x", "kind": "metric", "execution": "none", "time": 1, "fie')
    (folders[0] / ".of-another-writer.tmp").write_bytes(b"\0" * rng.randrange(1, 5000))
    return f"a reply, an event and a file of {folders[0].name[:12]}"


def kill_publishing(run: LocalChaosRun, rng: random.Random) -> str | None:
    """Kill the run when the work of a step is finished but not published."""
    if not run.wait_until(lambda: any(work.is_finished for work in run.active_steps()) or not run.alive(), 180.0):
        return None
    return kill_flow(run, rng)


def flip_byte(run: LocalChaosRun, rng: random.Random) -> str | None:
    """The fault of the random rounds, retried until the current machine has an artifact's files."""
    for _ in range(20):
        if target := chaos_faults.flip_byte(run, rng):
            return target
        time.sleep(1.0)
    return None


def _current_lease(run: LocalChaosRun) -> tuple[str, int] | None:
    """The key of the active step and the fence of its lease, None without either."""
    keys = [work.key for work in run.active_steps()]
    return (keys[0], _lease_fence(run, keys[0])) if keys and _lease_fence(run, keys[0]) else None


def _lease_fence(run: LocalChaosRun, key: str) -> int:
    assert run.mirror
    return run.mirror.greatest_fence(key)


def _command_line(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return [] if process.status() == psutil.STATUS_ZOMBIE else process.cmdline()
    return []


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


INJECTORS: dict[str, Injector] = {
    **_SHARED_FAULTS,
    "flipped byte": flip_byte,
    "kill a work item": kill_item,
    "kill while it starts again": kill_again("starts"),
    "kill what resumes": kill_again("resumes"),
    "half-written files of another writer": half_written,
    "two runs at once": run_twice,
    "the teacher answers 429": teacher_answers("429", 6),
    "the teacher answers 500": teacher_answers("500", 6),
    "the teacher hangs": teacher_answers("hang", 2),
    "the teacher cuts its answers": teacher_answers("cut", 4),
    "uploads are cut": cut_upload,
    "the S3 server is gone": lose_mirror,
    "the S3 server hangs": hang_mirror,
    "full disk of the mirror": fill_mirror,
    "the lease holder is killed": kill_holder,
    "the lease holder stands still": stop_holder,
    "kill while it publishes": kill_publishing,
}
INJECTORS |= {
    "the stage and Prefect's server killed": simultaneously("kill the stage", "kill Prefect's server"),
    "the S3 server hangs, the stage killed": simultaneously("the S3 server hangs", "kill the stage"),
    "the S3 server is cut, the flow killed": simultaneously("uploads are cut", "kill the flow"),
    "the teacher answers 500, the stage killed": simultaneously("the teacher answers 500", "kill the stage"),
}


@dataclass(frozen=True)
class PlannedFault:
    """A fault and its place: after `share` of the work of step `label`, or at its next checkpoint or work item."""

    number: int
    fault: str
    label: str
    share: float
    event: Event

    def is_reached(self, run: LocalChaosRun) -> bool:
        if self.event == "worker":
            return bool(items_at_work(run)) and self.label in run.current_stage()
        if self.event == "start":
            return self.label in run.current_stage()
        for work in run.active_steps():
            # Its own progress comes once per chunk of prompts, too coarse to aim at; the teacher counts each answer.
            if work.label == self.label == "distill":
                return run.answered >= max(1.0, self.share * run.prompts)
            if work.label == self.label:
                counted = work.saved if self.event == "save" and work.total else work.done
                return bool(work.total) and counted >= max(1.0, self.share * work.total)
        return False

    @property
    def place(self) -> str:
        descriptions: dict[Event, str] = {
            "start": "as it starts",
            "progress": f"{self.share:.0%} done",
            "save": f"a checkpoint after {self.share:.0%}",
            "worker": "a work item at work",
        }
        return f"{self.label}, {descriptions[self.event]}"


INGESTS = ("ingest:exemplars", "ingest:synth")
EVALUATIONS = ("evaluate:pretrain", "evaluate:align", "evaluate:reason")
# Fault, the steps from which one is drawn, the range of the share of work, and the event that triggers it.
# The shares of one step rise from row to row, so that its faults are spread over its work.
PLAN: tuple[tuple[str, tuple[str, ...], tuple[float, float], Event], ...] = (
    ("kill a work item", ("ingest:exemplars",), (0.0, 0.0), "worker"),
    ("kill while it starts again", ("ingest:exemplars", "ingest:synth"), (0.0, 0.0), "worker"),
    ("half-written files of another writer", ("distill",), (0.0, 0.2), "progress"),
    ("the teacher answers 429", ("distill",), (0.05, 0.3), "progress"),
    ("the teacher answers 500, the stage killed", ("distill",), (0.3, 0.5), "progress"),
    ("the teacher hangs", ("distill",), (0.3, 0.6), "progress"),
    ("the teacher cuts its answers", ("distill",), (0.5, 0.7), "progress"),
    ("kill the flow", ("distill",), (0.7, 0.8), "progress"),
    ("two runs at once", ("distill",), (0.75, 0.85), "progress"),
    ("kill the stage", ("pretrain",), (0.20, 0.25), "save"),
    ("locked catalog", ("pretrain",), (0.22, 0.3), "progress"),
    ("full disk", ("pretrain",), (0.3, 0.38), "progress"),
    ("kill Prefect's server", ("pretrain",), (0.4, 0.43), "progress"),
    ("the lease holder is killed", ("pretrain",), (0.45, 0.5), "progress"),
    ("kill the stage", ("pretrain",), (0.52, 0.6), "progress"),
    ("clock jump", ("pretrain",), (0.6, 0.64), "save"),
    ("stop the stage", ("pretrain",), (0.66, 0.75), "progress"),
    ("torn event line", ("pretrain",), (0.8, 0.84), "save"),
    ("full disk of the mirror", ("pretrain",), (0.92, 0.97), "progress"),
    ("kill the stage", ("evaluate:pretrain",), (0.3, 0.7), "progress"),
    ("the teacher answers 429", ("align",), (0.0, 0.0), "start"),
    ("the stage and Prefect's server killed", ("align",), (0.4, 0.8), "progress"),
    ("flipped byte", ("evaluate:align",), (0.1, 0.6), "progress"),
    ("the S3 server is cut, the flow killed", ("reason",), (0.0, 0.1), "progress"),
    ("the S3 server is gone", ("reason",), (0.3, 0.5), "progress"),
    ("kill what resumes", ("evaluate:reason",), (0.1, 0.6), "progress"),
    ("the S3 server hangs, the stage killed", ("self_distill",), (0.2, 0.4), "progress"),
    ("clock jump", ("self_distill",), (0.4, 0.5), "progress"),
    ("the lease holder stands still", ("self_distill",), (0.5, 0.8), "progress"),
    ("kill while it publishes", ("evaluate:self_distill",), (0.1, 0.5), "progress"),
)


def draw_schedule(seed: int) -> list[PlannedFault]:
    """The faults with drawn places, in the order in which the run reaches them."""
    rng = random.Random(seed)
    planned = [
        PlannedFault(0, fault, rng.choice(labels), rng.uniform(*shares), event) for fault, labels, shares, event in PLAN
    ]
    # In the order of the run: the bench only ever waits for the next place.
    planned.sort(key=lambda item: (LABELS.index(item.label), item.share))
    return [PlannedFault(i + 1, item.fault, item.label, item.share, item.event) for i, item in enumerate(planned)]
