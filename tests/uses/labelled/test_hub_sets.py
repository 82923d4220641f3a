"""The presets of real data sets, read by the real client from records in the Hub's own schemas, on loopback."""

import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.servers.fake_hub import FakeHub
from tests.support.servers.http_server import FakeServer

REVISION = "0123456789abcdef0123456789abcdef01234567"
TAGS = ["O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC", "B-MISC", "I-MISC"]


def names(*classes):
    return {"names": list(classes), "_type": "ClassLabel"}


# Preset -> repository, folder of its files, and per split the columns as the Hub has them; then the names of classes.
SETS = {
    "banking77": (
        "legacy-datasets/banking77", "data",
        {"train": {"text": ["I am still waiting on my card?"], "label": [1]}},
        {"label": names("activate_my_card", "card_arrival")},
    ),
    "clinc150": (
        "clinc/clinc_oos", "plus",
        {"train": {"text": ["what expression would i use to say hi"], "intent": [1]}},
        {"intent": names("restaurant_reviews", "translate")},
    ),
    "sst2": (
        "stanfordnlp/sst2", "data",
        {
            "train": {"idx": [0], "sentence": ["hide new secretions from the parental units "], "label": [0]},
            "test": {"idx": [0], "sentence": ["uneasy mishmash of styles and genres . "], "label": [-1]},
        },
        {"label": names("negative", "positive")},
    ),
    "ag_news": (
        "fancyzhx/ag_news", "data",
        {"train": {"text": ["Wall St. Bears Claw Back"], "label": [2]}},
        {"label": names("World", "Sports", "Business", "Sci/Tech")},
    ),
    "conll2003": (
        "eriktks/conll2003", "conll2003",
        {
            "train": {
                "id": ["0"], "tokens": [["EU", "rejects", "German", "call"]], "pos_tags": [[22, 42, 16, 21]],
                "chunk_tags": [[11, 21, 11, 12]], "ner_tags": [[3, 0, 7, 0]],
            },
        },
        {"ner_tags": {"feature": names(*TAGS), "_type": "List"}},
    ),
}  # fmt: skip
EXPECTED = {
    "banking77": ["I am still waiting on my card?", "card_arrival"],
    "clinc150": ["what expression would i use to say hi", "translate"],
    "sst2": ["hide new secretions from the parental units ", "negative"],
    "ag_news": ["Wall St. Bears Claw Back", "Business"],
    "conll2003": ["EU rejects German call", '[{"text": "EU", "label": "ORG"}, {"text": "German", "label": "MISC"}]'],
}

# The client reads HF_ENDPOINT when it is imported, so it runs in a process of its own.
READER = """
import json, sys
from pathlib import Path
from nautile.uses.labelled.config import LabelledDataConfig
from nautile.uses.labelled.rows import read_rows
results = {}
for name, split in json.loads(sys.argv[1]):
    config = LabelledDataConfig.model_validate({"preset": name, "revision": sys.argv[2], "split": split})
    form = "entities" if name == "conll2003" else "label"
    try:
        results[f"{name}/{split}"] = [[row.text, row.target] for row in read_rows(config, form, Path(sys.argv[3]))]
    except ValueError as error:
        results[f"{name}/{split}"] = str(error)
json.dump(results, sys.stdout)
"""


class SeveralHubs(FakeServer):
    """The repositories of `SETS`, each a `FakeHub`."""

    def __init__(self, folder):
        self.hubs = []
        for preset, (repository, inside, splits, classes) in SETS.items():
            root = folder / preset
            (root / inside).mkdir(parents=True)
            card = ["---", "configs:", f"- config_name: {inside if inside != 'data' else 'default'}", "  data_files:"]
            for split, columns in splits.items():
                metadata = {b"huggingface": json.dumps({"info": {"features": classes}}).encode()}
                table = pa.table(columns).replace_schema_metadata(metadata)
                pq.write_table(table, root / inside / f"{split}-00000-of-00001.parquet")
                card.append(f"  - {{split: {split}, path: {inside}/{split}-*}}")
            (root / "README.md").write_text("\n".join([*card, "---", ""]))
            self.hubs.append(FakeHub(root, repository, REVISION))

    def respond(self, request):
        return next((hub for hub in self.hubs if f"/datasets/{hub.repo}" in request.path), self.hubs[0]).respond(
            request
        )


@pytest.mark.slow
def test_each_preset_reads_the_records_of_its_data_set(tmp_path):
    asked = [(name, "train") for name in SETS] + [("sst2", "test")]
    with SeveralHubs(tmp_path / "hub") as server:
        environment = {
            **os.environ, "HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1",
            "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        }  # fmt: skip
        command = [sys.executable, "-c", READER, json.dumps(asked), REVISION, str(tmp_path / "work")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert {name: results[f"{name}/train"] for name in SETS} == {name: [row] for name, row in EXPECTED.items()}
    assert "row 1, column 'label': -1 is none of the 2 classes (a split without labels?)" in results["sst2/test"]
    assert not list((tmp_path / "work").iterdir())  # what was fetched is removed
