"""The faults of the local chaos run, and where each may strike.

A fault is drawn a step and a share of it (`draw_schedule`); it strikes when the run is seen to be there. Those of the
random rounds are used as they are; here are the faults of an S3 server, of a teacher, of two machines and of two
processes, and the ones that come together.
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
from bench.chaos.faults import FAULTS, fill, kill_flow, wait_for
from bench.chaos.local_scene import LABELS, LocalRound, family_of

Strike = Callable[[LocalRound, random.Random], str | None]
Event = Literal["start", "progress", "save", "worker"]
OUTAGE_S = 120.0
TAKEN_OVER_S = 180.0
_OF_THE_ROUNDS: dict[str, Strike] = {fault.name: fault.strike for fault in FAULTS}  # type: ignore[misc]


def family(scene: LocalRound, part: str) -> list[psutil.Process]:
    return chaos_faults.family(scene, part)


def items_at_work(scene: LocalRound) -> list[psutil.Process]:
    """The processes of work items; the one that lists the items of a fan-out has none in its command."""
    return [process for process in family(scene, "worker") if (words := _words(process)) and words[-3]]


def kill_item(scene: LocalRound, draw: random.Random) -> str | None:
    for process in items_at_work(scene):
        with suppress(psutil.Error):
            named = f"{process.cmdline()[-4]} {Path(process.cmdline()[-3]).name}"
            process.kill()
            return named
    return None


def together(first: str, *others: str) -> Strike:
    """Faults that strike at the same moment."""

    def strike(scene: LocalRound, draw: random.Random) -> str | None:
        hits = [STRIKES[name](scene, draw) for name in (first, *others)]
        return "; ".join(hit for hit in hits if hit) if all(hits) else None

    return strike


def kill_again(when: Literal["starts", "resumes"]) -> Strike:
    """The run is killed, begun again, and what resumes it is killed too: as the command starts, or the stage does."""

    def strike(scene: LocalRound, draw: random.Random) -> str | None:
        if kill_flow(scene, draw) is None:
            return None
        scene.start()
        part = "server" if when == "starts" else "stage"
        if not (seen := wait_for(scene, lambda: family(scene, part), 120.0)):
            return "killed; the second kill had nothing to hit"
        if when == "starts":
            time.sleep(draw.uniform(0.0, 4.0))
            return f"killed, then killed as it started: {kill_flow(scene, draw)}"
        time.sleep(draw.uniform(0.5, 6.0))
        with suppress(psutil.Error):
            seen[0].kill()
        return f"killed, then the stage that resumed: process {seen[0].pid}"

    return strike


def teacher_answers(kind: str, count: int) -> Strike:
    """The next `count` requests meet that fault; it is over once the rows of their failures are written."""

    def strike(scene: LocalRound, draw: random.Random) -> str | None:
        assert scene.counting
        coming = scene.counting.coming
        before = scene.failed_calls().total()
        coming.extend([kind] * count)
        scene.wait_until(lambda: not coming or not scene.alive(), 90.0)
        met = count - len(coming)
        coming.clear()
        scene.wait_until(lambda: scene.failed_calls().total() >= before + met or not scene.alive(), 15.0)
        return f"{met} requests" if met else None

    return strike


def cut_upload(scene: LocalRound, draw: random.Random) -> str | None:
    """Connections to the S3 server break in the middle of an upload, and for some seconds after it."""
    assert scene.mirror
    assert scene.mirror.proxy
    count, seconds = draw.randrange(1_000, 60_000), draw.uniform(5.0, 15.0)
    scene.mirror.cut_after(count, 40.0)
    if not scene.wait_until(lambda: scene.mirror.proxy.left <= 0 or not scene.alive(), 35.0):  # type: ignore[union-attr]
        return None
    scene.mirror.cut_after(0, seconds)
    return f"after {count} bytes, for {seconds:.0f} s"


def lose_mirror(scene: LocalRound, draw: random.Random) -> str | None:
    """Every connection to the S3 server is dropped for two minutes, in which the stage goes on as far as it can."""
    assert scene.mirror
    began = time.monotonic()
    scene.mirror.cut_after(0, OUTAGE_S)
    scene.wait_until(lambda: not scene.alive(), OUTAGE_S)
    return f"for {OUTAGE_S:.0f} s{'' if scene.alive() else f', the run stopped after {time.monotonic() - began:.0f} s'}"


def hang_mirror(scene: LocalRound, draw: random.Random) -> str | None:
    assert scene.mirror
    seconds = draw.uniform(15.0, 25.0)
    scene.mirror.hang(seconds)
    return f"for {seconds:.0f} s"


def fill_mirror(scene: LocalRound, draw: random.Random) -> str | None:
    """The disk of the S3 server is full until an upload has failed there and 15 s more, or `stop_s` have passed."""
    assert scene.mirror
    size = fill(scene.mirror.folder / "ballast", scene, min(scene.stop_s, 45.0))
    return f"{size >> 20} MB of ballast on the server's disk"


def kill_holder(scene: LocalRound, draw: random.Random) -> str | None:
    """The process that holds the lease is killed, and its machine stays away: another one takes over."""
    lease = _lease(scene)
    if lease is None or kill_flow(scene, draw) is None:
        return None
    scene.at_machine(scene.machine + 1)
    scene.start()
    if not wait_for(scene, lambda: family(scene, "stage"), TAKEN_OVER_S):
        return "no other machine took over"
    return f"the lease had fence {lease[1]}; machine {scene.machine} took it over with fence {_fence(scene, lease[0])}"


def stop_holder(scene: LocalRound, draw: random.Random) -> str | None:
    """The machine that holds the lease stands still until another has taken over; then it comes back."""
    lease, first = _lease(scene), scene.flow
    if lease is None or not scene.alive():
        return None
    frozen = family_of(first)
    for process in frozen:
        with suppress(psutil.Error):
            process.suspend()
    began = time.monotonic()
    label, known = scene.at(), scene.finished()
    scene.others.append(first)
    scene.at_machine(scene.machine + 1)
    scene.start()
    taken_over = bool(wait_for(scene, lambda: family(scene, "stage"), TAKEN_OVER_S))
    stood_s = time.monotonic() - began
    for process in frozen:
        with suppress(psutil.Error):
            process.resume()
    if not taken_over:
        return "no other machine took over"
    stages = [process for process in frozen if "tasks.engine.child_main" in " ".join(_words(process))]
    ended = scene.wait_until(lambda: not any(process.is_running() and _words(process) for process in stages), 60.0)
    scene.wait_until(lambda: scene.finished() - known or not scene.alive(), TAKEN_OVER_S)
    code = scene.interrupt(first)
    fate = "ended its stage" if ended else "WENT ON with its stage"
    return (
        f"it stood still for {stood_s:.0f} s; machine {scene.machine} made {label} with fence "
        f"{_fence(scene, lease[0])}; the first came back and {fate} (exit code {code} at SIGTERM)"
    )


def run_twice(scene: LocalRound, draw: random.Random) -> str | None:
    """The same command is begun a second time in the same store, until the step at hand is made."""
    if not scene.alive():
        return None
    known = scene.finished()
    second = scene.second_run()
    log = scene.log.with_name(f"second-{scene.log.name}")
    waited = scene.wait_until(lambda: "works on it" in _text(log) or second.poll() is not None, 60.0)
    scene.wait_until(lambda: scene.finished() - known or not scene.alive(), TAKEN_OVER_S)
    code = scene.interrupt(second) if second.poll() is None else second.returncode
    return f"the second {'waited' if waited else 'did not wait'}, then ended by SIGTERM with exit code {code}"


def half_written(scene: LocalRound, draw: random.Random) -> str | None:
    """Another writer dies in the middle of a line of replies, a line of events, and a file in a staging folder."""
    folders = [path.parent for path in (scene.store / "staging").glob("*/execution.json")]
    if not folders:
        return None
    for folder in scene.store.glob("replies/*"):
        (folder / "of-another-writer.jsonl").write_text('{"digest": "0123456789abcdef", "text": "The ans')
    with (scene.store / "events/of-another-writer.jsonl").open("a") as file:
        file.write('{"id": "x", "kind": "metric", "execution": "none", "time": 1, "fie')
    (folders[0] / ".of-another-writer.tmp").write_bytes(b"\0" * draw.randrange(1, 5000))
    return f"a reply, an event and a file of {folders[0].name[:12]}"


def kill_publishing(scene: LocalRound, draw: random.Random) -> str | None:
    """The run is killed when a step's work is done and not published."""
    if not scene.wait_until(lambda: any(work.is_finished for work in scene.work()) or not scene.alive(), 180.0):
        return None
    return kill_flow(scene, draw)


def flip_byte(scene: LocalRound, draw: random.Random) -> str | None:
    """As in the random rounds, of a machine that has the artifact's files."""
    for _ in range(20):
        if hit := chaos_faults.flip_byte(scene, draw):
            return hit
        time.sleep(1.0)
    return None


def _lease(scene: LocalRound) -> tuple[str, int] | None:
    """The key that is being made, and the fence of its lease."""
    keys = [work.key for work in scene.work()]
    return (keys[0], _fence(scene, keys[0])) if keys and _fence(scene, keys[0]) else None


def _fence(scene: LocalRound, key: str) -> int:
    assert scene.mirror
    return scene.mirror.greatest_fence(key)


def _words(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return [] if process.status() == psutil.STATUS_ZOMBIE else process.cmdline()
    return []


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


STRIKES: dict[str, Strike] = {
    **_OF_THE_ROUNDS,
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
STRIKES |= {
    "the stage and Prefect's server killed": together("kill the stage", "kill Prefect's server"),
    "the S3 server hangs, the stage killed": together("the S3 server hangs", "kill the stage"),
    "the S3 server is cut, the flow killed": together("uploads are cut", "kill the flow"),
    "the teacher answers 500, the stage killed": together("the teacher answers 500", "kill the stage"),
}


@dataclass(frozen=True)
class Planned:
    """A fault and its place: when `share` of the work of step `label` is done, after a checkpoint or in between."""

    number: int
    fault: str
    label: str
    share: float
    event: Event

    def is_reached(self, scene: LocalRound) -> bool:
        if self.event == "worker":
            return bool(items_at_work(scene)) and self.label in scene.at()
        if self.event == "start":
            return self.label in scene.at()
        for work in scene.work():
            if work.label == self.label == "distill":
                return scene.answered >= max(1.0, self.share * scene.prompts)
            if work.label == self.label:
                counted = work.saved if self.event == "save" and work.total else work.done
                return bool(work.total) and counted >= max(1.0, self.share * work.total)
        return False

    @property
    def where(self) -> str:
        what: dict[Event, str] = {
            "start": "as it starts",
            "progress": f"{self.share:.0%} done",
            "save": f"a checkpoint after {self.share:.0%}",
            "worker": "a work item at work",
        }
        return f"{self.label}, {what[self.event]}"


INGESTS = ("ingest:synth", "ingest:answers")
EVALUATIONS = ("evaluate:pretrain", "evaluate:align", "evaluate:reason")
# Fault, the steps of which one is drawn, the range of the share, and the event.
PLAN: tuple[tuple[str, tuple[str, ...], tuple[float, float], Event], ...] = (
    ("kill a work item", ("ingest:synth",), (0.0, 0.0), "worker"),
    ("kill while it starts again", ("ingest:synth", "ingest:answers"), (0.0, 0.0), "worker"),
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


def draw_schedule(seed: int) -> list[Planned]:
    """The faults in the order of their places."""
    draw = random.Random(seed)
    planned = [
        Planned(0, fault, draw.choice(labels), draw.uniform(*shares), event) for fault, labels, shares, event in PLAN
    ]
    planned.sort(key=lambda item: (LABELS.index(item.label), item.share))
    return [Planned(i + 1, item.fault, item.label, item.share, item.event) for i, item in enumerate(planned)]
