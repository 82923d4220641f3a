"""What a stage's processes use: reported while they work, under the execution's own steps, and only then."""

import json
import time
from types import SimpleNamespace

import pytest

from nautile.tasks.engine import child_main


def request_in(folder):
    for name in ("store", "staging"):
        (folder / name).mkdir()
    named = {name: str(folder / name) for name in ("store", "staging")}
    return {**named, "events": str(folder / "events" / "align-e1-1.jsonl"), "execution": "e1", "stage": "align"}


def rows_of(path):
    return [json.loads(line)["fields"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_memory_cores_and_disk_are_measured_until_the_work_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(child_main, "USAGE_EVERY_S", 0.01)
    file = tmp_path / "events" / "align-e1-1-worker-0-usage.jsonl"
    with child_main.usage_reported(request_in(tmp_path), source="worker 0"):
        until = time.monotonic() + 60
        while not (file.exists() and len(file.read_text().splitlines()) >= 3):
            assert time.monotonic() < until
            time.sleep(0.01)
    rows = rows_of(file)
    assert {row["name"] for row in rows} >= {"system/memory_bytes", "system/cpu_cores", "system/store_free_bytes"}
    assert all(row["source"] == "worker 0" and row["step"] >= 0 for row in rows)
    assert all(row["value"] > 0 for row in rows if row["name"] != "system/cpu_cores")


def test_steps_are_seconds_since_the_execution_began(tmp_path, monkeypatch):
    """Not since this attempt did: a resumed stage would otherwise measure the same steps again."""
    monkeypatch.setattr(child_main, "USAGE_EVERY_S", 0.01)
    request = request_in(tmp_path) | {"began": time.time() - 1000}
    (tmp_path / "staging" / "execution.json").write_text("{}", encoding="utf-8")  # written again by each attempt
    file = tmp_path / "events" / "align-e1-1-usage.jsonl"
    with child_main.usage_reported(request):
        until = time.monotonic() + 60
        while not (file.exists() and file.read_text().count("\n") >= 3):
            assert time.monotonic() < until
            time.sleep(0.01)
    assert min(row["step"] for row in rows_of(file)) >= 1000


@pytest.mark.parametrize(
    ("backend", "kind", "launch", "expected"),
    [
        ("gpu", "NVIDIA H100 80GB HBM3", {}, {"system/chips": 4, "system/dollars_per_chip_hour": 2.69}),
        ("gpu", "NVIDIA H100 80GB HBM3", {"dollars_per_chip_hour": 0.0}, {"system/dollars_per_chip_hour": 0.0}),
        ("gpu", "NVIDIA RTX 6000 Ada", {}, {"system/chips": 4, "system/dollars_per_chip_hour": None}),
        ("cpu", "cpu", {"dollars_per_chip_hour": 2.0}, {"system/chips": None}),
    ],
)
def test_chips_have_the_configured_price_else_that_of_the_table(monkeypatch, backend, kind, launch, expected):
    jax = SimpleNamespace(
        default_backend=lambda: backend, devices=lambda: [SimpleNamespace(device_kind=kind)], device_count=lambda: 4
    )
    monkeypatch.setattr(child_main, "_jax", lambda: jax)
    found = child_main._chips(launch)
    assert {name: found.get(name) for name in expected} == expected


def test_work_that_ends_at_once_leaves_no_file(tmp_path):
    with child_main.usage_reported(request_in(tmp_path)):
        pass
    assert not (tmp_path / "events").exists()
