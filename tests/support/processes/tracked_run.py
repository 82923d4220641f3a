"""Run a toy stage with W&B, from a folder of its own on the path: a failed attempt, then one that goes on.

    python -m tests.support.processes.tracked_run FOLDER

Prints JSON: the artifacts it published, and what W&B's files have of it.
"""

import json
import shutil
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nautile.configs.operation import TelemetryConfig
from nautile.store.artifacts import Store
from nautile.tasks.engine.attempt import run_stage
from nautile.tasks.engine.errors import StageCrash
from nautile.tasks.engine.stage import RunContext
from tests.support.stages.stage_sums import section, sums

BLOCK = 32768  # bytes; a record of W&B's file may be cut at its end (LevelDB's log format)


def main() -> None:
    folder = Path(sys.argv[1])
    store = Store(folder / "store")
    wanted = TelemetryConfig(wandb=str(folder / "wandb"), project="toys")

    def attempt(run: str) -> dict[str, str]:
        context = RunContext(run, str(store.root), label="sums:A", config="toy", telemetry=wanted)
        return run_stage(sums, section(4, faults={"unknown": 1}), {}, context)

    try:
        attempt("r1")
    except StageCrash:
        [surprise] = store.root.glob("staging/*/output/surprise")
        shutil.rmtree(surprise)
    outputs = attempt("r2")
    json.dump({"outputs": outputs, "wandb": read_wandb(folder / "wandb")}, sys.stdout)


def read_wandb(folder: Path) -> list[dict[str, Any]]:
    """Of each file: the run's names, configuration, rows and summary."""
    from wandb.proto.wandb_internal_pb2 import Record

    files = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        records = [Record.FromString(data) for data in log_records(path.read_bytes())]
        [run] = [record.run for record in records if record.WhichOneof("record_type") == "run"]
        rows = [
            {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            for record in records
            if record.WhichOneof("record_type") == "history"
        ]
        summary = {
            item.key or ".".join(item.nested_key): json.loads(item.value_json)
            for record in records
            if record.WhichOneof("record_type") == "summary"
            for item in record.summary.update
        }
        config = {item.key: json.loads(item.value_json) for item in run.config.update if item.key != "_wandb"}
        names = {"id": run.run_id, "name": run.display_name, "group": run.run_group, "project": run.project}
        files.append({**names, "config": config, "rows": rows, "summary": summary})
    return files


def log_records(data: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format, behind W&B's seven bytes of head."""
    position, parts = 7, b""
    while position + 7 <= len(data):
        if BLOCK - position % BLOCK < 7:
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


if __name__ == "__main__":
    main()
