"""Every benchmark's repository behind one Hub on loopback, with the files and the card that it has in public."""

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow
import pyarrow.parquet

from nautile.evals.benchmarks.catalogue import PAPER
from tests.support.servers.fake_hub import ACCEPTED, FakeHub
from tests.support.servers.http_server import FakeServer, Request, Response

# The client reads HF_ENDPOINT when it is imported, so it runs in a process of its own.
READER = """
import json, sys
from nautile.common.errors import ConfigError, Retryable
from nautile.evals.benchmarks.catalogue import PINNED
from nautile.evals.benchmarks.loading import read_hub
from nautile.evals.benchmarks.registry import BENCHMARKS
results = {}
for name, fields in json.loads(sys.argv[1]).items():
    from dataclasses import replace
    benchmark = replace(BENCHMARKS[fields.pop("benchmark", name)], **fields)
    try:
        results[name] = list(read_hub(benchmark, PINNED[benchmark.hub]))
    except (ConfigError, Retryable) as error:
        results[name] = f"{type(error).__name__}: {error}"
json.dump(results, sys.stdout)
"""
PUBLIC = {entry.name: entry for entry in PAPER if entry.hub}  # the benchmarks that have a repository
SHARD = "{split}-00000-of-00001.parquet"  # as `push_to_hub` names it
THREE = ("train", "validation", "test")


@dataclass(frozen=True)
class Layout:
    """The files of a repository: the path of each subset's split, and what the card says of them.

    card: "configs" lists every subset and split; "files" every subset with one file of a single split; "plain" says
    nothing of them; None: there is no card, as on the Hub's branches of converted files.
    """

    path: str
    splits: tuple[str, ...]
    card: Literal["configs", "files", "plain"] | None = "configs"
    more_subsets: tuple[str, ...] = ()  # that no benchmark reads


LAYOUTS = {
    "allenai/openbookqa": Layout("{subset}/" + SHARD, THREE, more_subsets=("additional",)),
    "allenai/ai2_arc": Layout("{subset}/" + SHARD, THREE),
    "tau/commonsense_qa": Layout("data/" + SHARD, THREE),
    "openai/gsm8k": Layout("main/" + SHARD, ("train", "test")),
    "ybisk/piqa": Layout("plain_text/{split}/0000.parquet", THREE, card=None),
    "google/IFEval": Layout("ifeval_input_data.jsonl", ("train",), card="plain"),
    "mandarjoshi/trivia_qa": Layout("{subset}/" + SHARD, THREE),
    "HuggingFaceH4/MATH-500": Layout("test.jsonl", ("test",), card="plain"),
    "TIGER-Lab/MMLU-Pro": Layout("data/" + SHARD, ("validation", "test")),
    "cais/mmlu": Layout(
        "{subset}/" + SHARD, ("auxiliary_train", "dev", "validation", "test"), more_subsets=("anatomy",)
    ),
    "Idavidrein/gpqa": Layout("{subset}.csv", ("train",), card="files", more_subsets=("gpqa_main", "gpqa_extended")),
}
# Classes among the columns, which `datasets` reads from a file's metadata.
CLASSES = {"ybisk/piqa": {"label": ["0", "1"]}, "cais/mmlu": {"answer": list("ABCD")}}


class BenchmarkHub(FakeServer):
    """A context manager; `records(name)` gives the records of a benchmark. Each repository is at its pinned commit."""

    def __init__(self, folder: Path, records: Callable[[str], list[dict]]) -> None:
        self.repositories: dict[str, FakeHub] = {}
        for benchmark in PUBLIC.values():
            layout, repository = LAYOUTS[benchmark.hub], folder / benchmark.hub.replace("/", "--")
            rows = records(benchmark.name)
            for subset in (benchmark.subset, *layout.more_subsets):
                for split in layout.splits:
                    reported = (subset, split) == (benchmark.subset, benchmark.split)
                    path = repository / layout.path.format(subset=subset, split=split)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    _write(path, rows if reported else rows[:3], CLASSES.get(benchmark.hub, {}))
            if benchmark.hub not in self.repositories:
                self.repositories[benchmark.hub] = FakeHub(
                    repository, benchmark.hub, benchmark.commit, gated=benchmark.gated
                )
        for hub, layout in LAYOUTS.items():
            subsets = [benchmark.subset for benchmark in PUBLIC.values() if benchmark.hub == hub]
            if layout.card:
                card = _card(layout, [*subsets, *layout.more_subsets])
                (self.repositories[hub].folder / "README.md").write_text(card)
        self._home = folder / "home"

    def respond(self, request: Request) -> Response | None:
        hub = next((hub for name, hub in self.repositories.items() if f"/datasets/{name}" in request.path), None)
        return (hub or next(iter(self.repositories.values()))).respond(request)

    def read(
        self, choices: Mapping[str, Mapping[str, Any]], token: str = ACCEPTED, home: Path | None = None
    ) -> dict[str, list[dict] | str]:
        """What the real client reads in a process of its own: records, or the error's name and message.

        `choices` maps a name to the fields of its benchmark that differ from the project's own. `home`: the client's
        folder, with its cache.
        """
        environment = {
            **{name: value for name, value in os.environ.items() if name != "HF_TOKEN"},
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home or self._home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
            **({"HF_TOKEN": token} if token else {}),
        }
        command = [sys.executable, "-c", READER, json.dumps(choices)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


def _write(path: Path, rows: Sequence[Mapping[str, Any]], classes: Mapping[str, list[str]]) -> None:
    """Write records as the repository has them: the format is that of the path."""
    if path.suffix == ".csv":
        out = io.StringIO(newline="")
        writer = csv.DictWriter(out, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        path.write_text(out.getvalue(), encoding="utf-8")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(_without_none(row)) + "\n" for row in rows), encoding="utf-8")
    else:
        table = pyarrow.Table.from_pylist(list(rows))
        if classes:
            features = {name: _feature(table.schema.field(name).type, classes.get(name)) for name in table.column_names}
            table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
        pyarrow.parquet.write_table(table, path)


def _without_none(value: Any) -> Any:
    """JSON lines leave out what a record does not have."""
    if isinstance(value, Mapping):
        return {key: _without_none(member) for key, member in value.items() if member is not None}
    return [_without_none(member) for member in value] if isinstance(value, list) else value


def _feature(kind: pyarrow.DataType, names: list[str] | None) -> dict[str, Any]:
    if names:
        return {"names": names, "_type": "ClassLabel"}
    if pyarrow.types.is_list(kind):
        return {"feature": _feature(kind.value_type, None), "_type": "Sequence"}
    return {"dtype": str(kind), "_type": "Value"}


def _card(layout: Layout, subsets: Sequence[str]) -> str:
    lines = ["---", "license: mit"]
    if layout.card != "plain":
        lines += ["configs:"]
        for subset in subsets:
            lines += [f"- config_name: {subset}"]
            if layout.card == "files":
                lines += [f"  data_files: {layout.path.format(subset=subset, split='')}"]
                continue
            lines += ["  data_files:"]
            for split in layout.splits:
                path = layout.path.format(subset=subset, split=split).replace("00000-of-00001.parquet", "*")
                lines += [f"  - split: {split}", f"    path: {path}"]
    return "\n".join([*lines, "---", ""])
