"""A distillation against fake teachers: an index of exemplars, and a run in the same folders each time."""

import json
from dataclasses import dataclass

import pytest

from nautile.common.retry import Backoff
from nautile.configs.distill import DistillConfig, IndexConfig, TeacherConfig
from nautile.data.distill.run import DOCUMENTS, REJECTED, distill_prompts
from nautile.data.distill.stats import DistillStats, distill_facts
from nautile.data.endpoints import circuit_breaker
from nautile.data.endpoints.pool import EndpointPool
from nautile.data.records import SynthRecord
from nautile.data.retrieval.embedders import Encoder
from nautile.data.retrieval.exemplar_index import ExemplarIndex, build_index
from nautile.data.tokens.build import write_exemplars


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(circuit_breaker, "BACKOFF", Backoff(first_s=0.01))
    monkeypatch.setattr(circuit_breaker, "OUTAGE_S", 0.2)


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("retrieval")
    queries = ["How many legs have 2 cats?", "What is 3 + 4?", "Spell cat backward.", "What is 2 * 3?", "9 - 1?"]
    records = [SynthRecord(query, "One. Two.", "3", synth_id=f"e/{n}") for n, query in enumerate(queries)]
    write_exemplars(folder / "exemplars.jsonl", records)
    encoder = Encoder()
    build_index(folder / "exemplars.jsonl", encoder, IndexConfig(), folder / "out")
    return ExemplarIndex(folder / "out", encoder)


@dataclass
class Output:
    """The output of a distillation; `files`: the bytes of each file written."""

    stats: DistillStats
    counts: dict
    events: list
    kept: list
    rejected: list
    files: dict


@pytest.fixture
def run(tmp_path, index):
    """Run a distillation with the given endpoints, in the same folders each time."""

    def distill(endpoints, screen=None, **config_fields):
        events = []
        teachers = config_fields.pop("teachers", tuple(TeacherConfig(endpoint=name) for name in endpoints))
        config = DistillConfig(**{"prompts": 20, "teachers": teachers, **config_fields})
        out = tmp_path / "out"

        def emit(kind, **fields):
            events.append((kind, fields))

        with EndpointPool(endpoints, tmp_path / "replies", emit, config.budget_dollars) as teachers_pool:
            output = distill_prompts(config, teachers_pool, index, out, tmp_path / "work", 1, emit, screen)
            counts = distill_facts(output.stats, config, teachers_pool)
        rows = [
            [json.loads(line) for path in sorted(out.glob(name)) for line in path.read_text().splitlines()]
            for name in (DOCUMENTS, REJECTED)
        ]
        return Output(output.stats, counts, events, *rows, {path.name: path.read_bytes() for path in out.iterdir()})

    return distill
