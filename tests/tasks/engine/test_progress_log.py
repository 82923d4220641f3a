"""The lines about progress in a stage's log, and what libraries log that nobody needs."""

import logging
import subprocess
import sys

import pytest

from nautile.store.events import EventWriter
from nautile.tasks.engine.progress import LoggedProgress
from tests.support.stages.toy_cli import ROOT

NOISE = """
import logging, os
from nautile.tasks.engine.child_main import begin
begin(os.getppid())
logging.getLogger("jax._src.compilation_cache").info("Resetting cache at <empty>.")
logging.getLogger("jax._src.xla_bridge").info("Unable to initialize backend 'tpu'")
logging.getLogger("jax._src.xla_bridge").warning("something is wrong")
for name in ("httpx", "httpx2"):
    logging.getLogger(name).info("HTTP Request: POST http://127.0.0.1/v1/chat/completions")
    logging.getLogger(name).warning("a fault of a client")
logging.getLogger("nautile.model").info("a line of ours")
"""


@pytest.fixture
def emit(tmp_path, caplog):
    """A logging `Emit` whose clock moves by 0.5 s at each look, with `lines()`: what it has logged."""
    caplog.set_level(logging.INFO, "nautile.tasks.engine.progress")
    seconds = iter(range(10**6))
    emit = LoggedProgress(EventWriter(tmp_path / "events.jsonl", "e1"), lambda: next(seconds) / 2)
    emit.lines = lambda: [record.message for record in caplog.records]
    return emit


def test_a_training_has_a_line_for_each_round_of_metrics_with_its_loss_rate_and_time_left(emit):
    for step in range(1, 31):
        if step % 10 == 0:
            emit("metric", name="loss", step=step, value=3.1)
        emit("progress", done=step, total=60, unit="steps", note=f"loss {5 - step / 10:.2f}, 900 tokens/s")
    assert emit.lines() == [
        f"{step}/60 steps, 2 steps/s, loss {5 - step / 10:.2f}, 900 tokens/s, {(60 - step) // 2} s left"
        for step in (10, 20, 30)
    ]


def test_without_metrics_there_is_a_line_every_fifteen_seconds_and_at_the_end_and_none_twice(emit):
    for done in range(1, 71):
        emit("progress", done=done, total=70, unit="files")
    emit("progress", done=70, total=70, unit="files")
    emit("progress", note="closing")
    assert [line.partition("/")[0] for line in emit.lines()] == ["30", "60", "70"]


def test_what_jax_notes_at_its_start_and_each_request_is_in_no_log():
    done = subprocess.run([sys.executable, "-c", NOISE], cwd=ROOT, capture_output=True, text=True, check=True)
    faults = ["something is wrong", *["a fault of a client"] * 2]
    assert [line.partition(": ")[2] for line in done.stderr.splitlines()] == [*faults, "a line of ours"]
