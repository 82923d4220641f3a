"""The Hub reader through the real clients against a repository on loopback, with the faults that a network has."""

import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nautile.common.errors import ConfigError, Retryable
from nautile.common.retry import Backoff
from nautile.configs.ingest import SourceConfig
from nautile.data.sources import hub as hub_source
from nautile.data.sources.hub import list_hub_files
from tests.support.servers.fake_hub import RETRY_AFTER, FakeHub

README = "---\nconfigs:\n- config_name: small\n  data_files:\n  - split: train\n    path: sample/*\n---\n"

# The clients read HF_ENDPOINT when they are imported, so they have a process of their own. As the fan-out does, it
# reads a file again after a `Retryable` error, up to `tries` times.
CHILD = """
import json, sys, time
from dataclasses import asdict
from pathlib import Path
from nautile.common.errors import Retryable
from nautile.common.retry import Backoff
from nautile.configs.ingest import SourceConfig
from nautile.data.sources import hub
from nautile.data.sources.corpus_source import list_files, read_file
hub.LISTING_BACKOFF = Backoff(attempts=5, first_s=0.01)
sleep, longest = time.sleep, float(sys.argv[2])
time.sleep = lambda seconds: sleep(min(seconds, longest))  # the library's own pauses double up to 8 s
folder = Path(sys.argv[1])

def describe(error):
    return f"{type(error).__name__}: {error}"

def read(source, file, reply, tries):
    for _ in range(tries):
        try:
            batches = read_file(source, file, folder)
            reply["texts"][file.path] = [text for batch in batches for text in batch.texts()]
            return
        except (ValueError, RuntimeError) as error:
            last = error
            reply["tries"].append([file.path, describe(error)])
            if not isinstance(error, Retryable):
                break
    reply["errors"][file.path] = describe(last)

for line in sys.stdin:
    reply = {"texts": {}, "errors": {}, "tries": []}
    request = json.loads(line)
    tries = request.pop("tries")
    try:
        source = SourceConfig(**request)
        files = list_files(source, folder)
        reply["files"] = [asdict(file) for file in files]
        for file in files:
            read(source, file, reply, tries)
    except (ValueError, RuntimeError) as error:
        reply["error"] = describe(error)
    reply["left"] = [str(path) for path in folder.rglob("*")]
    print(json.dumps(reply), flush=True)
"""
pytestmark = pytest.mark.slow


class Client:
    """A process with the real clients, pointed at a fake Hub."""

    def __init__(self, hub: FakeHub, folder) -> None:
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "home"), "HF_TOKEN": "hf_another"}
        environment |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_ETAG_TIMEOUT": "5", "HF_HUB_DOWNLOAD_TIMEOUT": "5"}
        command = [sys.executable, "-c", CHILD, str(folder / "fetched"), str(RETRY_AFTER)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": (folder / "log").open("w")}
        self.hub = hub
        self.process = subprocess.Popen(command, env=environment, text=True, **pipes)

    def read(self, tries: int = 3, **changes) -> dict:
        source = {"name": "x", "reader": "hub", "form": "web", "path": "org/set", "subset": "small"}
        self.process.stdin.write(
            json.dumps({**source, "revision": self.hub.revision, **changes, "tries": tries}) + "\n"
        )
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repository")
    with FakeHub(folder, "org/set", "0" * 40) as server:
        client = Client(server, tmp_path_factory.mktemp("client"))
        yield client
        client.process.stdin.close()
        client.process.wait(timeout=120)


@pytest.fixture
def hub(client):
    """The repository at a commit of its own, for the clients keep listings in memory: three files of 20 rows."""
    server, folder = client.hub, client.hub.folder
    server.revision = f"{int(server.revision) + 1:040d}"
    (folder / "sample").mkdir(exist_ok=True)
    for path in (folder / "sample").iterdir():
        path.unlink()
    (folder / "README.md").write_text(README)
    for number in range(3):
        table = pa.table({"text": [f"{number} {row}" for row in range(20)], "other": ["x" * 100] * 20})
        pq.write_table(table, folder / "sample" / f"{number}.parquet", row_group_size=5)
    server.faults, server.listing_faults, server.always, server.gated = [], [], {}, False
    for record in (
        server.requests,
        server.request_times,
        server.throttled_at,
        server.ranges,
        server.met,
        server.served,
    ):
        record.clear()
    return server


NAMES = [f"sample/{number}.parquet" for number in range(3)]
ROWS = {name: [f"{number} {row}" for row in range(20)] for number, name in enumerate(NAMES)}
ALL = [text for texts in ROWS.values() for text in texts]


def test_every_file_of_the_pinned_commit_is_fetched_once_whole(client, hub):
    reply = client.read()
    assert reply["texts"] == ROWS
    assert [file["path"] for file in reply["files"]] == NAMES
    assert all(file["digest"].startswith("sha256:") and file["bytes"] > 300 for file in reply["files"])
    assert reply["left"] == []
    assert {name: hub.served[name] for name in NAMES} == dict.fromkeys(NAMES, 1)
    assert all(hub.revision in path for _, path in hub.requests if "/resolve/" in path)


def test_small_files_are_checked_by_gits_digest(client, hub):
    for path in (hub.folder / "sample").iterdir():
        path.unlink()
    (hub.folder / "sample" / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    reply = client.read()
    assert reply["texts"] == {"sample/a.jsonl": ["one", "two"]}
    assert reply["files"][0]["digest"].startswith("git:")
    hub.always = {"a.jsonl": "altered"}
    assert "came with another git digest" in client.read()["errors"]["sample/a.jsonl"]


@pytest.mark.parametrize("fault", ["throttled", "altered"])
def test_a_fault_that_passes_costs_no_row(client, hub, fault):
    hub.faults = [fault, fault]
    reply = client.read()
    assert (reply["texts"], reply["errors"]) == (ROWS, {})
    assert hub.met[fault] == 2
    if fault == "throttled":
        pauses = [min(t for t in hub.request_times if t > throttled) - throttled for throttled in hub.throttled_at]
        assert max(pauses) >= RETRY_AFTER
    if fault == "altered":
        assert reply["tries"] == [], "a file with another digest is downloaded again at once"


def test_an_interrupted_download_resumes(client, hub):
    """The library writes a body in chunks of 10 MiB: what was written before the connection broke is not sent again."""
    for path in (hub.folder / "sample").iterdir():
        path.unlink()
    rows = [f"{number} " + "x" * 100_000 for number in range(240)]
    (hub.folder / "sample" / "big.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    hub.faults = ["cut"]
    reply = client.read()
    assert reply["texts"] == {"sample/big.jsonl": rows}
    assert (reply["tries"], hub.met["cut"]) == ([], 1)
    assert hub.ranges == [("sample/big.jsonl", f"bytes={10 << 20}-")]


def test_a_storm_of_faults_and_every_row_arrives_once(client, hub):
    hub.listing_faults = [429, 503]
    hub.faults = ["cut", 503, "altered", "throttled", "short", "hang up", 500, "cut"]
    reply = client.read(tries=5)
    assert (reply["texts"], reply["errors"], hub.faults) == (ROWS, {}, [])
    assert sum(hub.met.values()) == 10


def test_what_stays_bad_is_told_from_what_may_pass(client, hub):
    whole = (hub.folder / NAMES[1]).read_bytes()
    (hub.folder / NAMES[1]).write_bytes(whole[:-100])  # cut in the repository itself: its digest is right
    hub.always = {"0.parquet": "altered", "2.parquet": 503}
    reply = client.read(tries=1)
    assert reply["texts"] == {}
    assert reply["errors"][NAMES[0]] == (
        f"ConfigError: source 'x': org/set at {hub.revision[:12]}, sample/0.parquet: "
        "came with another sha256 digest than the Hub lists, 3 times"
    )
    assert reply["errors"][NAMES[1]].startswith("ConfigError: org/set/sample/1.parquet: is not a Parquet file")
    assert reply["errors"][NAMES[2]].startswith("Retryable: source 'x': org/set")
    assert reply["left"] == []


def test_a_limit_is_exact_and_lists_no_more_files_than_it_needs(client, hub):
    reply = client.read(records=33)
    assert [text for texts in reply["texts"].values() for text in texts] == ALL[:33]
    assert len(reply["files"]) == 2


def test_clear_refusals(client, hub):
    replies = [
        client.read(**change)
        for change in ({"path": "org/none"}, {"subset": "nope"}, {"split": "nope"}, {"revision": "f" * 40})
    ]
    errors = [reply["error"] for reply in replies]
    assert [message.partition(":")[0] for message in errors] == ["ConfigError"] * 4
    assert "org/none" in errors[0]
    assert "'nope' not found. Available: ['small']" in errors[1]
    assert "has no split 'nope', only ['train']" in errors[2]
    assert "ffffffffffff" in errors[3]
    assert "'main' is not a full commit hash" in client.read(revision="main")["error"]


def test_an_outage_while_listing_may_pass_later(client, hub):
    hub.listing_faults = [503] * 200
    assert client.read()["error"].startswith("Retryable: source 'x': org/set")


SOURCE = SourceConfig(name="x", reader="hub", form="web", path="org/set", revision="a" * 40)


@pytest.fixture
def no_pauses(monkeypatch):
    monkeypatch.setattr(hub_source, "LISTING_BACKOFF", Backoff(attempts=5, first_s=0.0))


@pytest.mark.usefixtures("no_pauses")
def test_files_of_another_commit_are_never_taken_for_the_pinned_one(monkeypatch):
    """`datasets` falls back on its cache when the Hub is silent, whatever commit lies there."""
    datasets = pytest.importorskip("datasets")

    class Builder:
        class config:
            data_files = {"train": [f"hf://datasets/org/set@{'b' * 40}/sample/0.parquet"]}

    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *args, **kwargs: Builder)
    with pytest.raises(Retryable, match="is of another commit"):
        list_hub_files(SOURCE)


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize(
    ("error", "kind"),
    [(ConnectionError("cut"), Retryable), (TimeoutError("slow"), Retryable), (OSError("short page"), Retryable),
     (RuntimeError("xet"), Retryable), (ValueError("no such subset"), ConfigError),
     (FileNotFoundError("gone"), ConfigError), (OSError(28, "No space left on device"), OSError),
     (KeyError("our own"), KeyError)],
)  # fmt: skip
def test_only_errors_that_may_pass_are_retried(monkeypatch, error, kind):
    calls = []

    def fail(source):
        calls.append(source)
        raise error

    monkeypatch.setattr(hub_source, "_data_files", fail)
    with pytest.raises(kind) as caught:
        list_hub_files(SOURCE)
    assert len(calls) == (5 if kind is Retryable else 1)
    assert kind not in (ConfigError, Retryable) or "source 'x': org/set at aaaaaaaaaaaa" in str(caught.value)


def test_one_row_group_of_many_megabytes_is_counted_by_its_footer_and_fetched_once(client, hub):
    """As the files of SYNTH are: some 150,000 rows in one group of 800 MB."""
    for path in (hub.folder / "sample").iterdir():
        path.unlink()
    rows = [os.urandom(1500).hex() for _ in range(4000)]
    pq.write_table(pa.table({"text": rows}), hub.folder / "sample" / "0.parquet", row_group_size=len(rows))
    assert pq.ParquetFile(hub.folder / "sample" / "0.parquet").num_row_groups == 1
    reply = client.read(records=700)
    assert reply["texts"] == {"sample/0.parquet": rows[:700]}
    assert reply["files"][0]["rows"] == 700
    whole = hub.served["sample/0.parquet"] - len(hub.ranges)
    assert (whole, reply["left"], reply["errors"]) == (1, [], {})


def test_packed_lines_are_read_and_a_file_of_another_kind_is_named(client, hub):
    for path in (hub.folder / "sample").iterdir():
        path.unlink()
    lines = b"\xef\xbb\xbf" + b"".join(b'{"text": "line %d"}\n' % n for n in range(100))
    (hub.folder / "sample" / "0.jsonl.zst").write_bytes(bytes(pa.Codec("zstd").compress(lines)))
    (hub.folder / "sample" / "1.jsonl").write_text('{\n  "text": "pretty"\n}\n' * 30)
    reply = client.read()
    assert reply["texts"] == {"sample/0.jsonl.zst": [f"line {n}" for n in range(100)]}
    error = reply["errors"]["sample/1.jsonl"]
    assert error.startswith("ConfigError: org/set/")
    assert "sample/1.jsonl: none of its 90 rows can be read (90 not_json)" in error
    assert len(reply["tries"]) == 1


def test_a_gated_set_is_refused_at_once(client, hub):
    """The client's token is of a user who has not accepted the set's terms; its files are larger than a listing."""
    pq.write_table(pa.table({"text": ["x" * 400] * 3}), hub.folder / "sample" / "0.parquet")
    hub.gated = True
    error = client.read()["error"]
    assert error.startswith(f"ConfigError: source 'x': org/set at {hub.revision[:12]}")
    assert error.endswith("; it is gated: accept its terms on the Hub and set HF_TOKEN")
