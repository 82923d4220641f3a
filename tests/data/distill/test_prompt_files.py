"""Prompt sets of the Hub, read as files through the real clients from a repository on loopback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nautile.common.errors import ConfigError, Retryable
from nautile.common.retry import Backoff
from nautile.configs.distill import PromptSetConfig
from nautile.data.distill import prompts
from nautile.data.distill.prompts import count_prompt_rows
from nautile.data.sources import hub as hub_source
from nautile.data.sources import local_files
from nautile.data.sources.hub import SourceFile
from tests.support.servers.fake_hub import FakeHub

REVISION = "0123456789" * 4
README = """---
configs:
- config_name: chat
  data_files:
  - split: train_sft
    path: sft/*
- config_name: lines
  data_files: lines.jsonl
- config_name: table
  data_files: table.csv
---
"""

# The clients read HF_ENDPOINT when they are imported, so each reading has a process of its own. Each request is the
# fields of a prompt set, how many rows to skip, and after how many to stop.
CHILD = """
import itertools, json, sys
from pathlib import Path
from nautile.common.retry import Backoff
from nautile.configs.distill import PromptSetConfig
from nautile.data.distill.prompts import count_prompt_rows
from nautile.data.distill.prompts import Prompt, read_prompt_set
from nautile.data.sources import hub
hub.LISTING_BACKOFF = Backoff(attempts=3, first_s=0.01)
for line in sys.stdin:
    fields = json.loads(line)
    work, skip, stop = Path(fields.pop("work")), fields.pop("skip", 0), fields.pop("stop", None)
    try:
        source = PromptSetConfig(source="hub", name="h", **fields)
        rows = list(itertools.islice(read_prompt_set(source, 0, work, skip), stop))
        reply = [count_prompt_rows(source, work), [row.query if isinstance(row, Prompt) else row for row in rows]]
    except (ValueError, RuntimeError) as error:
        reply = f"{type(error).__name__}: {error}"
    print(json.dumps(reply), flush=True)
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repository")
    (folder / "sft").mkdir()
    for number in range(3):
        turns = [[{"role": "user", "content": f"Question {number}.{n}?"}, {"role": "assistant"}] for n in range(7)]
        table = pa.table({"messages": turns, "other": ["filler " * 50] * 7})
        pq.write_table(table, folder / "sft" / f"train-{number}.parquet", row_group_size=3)
    (folder / "lines.jsonl").write_text("\n".join(json.dumps({"query": f"Line {n}?"}) for n in range(50)))
    (folder / "table.csv").write_text("query\nWhy?\n")
    (folder / "README.md").write_text(README)
    return folder


@pytest.fixture(scope="module")
def ask(repository, tmp_path_factory):
    """ask(folder, **fields) -> [rows of the set, prompts] or the error, and the hub; one process for all."""
    home = tmp_path_factory.mktemp("home")
    with FakeHub(repository, "org/set", REVISION) as hub:
        environment = {"HF_HOME": str(home), "HF_ENDPOINT": hub.url}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen([sys.executable, "-c", CHILD], env={**os.environ, **environment}, text=True, **pipes)

        def request(folder, **fields):
            given = {"path": "org/set", "subset": "chat", "split": "train_sft", "revision": REVISION, **fields}
            process.stdin.write(json.dumps({**given, "work": str(folder)}) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        request.hub = hub
        yield request
        process.stdin.close()
        process.wait()


@pytest.mark.slow
def test_a_set_is_fetched_file_by_file_and_resumed_in_the_middle_of_one(ask, tmp_path):
    hub = ask.hub
    rows, whole = ask(tmp_path / "a")
    assert rows == 21
    assert whole == [f"Question {number}.{n}?" for number in range(3) for n in range(7)]
    assert not (tmp_path / "a" / "h").exists(), "a file that was read is removed"
    assert ask(tmp_path / "b", stop=12)[1] == whole[:12]
    before = hub.served.copy()
    assert ask(tmp_path / "b", skip=12)[1] == whole[12:]
    fetched = {Path(name).name: count for name, count in (hub.served - before).items()}
    assert fetched.get("train-0.parquet", 0) == 0, "a file that was read is not fetched again"
    assert fetched["train-2.parquet"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"form": "instruction"},
            "ConfigError: prompt set 'h': no column instruction in org/set; it has messages, other",
        ),
        (
            {"subset": "table", "split": "train"},
            "ConfigError: prompt set 'h': reads Parquet and JSON lines, and table.csv",
        ),
        ({"path": "org/absent"}, "ConfigError: prompt set 'h': org/"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(ask, tmp_path, fields, message):
    error = ask(tmp_path, **fields)
    assert error.startswith(message), error
    assert "\n" not in error


@pytest.mark.slow
def test_json_lines_of_the_hub(ask, tmp_path):
    assert ask(tmp_path, subset="lines", split="train", skip=48) == [50, ["Line 48?", "Line 49?"]]


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.gz"])
def test_damage_in_a_fetched_file_is_named_by_its_dataset(monkeypatch, tmp_path, name):
    source = PromptSetConfig(name="h", source="hub", path="org/set", revision=REVISION)
    (tmp_path / name).write_bytes(b"\x1f\x8b no such file")
    monkeypatch.setattr(prompts, "_hub_files", lambda *_: [SourceFile(0, f"data/{name}", 9, "", 0, 9)])
    monkeypatch.setattr(prompts, "fetch_hub_file", lambda *_: tmp_path / name)
    with pytest.raises(ConfigError) as raised:
        list(prompts.read_prompt_rows(source, ["query"], tmp_path / "work", 0))
    assert str(raised.value).startswith(f"prompt set 'h': org/set at 012345678901, data/{name}: ")
    assert str(tmp_path) not in str(raised.value)


def test_rows_that_are_skipped_are_not_parsed(monkeypatch, tmp_path):
    for number in range(3):
        rows = [json.dumps({"query": f"{number}-{row}"}) for row in range(10)]
        (tmp_path / f"{number}.jsonl").write_text("\n\n".join(rows))
    source = PromptSetConfig(name="j", source="jsonl", path=str(tmp_path / "*.jsonl"))
    whole = list(prompts.read_prompt_rows(source, [], tmp_path, 0))
    assert [name for name, *_ in whole][9:11] == ["0.jsonl/9", "1.jsonl/0"]
    parsed = []
    real = local_files._parse_line
    monkeypatch.setattr(local_files, "_parse_line", lambda line: parsed.append(line) or real(line))
    for skip in (3, 10, 14, 20, 29, 30):
        parsed.clear()
        assert list(prompts.read_prompt_rows(source, [], tmp_path, skip)) == whole[skip:]
        assert len(parsed) == 30 - skip


def test_a_hub_that_does_not_answer_may_answer_later(monkeypatch, tmp_path):
    import datasets

    def refused(*arguments, **options):
        raise ConnectionError("refused")

    monkeypatch.setattr(hub_source, "LISTING_BACKOFF", Backoff(attempts=1))
    monkeypatch.setattr(datasets, "load_dataset_builder", refused)
    with pytest.raises(Retryable, match="prompt set 'h': a/b at 0123"):
        count_prompt_rows(PromptSetConfig(name="h", source="hub", path="a/b", revision=REVISION), tmp_path)
