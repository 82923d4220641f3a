"""The Hub reader through the real clients against a repository on loopback."""

import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.schema import SourceConfig
from configs.section import ConfigError, Retryable
from data.hub import _explained
from tests.support.fake_hub import FakeHub

REVISION = "0123456789" * 4
README = "---\nconfigs:\n- config_name: small\n  data_files:\n  - split: train\n    path: sample/*\n---\n"

# The clients read HF_ENDPOINT when they are imported, so each reading has a process of its own.
CHILD = """
import json, sys
from configs.schema import SourceConfig
from data.hub import read_hub
told = []
for fields in json.loads(sys.argv[1]):
    skip = fields.pop("skip", 0)
    try:
        told.append([row.text for row in read_hub(SourceConfig(**fields), skip)])
    except ValueError as error:
        told.append(f"{type(error).__name__}: {error}")
print(json.dumps(told))
"""
SOURCE = {"name": "x", "reader": "hub", "form": "web", "path": "org/set", "subset": "small", "revision": REVISION}


@pytest.fixture
def hub(tmp_path):
    folder = tmp_path / "repository"
    (folder / "sample").mkdir(parents=True)
    (folder / "README.md").write_text(README)
    for number in range(3):
        table = pa.table({"text": [f"{number} {row}" for row in range(20)], "other": ["x" * 100] * 20})
        pq.write_table(table, folder / "sample" / f"{number}.parquet", row_group_size=5)
    with FakeHub(folder, "org/set", REVISION) as server:
        yield server


def reading(hub, tmp_path, *changes):
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_TELEMETRY": "1"}
    fields = json.dumps([{**SOURCE, **change} for change in changes])
    command = [sys.executable, "-c", CHILD, fields]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_every_row_of_the_pinned_revision_and_clear_refusals(hub, tmp_path):
    hub.failing = [503]  # the client asks again
    changes = [{}, {"skip": 33}, {"path": "org/none"}, {"subset": "nope"}, {"split": "nope"}, {"revision": "f" * 40}]
    whole, rest, *refused = reading(hub, tmp_path, *changes)
    assert whole == [f"{number} {row}" for number in range(3) for row in range(20)]
    assert rest == whole[33:]
    assert [message.partition(":")[0] for message in refused] == ["ConfigError"] * 4
    assert "org/none" in refused[0]
    assert "'nope' not found. Available: ['small']" in refused[1]
    assert "has no split 'nope', only ['train']" in refused[2]
    assert "ffffffffffff" in refused[3]
    asked = [path for _, path in hub.requests if "/resolve/" in path and "org/set" in path]
    assert all(REVISION in path or "f" * 40 in path for path in asked)


@pytest.mark.parametrize(
    ("error", "kind"),
    [(ConnectionError("cut"), Retryable), (TimeoutError("slow"), Retryable), (OSError("short page"), Retryable),
     (ValueError("no such subset"), ConfigError), (FileNotFoundError("gone"), ConfigError)],
)  # fmt: skip
def test_errors_are_told_apart(error, kind):
    source = SourceConfig(name="x", reader="hub", form="web", path="org/set", revision=REVISION)
    with pytest.raises(kind, match=r"source 'x': org/set at 012345678901"), _explained(source):
        raise error
