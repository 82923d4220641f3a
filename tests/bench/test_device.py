"""The bench of an accelerator: its rows on a CPU at tiny shapes, and a child process that ends or hangs in a row."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import device

BENCH = Path(device.__file__)
WORKER = """
import json, os, sys, time
done = sys.argv[sys.argv.index("--done") + 1 :]
for name in [name for name in ("good", "crash", "hang", "last") if name not in done]:
    print(json.dumps({"begins": name}), flush=True)
    if name == "crash":
        os._exit(3)
    if name == "hang":
        time.sleep(600)
    print(json.dumps({"row": name, "seconds": 0.0}), flush=True)
"""


@pytest.mark.heavy
def test_kernels_training_and_reinforcement_at_tiny_shapes(tmp_path):
    file = tmp_path / "results.json"
    command = [sys.executable, BENCH, "--small", "--minutes", "60", "--row-seconds", "1200", "--out", file]
    sections = ["--sections", "chip", "kernels", "train_100m", "rl"]
    fast = "--xla_backend_optimization_level=0"
    subprocess.run([*command, *sections], check=True, env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": fast})
    results = json.loads(file.read_text("utf-8"))
    rows = {row["row"]: row for row in results["rows"]}
    assert not results["skipped"]
    assert not {name: row["error"] for name, row in rows.items() if "error" in row}
    assert all(row["gradient_error"] < 1e-5 for name, row in rows.items() if "kernels: float32" in name)
    assert all(row["gradient_error"] < 1e-2 for name, row in rows.items() if "kernels: bfloat16" in name)
    assert all(row["falls"] for name, row in rows.items() if name.startswith("train"))


def test_a_row_that_ends_its_process_or_hangs_is_reported_and_the_next_is_measured(tmp_path, monkeypatch):
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER, encoding="utf-8")
    monkeypatch.setattr(device, "__file__", str(worker))
    monkeypatch.setattr(device, "tasks", lambda *_: [(name, None) for name in ("good", "crash", "hang", "last")])
    arguments = device.options().parse_args(["--row-seconds", "0.5", "--out", str(tmp_path / "results.json")])
    device.measure_all(arguments)
    results = json.loads((tmp_path / "results.json").read_text("utf-8"))
    errors = {row["row"]: row.get("error") for row in results["rows"]}
    ended, late = "its process ended with exit code 3", "took over 0.5 s"
    assert errors == {"good": None, "crash": ended, "hang": late, "last": None}
    assert results["skipped"] == []
