"""Every benchmark's repository behind one Hub on loopback: records as Parquet, laid out by configuration and split."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pyarrow
import pyarrow.parquet

from evals.benchmarks.catalogue import BENCHMARKS
from tests.support.servers.fake_hub import FakeHub
from tests.support.servers.http_server import FakeServer, Request, Response

# The client reads HF_ENDPOINT when it is imported, so it runs in a process of its own.
READER = """
import json, sys
from common.errors import ConfigError, Retryable
from evals.benchmarks.catalogue import BENCHMARKS
from evals.benchmarks.loading import read_hub
results = {}
for name, fields in json.loads(sys.argv[1]).items():
    from dataclasses import replace
    benchmark = replace(BENCHMARKS[fields.pop("benchmark", name)], **fields)
    try:
        results[name] = list(read_hub(benchmark, benchmark.pinned))
    except (ConfigError, Retryable) as error:
        results[name] = f"{type(error).__name__}: {error}"
json.dump(results, sys.stdout)
"""


class BenchmarkHub(FakeServer):
    """A context manager; `records(name)` gives the records of a benchmark. Each repository is at its pinned commit."""

    def __init__(self, folder: Path, records: Callable[[str], list[dict]]) -> None:
        self._hubs: dict[str, FakeHub] = {}
        splits: dict[str, dict[str, dict[str, str]]] = {}
        for benchmark in BENCHMARKS.values():
            repository = folder / benchmark.hub.replace("/", "--")
            path = f"{benchmark.subset}/{benchmark.split}.parquet"
            (repository / benchmark.subset).mkdir(parents=True, exist_ok=True)
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records(benchmark.name)), repository / path)
            splits.setdefault(benchmark.hub, {}).setdefault(benchmark.subset, {})[benchmark.split] = path
            if benchmark.hub not in self._hubs:
                self._hubs[benchmark.hub] = FakeHub(repository, benchmark.hub, benchmark.pinned)
        for hub, subsets in splits.items():
            (self._hubs[hub].folder / "README.md").write_text(_card(subsets))
        self._home = folder / "home"

    def respond(self, request: Request) -> Response | None:
        hub = next((hub for name, hub in self._hubs.items() if f"/datasets/{name}" in request.path), None)
        return (hub or next(iter(self._hubs.values()))).respond(request)

    def read(self, choices: Mapping[str, Mapping[str, str]]) -> dict[str, list[dict] | str]:
        """What the real client reads in a process of its own: records, or the error's name and message.

        `choices` maps a name to the fields of its benchmark that differ from the project's own.
        """
        environment = {
            **os.environ,
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(self._home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        }
        command = [sys.executable, "-c", READER, json.dumps(choices)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


def _card(subsets: Mapping[str, Mapping[str, str]]) -> str:
    lines = ["---", "configs:"]
    for subset, splits in subsets.items():
        lines += [f"- config_name: {subset}", "  data_files:"]
        lines += [f"  - {{split: {split}, path: {path}}}" for split, path in splits.items()]
    return "\n".join([*lines, "---", ""])
