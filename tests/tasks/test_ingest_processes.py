"""Ingest from a Hub in child processes: killed midway, continued by another number of workers, every row once.

That the bytes do not depend on the order of the files is shown in `test_ingest.py`.
"""

import json
import subprocess
import sys
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nautile.configs.model import TokenizerConfig
from nautile.configs.operation import LaunchConfig
from nautile.configs.readers import READERS
from nautile.data.tokenizer import tokenizer_for
from nautile.data.tokens.shards import read_index
from nautile.store.artifacts import Store
from nautile.tasks.engine.attempt import run_stage
from nautile.tasks.engine.stage import RunContext
from nautile.tasks.ingest import ingest
from tests.support.plug_ins import add_plug_in
from tests.support.samples.shards import Shard
from tests.support.servers.fake_hub import FakeHub
from tests.support.stages.stage_parent import ROOT, wait_for

FILES, ROWS, BAD = 4, 30, 1
PARENT = """
import json, sys
from nautile.configs.schema import LaunchConfig
from nautile.tasks.ingest import ingest
from nautile.tasks.engine.attempt import run_stage
from nautile.tasks.engine.stage import RunContext
run_stage(ingest, json.loads(sys.argv[2]), {}, RunContext("r1", sys.argv[1], launch=LaunchConfig(workers=2)))
"""
pytestmark = pytest.mark.heavy


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Four files of 30 rows, the second of which is cut in the repository."""
    folder = tmp_path / "repository"
    folder.mkdir()
    for n in range(FILES):
        pq.write_table(pa.table({"text": [f"file {n} row {row}" for row in range(ROWS)]}), folder / f"{n}.parquet")
    cut = folder / f"{BAD}.parquet"
    cut.write_bytes(cut.read_bytes()[:-60])
    with FakeHub(folder, "org/set", "a" * 40) as server:
        for name, value in {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home")}.items():
            monkeypatch.setenv(name, value)
        yield server


def section(hub):
    source = {"name": "web", "reader": "hub", "form": "web", "path": "org/set", "revision": hub.revision}
    source |= {"validation_share": 0.2, "bad_files_share": 0.25, "rows_per_shard": 4}
    return {"tokenizer": {"ranks": 300}, "ingest": {"row_length": 64, "source": source}}


def documents(store, outputs):
    folder = store.get(outputs["tokens"]).path
    index, tokenizer = read_index(folder), tokenizer_for(TokenizerConfig(ranks=300))
    text = "".join(tokenizer.decode(Shard(folder / e.file, e, index).tokens.tolist()) for e in index.shards)
    return Counter(text.split("<|endoftext|>")[:-1])


def test_a_kill_midway_and_another_number_of_workers_lose_and_double_nothing(tmp_path, hub):
    config = section(hub)
    store = Store(tmp_path / "killed")
    hub.always = {"2.parquet": "held", "3.parquet": "held"}
    hub.faults = [503, "cut"]
    command = [sys.executable, "-c", PARENT, str(store.root), json.dumps(config)]
    parent = subprocess.Popen(command, cwd=ROOT)
    wait_for(lambda: hub.held == {"2.parquet", "3.parquet"})
    parent.kill()
    parent.wait()
    hub.always.clear()
    hub.released.set()
    outputs = run_stage(ingest, config, {}, RunContext("r2", str(store.root), launch=LaunchConfig(workers=1)))
    assert hub.served["0.parquet"] == 1  # a finished file is not fetched again
    wanted = {f"file {n} row {row}" for n in range(FILES) if n != BAD for row in range(ROWS)}
    assert documents(store, outputs) == Counter(dict.fromkeys(wanted, 1))
    facts = store.get(outputs["tokens"]).manifest["facts"]
    assert (facts["files"], facts["files_skipped"], facts["records"]) == (FILES, 1, 90)
    assert list(facts["skipped"]) == ["1.parquet"]
    assert hub.met[503] == hub.met["cut"] == 1


GATED = """
import time
from pathlib import Path
from nautile.configs.readers import Reader


def rows(path):
    with Path(path).with_suffix(".read").open("a") as file:
        file.write("x")
    for number, line in enumerate(Path(path).read_text().splitlines()):
        while number == 5 and "late" in path and not Path(path).with_name("open").exists():
            time.sleep(0.05)
        yield {"body": line}


gated = Reader(rows=rows)
"""


def test_a_plug_ins_reader_is_continued_after_a_kill(tmp_path, monkeypatch):
    add_plug_in(monkeypatch, tmp_path, READERS, "gated", GATED)
    for name in ("early", "late"):
        (tmp_path / f"{name}.txt").write_text("".join(f"file {name} row {row}\n" for row in range(ROWS)))
    source = {"name": "web", "reader": "gated", "form": "web", "path": f"{tmp_path}/*.txt"}
    source |= {"columns": {"text": "body"}, "validation_share": 0.2, "rows_per_shard": 4}
    config = {"tokenizer": {"ranks": 300}, "ingest": {"row_length": 64, "source": source}}
    store = Store(tmp_path / "killed")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(store.root), json.dumps(config)], cwd=ROOT)
    wait_for(lambda: list(store.root.glob("staging/*/fan_outs/tokenise/done/*")) and (tmp_path / "late.read").exists())
    parent.kill()
    parent.wait()
    (tmp_path / "open").touch()
    outputs = run_stage(ingest, config, {}, RunContext("r2", str(store.root), launch=LaunchConfig(workers=1)))
    assert (tmp_path / "early.read").read_text() == "x"  # a finished file is not read again
    wanted = [f"file {name} row {row}" for name in ("early", "late") for row in range(ROWS)]
    assert documents(store, outputs) == Counter(wanted)
